"""Programs of the tests that run on the libraries of `mtp-gguf build-server`, or on the stock ones.

llama_cpp loads one set of libraries for a process, so each set has a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_gguf.server.build import find_build
from mtp_gguf.server.find import VARIABLE

LIBRARIES = "LLAMA_CPP_LIB_PATH"


def patched_libraries() -> Path:
    """The folder of the libraries with our patches; skips the test where there is none."""
    stated = os.environ.get(VARIABLE)
    built = find_build()
    if stated:
        return Path(stated).resolve().parent
    if not built:
        pytest.skip(f"no patched llama.cpp: run `mtp-gguf build-server`, or set {VARIABLE}")
    return built.libraries


def has_kernels() -> bool:
    """Whether the patches' kernels can run on this CPU, asked of Linux and not of them; else they
    should.
    """
    cpuinfo = Path("/proc/cpuinfo")
    return not cpuinfo.exists() or not {"avx2", "asimddp"}.isdisjoint(cpuinfo.read_text().split())


def run_on(
    libraries: Path | None, module: str, *words: object, timeout: float, **environment: str
) -> str:
    """Run a module beside this one on `libraries`, None for the stock ones; what it prints."""
    return python_on(libraries, "-m", module, *words, timeout=timeout, **environment)


def python_on(libraries: Path | None, *words: object, timeout: float, **environment: str) -> str:
    """Run Python on `libraries`, None for the stock ones, beside this module; what it prints.

    No setting of ggml's is handed on but those in `environment`.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GGML_") and k != LIBRARIES}
    if libraries:
        kept[LIBRARIES] = str(libraries)
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**kept, **environment},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
