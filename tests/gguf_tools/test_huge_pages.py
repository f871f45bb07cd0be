"""Files come into the system's cache in pages of 2 MiB."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.output import OutputFile
from mtp_gguf.gguf_tools.machine import huge_pages
from mtp_gguf.gguf_tools.machine.huge_pages import read_in_huge_pages
from support.cached_pages import MIB, check_in_huge_pages, in_huge_pages, in_small_pages, mapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such pages")

SIZE = 24 * MIB + 777
CONTENTS = np.random.default_rng(1).bytes(SIZE)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return in_small_pages(tmp_path / "small", CONTENTS)


@pytest.mark.parametrize("part", [4 * MIB, 1 << 30])
@pytest.mark.parametrize("probe", [2 * MIB, 1 << 30])
def test_a_file_in_small_pages_is_read_again(
    part: int, probe: int, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_PART", part)
    monkeypatch.setattr(huge_pages, "_PROBE", probe)
    read_in_huge_pages([small])
    check_in_huge_pages(small)
    assert small.read_bytes() == CONTENTS


def test_a_file_that_is_not_in_the_cache(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_MOST_SECONDS", 0)  # nothing is read twice
    with small.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    read_in_huge_pages([small])
    check_in_huge_pages(small)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("free_memory", lambda: SIZE - 1),
        ("_MOST_SECONDS", 1e-6),
        ("_FILE_SYSTEMS", ()),
        ("_POPULATE_READ", 99),  # Linux before 5.14
    ],
)
def test_what_is_left_alone(
    name: str, value: object, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room, a slow disk, another file system, another Linux."""
    monkeypatch.setattr(huge_pages, name, value)
    monkeypatch.setattr(huge_pages, "_PART", 4 * MIB)
    monkeypatch.setattr(huge_pages, "_PROBE", 2 * MIB)
    read_in_huge_pages([small])
    assert in_huge_pages(small) < 0.2
    assert small.read_bytes() == CONTENTS


def test_pages_that_another_has_mapped(small: Path) -> None:
    with mapped(small) as other:
        assert other[:SIZE] == CONTENTS
        read_in_huge_pages([small])
        assert other[:SIZE] == CONTENTS
        assert in_huge_pages(small) < 0.2


@pytest.mark.parametrize("kind", ["missing", "empty", "folder"])
def test_what_is_no_file_of_weights(kind: str, tmp_path: Path) -> None:
    """Whoever loads it says what is wrong."""
    path = tmp_path / kind
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    read_in_huge_pages([path])


@pytest.mark.parametrize("part", [4096, 3 * MIB + 5])
def test_what_is_written_is_in_huge_pages(part: int, small: Path, tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out", SIZE) as output:
        for at in reversed(range(0, SIZE, part)):
            output.write(at, CONTENTS[at : at + part])
        output.commit()
    check_in_huge_pages(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == CONTENTS


def test_what_is_written_without_room_for_it(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages would only push others out of the cache."""
    monkeypatch.setattr(huge_pages, "free_memory", lambda: SIZE - 1)
    with OutputFile(tmp_path / "out", SIZE) as output:
        output.write(0, CONTENTS[:MIB])
        assert in_huge_pages(output.partial) == 0
