"""Builds the libraries in C that tests preload into programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def build(name: str, folder: Path) -> Path:
    """Compile support/`name`.c into `folder`; skips the test where that cannot be done."""
    if sys.platform != "linux":
        pytest.skip("libraries are preloaded the Linux way")
    if "LD_PRELOAD" in os.environ:
        pytest.skip("a sanitizer is preloaded")
    source, out = Path(__file__).with_name(f"{name}.c"), folder / f"{name}.so"
    command: list[str | Path] = ["cc", "-shared", "-fPIC", "-O1", "-o", out, source, "-ldl"]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("no C compiler")
    return out
