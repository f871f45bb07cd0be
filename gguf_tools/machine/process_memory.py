"""The memory that this process can still allocate, and the most that it has used."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from .control_groups import ControlGroup, own_groups

# The memory files of a control group: limit, usage, and the page cache within the usage, which the
# kernel reclaims when memory runs short. `file` of cgroup v2 also counts shared memory, which
# cannot be reclaimed; the two lists of file pages do not.
_CGROUP_V2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_CGROUP_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def free_memory() -> int:
    """Bytes that this process can still allocate without swapping.

    Page cache counts as free, for the machine and for each control group (container) around the
    process.
    """
    known = [psutil.virtual_memory().available]
    for group in own_groups("memory"):
        known += _group_memory(group)
    return max(0, min(known))


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes.

    On Linux ru_maxrss includes the memory of the process that started this one, so this uses the
    kernel's high-water mark of the process itself if it is available.
    """
    with suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # noqa: PLC0415  (not everywhere)

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _group_memory(group: ControlGroup) -> Iterator[int]:
    """Free memory of a control group if it has a limit."""
    limit_file, used_file, cache_keys = _CGROUP_V2 if group.unified else _CGROUP_V1
    with suppress(OSError, ValueError):  # no such group; "max" is no limit
        limit = int((group.folder / limit_file).read_text("ascii"))
        used = int((group.folder / used_file).read_text("ascii"))
        yield limit - used + _page_cache(group.folder / "memory.stat", cache_keys)


def _page_cache(stat: Path, keys: tuple[str, ...]) -> int:
    with suppress(OSError):
        lines = (line.split() for line in stat.read_text("ascii").splitlines())
        return sum(int(words[1]) for words in lines if words[0] in keys)
    return 0
