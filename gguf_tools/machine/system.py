"""The machine that this process runs on: its processor, its cores and its folders.

The build of the package imports this file, so it uses only the standard library.
"""

import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .processors import usable_cores

# The kernels on the CPU: llama.cpp's own, or those of native/kernels, plugged into libraries with
# patches/, which use them best, or into others.
STOCK, PATCHED, PLUGGED_IN = KERNELS = ("stock", "patches/", "plugged in")

MAX_THREADS = 512  # that an option accepts
# The largest context that an option accepts: four times the family's training context.
LARGEST_CONTEXT = 1 << 20

# The instructions that the kernels need, by machine, named as Linux names them.
_NEEDED = {"x86_64": "avx2", "AMD64": "avx2", "aarch64": "asimddp", "arm64": "asimddp"}
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """The machine that something was measured on.

    cpu: name of the processor. cores: logical cores that this process may use. kernels: one of
    KERNELS. device: ggml's name of the device that runs the model, "CPU" without a GPU.
    """

    cpu: str
    cores: int
    kernels: str
    device: str = "CPU"

    def differs_in(self, other: "Machine") -> str | None:
        """The first difference between two machines, for a note; None if there is none."""
        for name in ("cpu", "cores", "kernels", "device"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} {theirs!r} instead of {mine!r}"
        return None


def this_machine(kernels: str, device: str = "CPU") -> Machine:
    """The machine that this process runs on."""
    return Machine(_cpu_name(), usable_cores(), kernels, device)


def runs_kernels() -> bool:
    """Whether this processor has the instructions that the kernels of native/kernels need.

    AVX2 on x86-64, dot products on ARM; they are assumed if the system does not list them.
    """
    feature = _NEEDED.get(platform.machine())
    return feature is not None and (not _CPUINFO.exists() or feature in cpu_features().split())


def cpu_features() -> str:
    """The instruction sets of this CPU, or its name if the system does not list them."""
    with suppress(OSError):
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return value.strip()
    return platform.processor()


def cache_root() -> Path:
    """Our part of the user's cache folder (XDG base directory rules); it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtp-gguf"


def shared_library(name: str) -> str:
    """The file name of a shared library on this system, such as libllama.so for llama."""
    if sys.platform == "win32":
        return f"{name}.dll"
    return f"lib{name}.{'dylib' if sys.platform == 'darwin' else 'so'}"


def busy_machine() -> str | None:
    """Return a note if other programs use many of the processors; None if not, or unknown.

    The load is the mean of a minute, in which this process may have used all of its own.
    """
    processors = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load - usable_cores() <= 0.5 * processors:
        return None
    return (
        f"other programs keep this machine busy (load {load:.1f}, {processors} processors), so "
        "measuring takes longer and its results are unreliable; repeat it when they are done"
    )


class CoreMeter:
    """Processor time of this process (all threads) since the meter was created."""

    def __init__(self) -> None:
        self.cores = usable_cores()
        self._wall, self._busy = time.monotonic(), time.process_time()

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        return time.monotonic() - self._wall

    @property
    def busy_seconds(self) -> float:
        """Processor time so far."""
        return time.process_time() - self._busy

    def share(self) -> float:
        """Utilization of the cores: 1.0 if all of them were busy all the time."""
        seconds = self.seconds
        return self.busy_seconds / (seconds * self.cores) if seconds > 0 else 0.0


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
