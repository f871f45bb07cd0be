"""The processors that a process may use, by its affinity, its containers and the kinds of cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import pytest

from mtp_gguf.gguf_tools.machine import control_groups, processors

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems list their cores otherwise"
)

SAY = (
    "from mtp_gguf.gguf_tools.machine.processors import (are_limited, "
    "computing_threads, usable_cores)\n"
    "print(usable_cores(), computing_threads(), are_limited())"
)


class Counts(Protocol):
    def __call__(self, cpus: int, files: Mapping[str, str]) -> tuple[int, int, bool]: ...


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Usable cores, threads and whether there is a limit, on a machine of 16 processors.

    cpus: those that the process may run on. files: of the system, beneath its folders.
    """
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_MOUNTED", tmp_path / "cgroup")
    monkeypatch.setattr(processors, "_PROCESSORS", tmp_path / "cpu")
    monkeypatch.setattr(processors, "_PERFORMANCE", tmp_path / "cpu_core")
    monkeypatch.setattr("os.cpu_count", lambda: 16)

    def measure(cpus: int, files: Mapping[str, str]) -> tuple[int, int, bool]:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cpus)))
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "ascii")
        return processors.usable_cores(), processors.computing_threads(), processors.are_limited()

    return measure


def siblings(pairs: Mapping[int, str]) -> dict[str, str]:
    return {
        f"cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n" for cpu, text in pairs.items()
    }


TWO_THREADS = siblings({cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)})
# Four cores with two threads each, and eight efficiency cores
HYBRID = siblings(
    {
        **{cpu: f"{cpu & ~1}-{cpu | 1}" for cpu in range(8)},
        **{cpu: f"{cpu}" for cpu in range(8, 16)},
    }
) | {"cpu_core": "0-7\n"}
BIG_LITTLE = {
    f"cpu/cpu{cpu}/cpu_capacity": f"{capacity}\n"
    for cpu, capacity in enumerate([402] * 4 + [871] * 3 + [1024])
}


@pytest.mark.parametrize(
    ("cpus", "files", "expected"),
    [
        (16, {}, (16, 16, False)),
        (16, TWO_THREADS, (16, 8, False)),
        (6, TWO_THREADS, (6, 6, True)),
        (16, HYBRID, (16, 4, False)),
        (3, HYBRID, (3, 2, True)),
        (8, BIG_LITTLE, (8, 4, True)),
        (4, BIG_LITTLE, (4, 4, True)),
        (16, {"own": "0::/\n", "cgroup/cpu.max": "max 100000\n"}, (16, 16, False)),
        (16, {"own": "0::/\n", "cgroup/cpu.max": "250000 100000\n"}, (3, 3, True)),
        (16, {"own": "0::/\n", "cgroup/cpu.max": "20000 100000\n"}, (1, 1, True)),
        (16, {"own": "0::/\n", "cgroup/cpu.max": "?\n"}, (16, 16, False)),
        # The least of a group and those around it
        (
            16,
            {
                "own": "0::/a/b\n",
                "cgroup/a/cpu.max": "400000 100000\n",
                "cgroup/a/b/cpu.max": "900000 100000\n",
            },
            (4, 4, True),
        ),
        (
            16,
            {
                "own": "4:memory:/x\n1:cpu,cpuacct:/\n",
                "cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            (2, 2, True),
        ),
    ],
)
def test_by_cores_affinity_and_quota(
    cpus: int, files: dict[str, str], expected: tuple[int, int, bool], counts: Counts
) -> None:
    assert counts(cpus, files) == expected


def test_of_this_process() -> None:
    """A process that may run on a single processor."""
    cpu = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, [{cpu}])\n{SAY}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", str((os.cpu_count() or 1) > 1)]
