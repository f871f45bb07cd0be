"""Free memory according to the machine and the control groups (containers) of a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mtp_gguf.gguf_tools.machine import control_groups, process_memory

MACHINE = 4_096_000  # bytes that are free in it
MIB = 1 << 20

Measure = Callable[..., int]


@pytest.fixture
def free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Free memory with these control groups, and this much free in the machine."""
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_MOUNTED", tmp_path / "cgroup")

    def measure(files: Mapping[str, str], machine: int = MACHINE) -> int:
        memory = SimpleNamespace(available=machine)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "ascii")
        return process_memory.free_memory()

    return measure


def group(limit: object, used: int, stat: str = "", folder: str = "cgroup") -> dict[str, str]:
    """The files of a control group, version 2."""
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4_096_000),
        ({"own": "0::/\n"}, 4_096_000),
        ({"own": "0::/\n", **group("max", 1000)}, 4_096_000),
        ({"own": "0::/\n", **group(5_000_000, 1_000_000)}, 4_000_000),
        ({"own": "0::/\n", **group(5_000_000, 6_000_000)}, 0),
        ({"own": "0::/\n", **group("?", 0)}, 4_096_000),
        # A group outside of the container's own: the mount point shows the container's.
        ({"own": "0::/host/pod\n", **group(5_000_000, 1_000_000)}, 4_000_000),
        ({"own": "0::/../pod\n", **group(5_000_000, 1_000_000)}, 4_000_000),
    ],
)
def test_of_machine_and_group(files: dict[str, str], expected: int, free: Measure) -> None:
    assert free(files) == expected


def test_page_cache_of_a_container_is_free(free: Measure) -> None:
    """A limit of 8 GiB of which 7.9 GB are cached files: all but the rest can be taken."""
    cached = 7_900_000_000
    stat = f"anon 1000\nfile {cached + 7}\nshmem 7\nactive_file {cached - 99}\ninactive_file 99\n"
    groups = {"own": "0::/\n", **group(8 << 30, cached + 300 * MIB, stat)}
    assert free(groups, machine=99 << 30) == (8 << 30) - 300 * MIB


def test_shared_memory_does_not_count_as_free(free: Measure) -> None:
    """`file` counts it as page cache; a model in /dev/shm stays where it is."""
    files = {"own": "0::/\n"}
    stat = "file 900000\nshmem 900000\nactive_file 0\ninactive_file 0\n"
    assert free({**files, **group(1_000_000, 950_000, stat)}) == 50_000


def test_the_tightest_group_around_the_process_counts(free: Measure) -> None:
    files = {"own": "0::/outer/inner\n"}
    files |= group("max", 10, folder="cgroup/outer/inner")
    files |= group(700_000, 100_000, folder="cgroup/outer")
    assert free(files) == 600_000


def test_version_1(free: Measure) -> None:
    files = {
        "own": "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n",
        "cgroup/memory/a/memory.limit_in_bytes": "1000000\n",
        "cgroup/memory/a/memory.usage_in_bytes": "900000\n",
        "cgroup/memory/a/memory.stat": "active_file 1\ntotal_active_file 3000\n"
        "total_inactive_file 20\n",
        "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cgroup/memory/memory.usage_in_bytes": "5000000\n",
    }
    assert free(files) == 103_020


def test_of_this_machine() -> None:
    assert 0 < process_memory.free_memory() < 1 << 50
