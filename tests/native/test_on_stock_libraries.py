"""Runs the tests marked `stock` on llama-cpp-python's own libraries; all run on the fast ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_gguf.native.runtime import VARIABLE, loaded_library, native_library, runtime
from support.llama_libraries import FAST, STOCK


@pytest.mark.stock
def test_the_run_is_on_the_libraries_that_were_asked_for() -> None:
    asked = os.environ.get(VARIABLE) or FAST
    if asked in (FAST, STOCK):
        assert runtime.kind == asked
    shipped = native_library("mtp").parent / "fast"
    assert (loaded_library("llama").parent == shipped) == (runtime.kind == FAST)


@pytest.mark.thorough
@pytest.mark.skipif(runtime.kind == STOCK, reason="this very run is on stock libraries")
def test_the_subset_that_is_marked_so() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "stock and not slow", Path(__file__).parent],
        cwd=Path(__file__).parent,
        env={**os.environ, VARIABLE: STOCK},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
