"""Which machine this is, as far as measured speeds depend on it."""

import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# What multiplies a few rows on the CPU: llama.cpp's own kernels, or those of patches/.
STOCK, PATCHED = KERNELS = ("stock", "patches/")

# Of a command line: four times what models of this family are trained for, and memory enough.
LARGEST_CONTEXT = 1 << 20

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # of a container, as cgroup v2 shows it inside


@dataclass(frozen=True)
class Machine:
    """Where something was measured.

    cpu: the processor's own name. cores: logical ones that this process may use. kernels: one of
    KERNELS. device: ggml's name of where the model runs, "CPU" without a GPU.
    """

    cpu: str
    cores: int
    kernels: str
    device: str = "CPU"

    def differs_in(self, other: "Machine") -> str | None:
        """What sets two machines apart, for a note; None when nothing does."""
        for name in ("cpu", "cores", "kernels", "device"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} {theirs!r} instead of {mine!r}"
        return None


def this_machine(kernels: str, device: str = "CPU") -> Machine:
    """The machine that this process runs on."""
    return Machine(_cpu_name(), usable_cores(), kernels, device)


def free_memory() -> int | None:
    """Bytes that this process could still take, page cache given up; None where nobody says."""
    known = []
    with suppress(OSError, ValueError, IndexError):
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        known += [int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # a container's limit, "max" where there is none
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        known.append(limit - int((_CGROUP / "memory.current").read_text(encoding="ascii")))
    return max(0, min(known)) if known else None


def usable_cores() -> int:
    """Logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _cpu_name() -> str:
    try:
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware", "Model") and value.strip():
                return " ".join(value.split())
    except OSError:
        pass
    if platform.system() == "Darwin":
        try:
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(
                asked, capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return platform.processor() or platform.machine() or "unknown"
