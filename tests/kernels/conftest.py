"""The sweep of `sweep.py` on the patched libraries, once for each instruction set."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from support import llama_libraries
from support.kernels.results import Arrays, Sweep


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The folder of ggml's libraries with our patches."""
    return llama_libraries.patched_libraries()


@pytest.fixture(scope="session")
def has_kernels() -> bool:
    """Whether our kernels can run here."""
    return llama_libraries.has_kernels()


@pytest.fixture(scope="session")
def sweep(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """See Sweep."""
    out = tmp_path_factory.mktemp("kernels")

    @cache
    def run(lanes: str) -> Arrays:
        environment = {"GGML_CPU_LANES": lanes} if lanes else {}
        file = out / f"{lanes or 'best'}.npz"
        llama_libraries.run_on(
            libraries, "kernels.sweep", libraries, file, timeout=300, **environment
        )
        with np.load(file) as arrays:
            return dict(arrays)

    def with_lanes(lanes: str) -> Arrays:
        return run(lanes)

    return with_lanes
