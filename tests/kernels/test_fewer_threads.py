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


def simulate(program: Path, *stretches: tuple[int, int, int]) -> list[dict[int, int]]:
    """Graphs of each number of threads in each stretch: milliseconds, percent lost, threads."""
    lines = "\n".join(" ".join(map(str, stretch)) for stretch in stretches)
    done = subprocess.run([program], input=lines, check=True, capture_output=True, text=True)
    return [
        {int(n): int(count) for n, count in (pair.split(":") for pair in line.split())}
        for line in done.stdout.splitlines()
    ]


def test_a_quiet_machine_keeps_all_threads(program: Path) -> None:
    assert simulate(program, (1000, 5, 8), (1000, 50, 2)) == [{8: 1000}, {2: 1000}]


def test_all_are_tried_less_and_less_often(program: Path) -> None:
    [first, later] = simulate(program, (1000, 60, 2), (10_000, 60, 2))
    assert first[2] < 10  # after 20, 40, 80, … milliseconds
    assert later[2] < 10  # each 1.28 seconds
    assert later[2] > 5


def test_a_machine_that_is_quiet_again_gets_all_threads_back(program: Path) -> None:
    [_, first, later] = simulate(program, (10_000, 60, 8), (3_000, 0, 8), (1000, 0, 8))
    assert first[8] > 1000
    assert later == {8: 1000}


def test_threads_are_halved_as_often_as_that_helps(program: Path) -> None:
    [found] = simulate(program, (1000, 60, 8))
    assert max(found, key=found.__getitem__) == 1
    assert set(found) == {8, 4, 2, 1}


def test_one_thread_is_left_alone(program: Path) -> None:
    assert simulate(program, (100, 90, 1)) == [{1: 100}]
