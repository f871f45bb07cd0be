"""Synthetic models with a known acceptance rate, as in the tests of the native library."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest


def _native() -> Any:
    path = Path(__file__).parents[1] / "native" / "conftest.py"
    spec = spec_from_file_location("native_conftest", path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def dial(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Called with a hit rate and more, gives the path of a GGUF; see tests/native/conftest.py."""
    native = _native()
    return native.Dial(native.Models(tmp_path_factory.mktemp("models")))
