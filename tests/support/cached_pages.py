"""Files in the system's cache in pages of 4 KiB, and how much of a file is in those of 2 MiB."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1 << 20


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as found:
        yield found


def in_huge_pages(path: Path) -> float:
    """The share of the file that a process maps in huge pages."""
    with mapped(path) as file:
        assert sum(file[at] for at in range(0, len(file), 4096)) >= 0
        maps = Path("/proc/self/smaps").read_text()
        own = next(part for part in re.split(r"\n(?=[0-9a-f]+-)", maps) if str(path) in part)
        return int(re.findall(r"FilePmdMapped: +(\d+)", own)[0]) * 1024 / len(file)


def _write(path: Path, contents: bytes, part: int) -> None:
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(contents), part):
            file.write(contents[at : at + part])
        os.fsync(file.fileno())


def _skip_without_huge_pages(path: Path, contents: bytes, least: float) -> None:
    """Skips where a new file `path` of these contents has less than this share in them."""
    _write(path, contents, 2 * MIB)
    share = in_huge_pages(path)
    path.unlink()
    if share < least:
        pytest.skip("this file system has no huge pages, or none now; /tmp in ext4 or XFS has")


def check_in_huge_pages(path: Path) -> None:
    """Fails unless over 90 % of the file is in them; skips if a new file gets no more now."""
    share = in_huge_pages(path)
    if share <= 0.9:
        _skip_without_huge_pages(path.with_suffix(".huge"), path.read_bytes(), 0.9)
    assert share > 0.9


def in_small_pages(path: Path, contents: bytes) -> Path:
    """Write a file in small parts; skips where there are no huge pages to be had."""
    _skip_without_huge_pages(path.with_suffix(".huge"), contents, 0.5)
    _write(path, contents, 4096)
    assert in_huge_pages(path) == 0
    return path
