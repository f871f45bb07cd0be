"""Runs programs of the tests on one set of llama.cpp's libraries, each in a subprocess.

llama_cpp can load only one set of libraries in a process: FAST (shipped by the package), STOCK
(those of llama-cpp-python) or those of a folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native.runtime import VARIABLE, native_library

FAST, STOCK = "fast", "stock"
LIBRARIES = "LLAMA_CPP_LIB_PATH"
CHOICE = "MTP_GGUF_KERNELS"  # the variable that chooses the kernels


def patched_libraries() -> Path:
    """The folder of the libraries with our patches, that of MTP_GGUF_LIBS if it names one.

    Skips the test where there is none.
    """
    stated = os.environ.get(VARIABLE, "")
    if stated not in ("", FAST, STOCK):
        return Path(stated)
    folder = native_library("mtp").parent / "fast"
    if not folder.is_dir():
        pytest.skip("mtp-gguf was installed without the patched libraries")
    return folder


def stock_libraries() -> Path:
    """The folder of llama-cpp-python's own libraries."""
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"


def has_kernels() -> bool:
    """Whether our kernels can run on this CPU, asked of Linux and not of them; else they should."""
    cpuinfo = Path("/proc/cpuinfo")
    return not cpuinfo.exists() or not {"avx2", "asimddp"}.isdisjoint(cpuinfo.read_text().split())


def skip_where_stock_crashes(model: Path) -> None:
    """Skip a test that needs the stock libraries without our kernels if they crash by themselves.

    What GCC 12 compiles for CPUs with AMX does (patches/upstream/0015).
    """
    code = "import llama_cpp, sys; llama_cpp.Llama(sys.argv[1], verbose=False).eval([1, 2])"
    done = subprocess.run([sys.executable, "-c", code, model], check=False, timeout=120)
    if done.returncode == -signal.SIGSEGV and "amx_int8" in Path("/proc/cpuinfo").read_text():
        pytest.skip("llama-cpp-python, as it was compiled here, crashes on CPUs with AMX")


def run_on(
    libraries: Path | str, module: str, *words: object, timeout: float, **environment: str
) -> str:
    """Run a module of this folder on `libraries`; what it prints."""
    return python_on(libraries, "-m", f"support.{module}", *words, timeout=timeout, **environment)


def python_on(libraries: Path | str, *words: object, timeout: float, **environment: str) -> str:
    """Run Python on `libraries`, where it finds `support`; what it prints.

    No setting of ggml's or of our kernels is handed on but those in `environment`.
    """
    settings = ("GGML_", CHOICE)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(settings)}
    if isinstance(libraries, Path):  # for programs that import llama_cpp themselves, too
        kept |= {LIBRARIES: str(libraries), VARIABLE: ""}
    else:
        kept[VARIABLE] = libraries
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**kept, **environment},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def result_of(
    libraries: Path, module: str, *words: object, timeout: float = 600, **environment: str
) -> Any:
    """What a module of this folder prints on its last line, as JSON."""
    printed = run_on(libraries, module, *words, timeout=timeout, **environment)
    return json.loads(printed.splitlines()[-1])


def answer(libraries: Path | str, code: str, *words: object, **environment: str) -> Any:
    """What the program `code` prints on its last line, as JSON."""
    printed = python_on(libraries, "-c", code, *words, timeout=600, **environment)
    return json.loads(printed.splitlines()[-1])


def walk(
    libraries: Path,
    model: Path,
    *,
    seed: int,
    steps: int,
    tokens: int,
    place: tuple[object, ...] = (),
    timeout: float = 3600,
    **environment: str,
) -> Any:
    """What `rollback_walk` counted; place: its last arguments."""
    words = (model, seed, steps, tokens, *place)
    return result_of(libraries, "rollback_walk", *words, timeout=timeout, **environment)
