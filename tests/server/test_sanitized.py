"""The patched llama.cpp under AddressSanitizer and UndefinedBehaviorSanitizer.

    pytest -m slow tests/server/test_sanitized.py

builds its libraries with both, then runs the tests of the kernels and random walks of rollbacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native.runtime import VARIABLE
from mtp_gguf.server.build import cmake_options
from mtp_gguf.server.patches import apply, read_patches
from mtp_gguf.server.upstream_source import fetch_archive, unpack_llama_cpp
from support.llama_libraries import walk
from support.models import Files
from support.sanitizers import needs_sanitizers, sanitizer_environment

pytestmark = [pytest.mark.slow, needs_sanitizers]

# -fno-sanitize=vptr: llama_cpp loads the libraries one by one, and their types do not meet
# -fexpensive-optimizations: contracts products and sums, as without sanitizers; the bits of ggml's
# tiled product, which tests/kernels compare, depend on it
FLAGS = (
    "-O1 -fexpensive-optimizations -g1 -DNDEBUG "
    "-fsanitize=address,undefined -fno-sanitize=vptr -fno-omit-frame-pointer"
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the libraries."""
    source = tmp_path_factory.mktemp("sanitized") / "llama.cpp"
    unpack_llama_cpp(fetch_archive(), source)
    apply(read_patches(), source)
    objects = source / "build"
    languages = ("C", "CXX")
    options = cmake_options(
        [f"-DCMAKE_{language}_FLAGS_RELEASE={FLAGS}" for language in languages]
        + ["-DCMAKE_C_COMPILER=gcc", "-DCMAKE_CXX_COMPILER=g++", "-DGGML_RPC=OFF"]
    )
    for command in (
        ["cmake", "-S", str(source), "-B", str(objects), *options],
        ["cmake", "--build", str(objects), "--target", "llama", "ggml", "--parallel", "2"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return objects / "bin"


def test_kernels(libraries: Path) -> None:
    # -s: a report is written as the process dies
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-n0", "-p", "no:cacheprovider", "kernels"],
        env=os.environ | sanitizer_environment() | {VARIABLE: str(libraries)},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("spec", "steps", "tokens"),
    [("dense-3v", 2000, 3), ("dense-3v", 1000, 8), ("moe-fused", 500, 2)],
)
def test_random_rollbacks(
    libraries: Path, files: Files, spec: str, steps: int, tokens: int
) -> None:
    model = files("plain", spec)
    environment: dict[str, Any] = {**sanitizer_environment()}
    walk(libraries, model, seed=7, steps=steps, tokens=tokens, **environment)
