"""How many processors this process may use, and with how many threads to compute.

The build of the package imports this file, so it uses only the standard library.
"""

import math
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from .control_groups import own_groups

_PROCESSORS = Path("/sys/devices/system/cpu")
# Intel's CPUs with two kinds of cores list the processors of the performance cores here.
_PERFORMANCE = Path("/sys/devices/cpu_core/cpus")
# On ARM a core whose capacity is less than this share of the largest one is an efficiency core:
# those of phones and boards have a quarter to a half, middle cores 0.7 and more.
_CAPACITY = 0.6


def usable_cores() -> int:
    """Logical processors that this process may use: by its affinity and by quotas of containers."""
    quota = _quota()
    allowed = len(_affinity())
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def are_limited() -> bool:
    """Whether this process may use fewer processors than the machine has."""
    return usable_cores() < (os.cpu_count() or 1)


def computing_threads() -> int:
    """Threads that compute fastest: one for each usable performance core.

    The threads of llama.cpp wait for each other at every operation, so a thread on an efficiency
    core, on a core that has one already, or beyond the quota of a container delays the others.
    """
    return max(1, min(_performance_cores(), usable_cores()))


def _affinity() -> set[int]:
    """The processors that the system may run this process on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _quota() -> float | None:
    """The processors' worth of time that this process's control groups allow; None if all of it."""
    known = []
    for group in own_groups("cpu"):
        with suppress(OSError, ValueError):  # no such file; "max" and -1 are no limit
            if group.unified:
                time, period = (group.folder / "cpu.max").read_text("ascii").split()
            else:
                time, period = (
                    (group.folder / f"cpu.cfs_{name}_us").read_text("ascii")
                    for name in ("quota", "period")
                )
            if int(time) > 0 and int(period) > 0:
                known.append(int(time) / int(period))
    return min(known, default=None)


def _performance_cores() -> int:
    """Physical cores of the fast kind among the processors of this process."""
    processors = _affinity()
    if sys.platform == "darwin":
        return _fast_cores_of_macos() or len(processors)
    if not sys.platform.startswith("linux"):
        import psutil  # noqa: PLC0415  (the build does without)

        return psutil.cpu_count(logical=False) or len(processors)
    with suppress(OSError, ValueError):
        processors = processors & _parsed(_PERFORMANCE.read_text("ascii")) or processors
    capacity = {cpu: _capacity(cpu) for cpu in processors}
    most = max(capacity.values())
    fast = [cpu for cpu, found in capacity.items() if found >= _CAPACITY * most]
    return len({_siblings(cpu) for cpu in fast})


def _siblings(cpu: int) -> frozenset[int]:
    """The logical processors of a processor's core; itself if that is unknown."""
    with suppress(OSError, ValueError):
        topology = _PROCESSORS / f"cpu{cpu}" / "topology"
        return frozenset(_parsed((topology / "thread_siblings_list").read_text("ascii")))
    return frozenset([cpu])


def _capacity(cpu: int) -> int:
    with suppress(OSError, ValueError):
        return int((_PROCESSORS / f"cpu{cpu}" / "cpu_capacity").read_text("ascii"))
    return 0


def _parsed(listed: str) -> set[int]:
    """The numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in listed.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _fast_cores_of_macos() -> int:
    for name in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"):
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
        if done.stdout.strip().isdigit():
            return int(done.stdout)
    return 0
