"""The sweep of `sweep.py`, once for each instruction set, with our kernels plugged into the patched
libraries and into those of llama-cpp-python.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mtp_gguf.native.runtime import native_library
from support import llama_libraries
from support.kernels.results import Arrays, MakeSweep, Sweep


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The folder of ggml's libraries with our patches."""
    return llama_libraries.patched_libraries()


@pytest.fixture(scope="session")
def has_kernels() -> bool:
    """Whether our kernels can run here."""
    return llama_libraries.has_kernels()


def make_sweep(out: Path, libraries: Path) -> Sweep:
    """See Sweep."""

    @cache
    def run(lanes: str) -> Arrays:
        environment = {llama_libraries.CHOICE: lanes} if lanes else {}
        file = out / f"{lanes or 'best'}.npz"
        words = (libraries, file, native_library("mtp_kernels"))
        llama_libraries.run_on(libraries, "kernels.sweep", *words, timeout=300, **environment)
        with np.load(file) as arrays:
            return dict(arrays)

    def with_lanes(lanes: str) -> Arrays:
        return run(lanes)

    return with_lanes


@pytest.fixture(scope="session")
def plugged_in(tmp_path_factory: pytest.TempPathFactory) -> MakeSweep:
    """See MakeSweep."""

    def make(libraries: Path) -> Sweep:
        return make_sweep(tmp_path_factory.mktemp("plugged"), libraries)

    return make


@pytest.fixture(scope="session")
def patched_sweep(plugged_in: MakeSweep, libraries: Path) -> Sweep:
    """The sweep on the patched libraries."""
    return plugged_in(libraries)


@pytest.fixture(scope="session")
def stock_sweep(plugged_in: MakeSweep) -> Sweep:
    """The sweep on llama-cpp-python's libraries."""
    return plugged_in(llama_libraries.stock_libraries())


@pytest.fixture(params=["patched", pytest.param("stock", marks=pytest.mark.thorough)])
def sweep(request: pytest.FixtureRequest) -> Sweep:
    """See Sweep."""
    found: Sweep = request.getfixturevalue(f"{request.param}_sweep")
    return found
