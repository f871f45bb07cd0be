"""Converted files, made once a session, and a folder to put results into."""

from __future__ import annotations

import pytest

from surgery.models import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))
