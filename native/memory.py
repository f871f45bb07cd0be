"""How much memory a process may still take."""

import os
import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Bytes that can be taken without swapping, page cache counted as free; None if unknown.

    Linux says it (MemAvailable, and a container's limit); elsewhere it is what the machine has.
    """
    try:
        match = re.search(r"^MemAvailable: *(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match is None:
        return _physical()
    free = int(match[1]) << 10
    limit, used = _number(_GROUP / "memory.max"), _number(_GROUP / "memory.current")
    if limit is None or used is None:
        return free
    return min(free, max(limit - used, 0) + _cached())


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _number(path: Path) -> int | None:
    """The number that a file of the control group holds; None for `max` and for no file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _cached() -> int:
    """Page cache of the control group, which it gives up when memory runs short."""
    try:
        found = re.search(r"^file (\d+)$", (_GROUP / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
