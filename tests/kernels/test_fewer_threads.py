"""Graphs get fewer threads while others need the CPUs, by a simulated clock."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

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
