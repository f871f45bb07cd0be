"""Which machine this is, as far as measured speeds depend on it."""

import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# What multiplies a few rows on the CPU: llama.cpp's own kernels, or those of patches/.
STOCK, PATCHED = KERNELS = ("stock", "patches/")

_CPUINFO = Path("/proc/cpuinfo")


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
