"""Converted files, made once a session."""

from __future__ import annotations

import pytest
import torch
from surgery.models import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Products this small gain nothing from threads, and lose much where others run as well."""
    torch.set_num_threads(1)
