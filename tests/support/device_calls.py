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
    "busy_least",
    "busy_most",
)


def read_counts(written: Path) -> list[dict[str, int]]:
    """What was counted before each graph of the process that the variable DEVICE_CALLS was for."""
    lines = [map(int, line.split()) for line in written.read_text().splitlines()]
    return [dict(zip(NAMES, line, strict=True)) for line in lines]
