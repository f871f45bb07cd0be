"""What programs exchange with ggml's devices, counted by a library that is preloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
NAMES = (
    "cpu_graphs",
    "graphs",
    "syncs",
    "bytes_up",
    "bytes_down",
    "bytes_moved",
    "ups",
    "downs",
)


def build(folder: Path) -> Path:
    """Compile the library into `folder`; skips the test where that cannot be done."""
    if sys.platform != "linux":
        pytest.skip("libraries are preloaded the Linux way")
    if "LD_PRELOAD" in os.environ:
        pytest.skip("a sanitizer is preloaded")
    out = folder / "device_calls.so"
    command: list[str | Path] = ["cc", "-shared", "-fPIC", "-O1", "-o", out, SOURCE, "-ldl"]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("no C compiler")
    return out


def read_counts(written: Path) -> dict[str, int]:
    """Sums of all processes that wrote into the file that the variable DEVICE_CALLS names."""
    lines = [[int(word) for word in line.split()] for line in written.read_text().splitlines()]
    return dict(zip(NAMES, map(sum, zip(*lines, strict=True)), strict=True))
