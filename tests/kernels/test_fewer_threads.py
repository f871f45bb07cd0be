"""Fewer threads while others need the CPUs: the rule by a simulated clock, and real graphs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from mtp_gguf.native.runtime import native_library
from support import llama_libraries
from support.models import ROOT

SOURCES = ROOT / "native/kernels/src"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    path = tmp_path_factory.mktemp("threads") / "simulate"
    files = [ROOT / "tests/support/kernels/fewer_threads.cpp", SOURCES / "fewer_threads.cpp"]
    command = ["c++", "-std=c++17", f"-I{SOURCES}", *map(str, files), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def simulate(program: Path, *stretches: tuple[int, int, int, int]) -> list[dict[int, int]]:
    """Graphs of each number of threads in each stretch.

    A stretch: milliseconds, percent lost by several threads and by one alone, threads.
    """
    lines = "\n".join(" ".join(map(str, stretch)) for stretch in stretches)
    done = subprocess.run([program], input=lines, check=True, capture_output=True, text=True)
    return [
        {int(n): int(count) for n, count in (pair.split(":") for pair in line.split())}
        for line in done.stdout.splitlines()
    ]


def test_a_quiet_machine_keeps_all_threads(program: Path) -> None:
    found = simulate(program, (1000, 5, 0, 8), (1000, 50, 0, 2))
    assert found == [{8: 1000}, {2: 1000}]


def test_all_are_tried_less_and_less_often(program: Path) -> None:
    [first, later] = simulate(program, (1000, 60, 0, 2), (10_000, 60, 20, 2))
    assert first[2] < 10  # after 20, 40, 80, … milliseconds
    assert 5 < later[2] < 10  # each 1.28 seconds


def test_a_machine_that_is_quiet_again_gets_all_threads_back(program: Path) -> None:
    [_, first, later] = simulate(program, (10_000, 60, 0, 8), (3_000, 0, 0, 8), (1000, 0, 0, 8))
    assert first[8] > 1000
    assert later == {8: 1000}


def test_threads_are_halved_as_often_as_that_helps(program: Path) -> None:
    [found] = simulate(program, (1000, 60, 0, 8))
    assert max(found, key=found.__getitem__) == 1
    assert set(found) == {8, 4, 2, 1}


def test_all_compute_half_of_the_time_where_one_finds_no_cpu_either(program: Path) -> None:
    [found] = simulate(program, (20_000, 60, 40, 2))
    assert 0.4 < found[2] / 20_000 < 0.6


def used_threads(libraries: Path, **environment: str) -> list[int]:
    """How many of two threads compute graphs, in each of which one is late."""
    words = (libraries, native_library("mtp_kernels"))
    printed = llama_libraries.run_on(
        libraries, "kernels.late_threads", *words, timeout=60, **environment
    )
    found: list[int] = json.loads(printed)
    return found


def test_graphs_after_a_late_thread_get_one(libraries: Path, has_kernels: bool) -> None:
    if not has_kernels:
        pytest.skip("this CPU has no AVX2, or no dot products")
    used = used_threads(libraries)
    assert used[0] == 2
    assert 1 in used  # the first late thread may count as one that waited for the disk


def test_graphs_with_ggmls_attention_keep_their_threads(libraries: Path, has_kernels: bool) -> None:
    """Its sums depend on them."""
    if not has_kernels:
        pytest.skip("this CPU has no AVX2, or no dot products")
    assert used_threads(libraries, **{llama_libraries.CHOICE: "MUL_MAT"}) == [2, 2, 2, 2]
