"""What programs exchange with ggml's devices, counted by a library that is preloaded."""

from __future__ import annotations

from pathlib import Path

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


def read_counts(written: Path) -> dict[str, int]:
    """Sums of all processes that wrote into the file that the variable DEVICE_CALLS names."""
    lines = [[int(word) for word in line.split()] for line in written.read_text().splitlines()]
    return dict(zip(NAMES, map(sum, zip(*lines, strict=True)), strict=True))
