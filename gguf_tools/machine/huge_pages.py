"""Files in the system's cache in pages of 2 MiB, which CPUs read faster than those of 4 KiB.

A mapped file is read from that cache. CPUs have few entries for pages of 4 KiB, and their hardware
prefetches within a page only: single tokens of the 0.8B shape on two cores of a Zen 4 are 1.2 to
1.4 times as fast with huge pages. Linux decides on the size when a part of a file comes into the
cache. What is written in small parts, or read with a small read-ahead, is in small pages until
memory runs short. Of the file systems of Linux 6.18, ext4 and XFS map files in huge pages; Btrfs,
tmpfs and overlayfs, on which containers have their own files, do not.
"""

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from .process_memory import free_memory

_PAGE = 2 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14
_FILE_SYSTEMS = (0xEF53, 0x58465342)  # magic numbers of statfs(2): ext4, XFS
_PART = 1 << 30  # between two looks at the pages, each of which takes milliseconds
_PROBE = 16 << 20  # is read again to see whether that gives huge pages, and how fast
_MOST_SECONDS = 10.0  # of reading again what is in the cache in small pages


class _Pages:
    """The pages of an open file in the cache."""

    def __init__(self, fd: int, size: int) -> None:
        import numpy as np  # noqa: PLC0415  (slow to import, and needed for a file only)

        self._fd, self._size = fd, size
        self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._begins = f"{address:x}-".encode()
        self._map.madvise(mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        self._map.close()

    def parts(self, length: int) -> Iterator[range]:
        for first in range(0, self._size, length):
            yield range(first, min(first + length, self._size))

    def read(self, part: range) -> None:
        """Map what is in the cache, and read huge pages of which nothing is there."""
        for at in range(part.start, part.stop, _PAGE):
            self._map.madvise(_POPULATE_READ, at, mmap.PAGESIZE)

    def unmap(self, part: range) -> None:
        self._map.madvise(mmap.MADV_DONTNEED, part.start, len(part))

    def read_again(self, part: range) -> bool:
        """Read from the disk what no other process has mapped; whether huge pages came of it."""
        self.unmap(part)
        os.posix_fadvise(self._fd, part.start, len(part), os.POSIX_FADV_DONTNEED)
        before = self.huge()
        self.read(part)
        return _are_huge(part, self.huge() - before)

    def huge(self) -> int:
        """Bytes that are mapped in huge pages."""
        with Path("/proc/self/smaps").open("rb") as lines:
            own = False
            for line in lines:
                own = own or line.startswith(self._begins)
                if own and line.startswith(b"FilePmdMapped:"):
                    return int(line.split()[1]) << 10
        return 0


def _are_huge(part: range, found: int) -> bool:
    """Whether `found` bytes in huge pages are nearly all that a part, which begins one, has."""
    return found >= 0.9 * (len(part) // _PAGE * _PAGE)


@contextmanager
def _pages(fd: int) -> Iterator[_Pages | None]:
    """The pages of a file; None where there are no huge ones."""
    size = os.fstat(fd).st_size
    if sys.platform != "linux" or size < _PAGE or not _has_huge_pages(fd):
        yield None
        return
    pages = _Pages(fd, size)
    try:
        yield pages
    finally:
        pages.close()


def _has_huge_pages(fd: int) -> bool:
    found = (ctypes.c_long * 64)()  # at least a struct statfs, whose first field is the type
    return not ctypes.CDLL(None).fstatfs(fd, found) and found[0] in _FILE_SYSTEMS


def reserve_huge_pages(fd: int) -> None:
    """Give a file that has a size and no contents huge pages, for what is written to it."""
    with suppress(OSError):
        if os.fstat(fd).st_size <= free_memory():
            with _pages(fd) as pages:
                if pages:
                    for part in pages.parts(_PROBE):
                        pages.read(part)
                        pages.unmap(part)


def read_in_huge_pages(paths: Sequence[Path]) -> None:
    """Read files into the cache in huge pages, where the system can, before they are mapped.

    What is there in small pages is read from the disk again, for about ten seconds at most: then
    it is in huge pages for every process, until memory runs short. Parts that another process
    has mapped stay as they are, and so do files that are larger than the free memory together.
    """
    with suppress(OSError):
        if sum(path.stat().st_size for path in paths) <= free_memory():
            seconds = _MOST_SECONDS
            for path in paths:
                with path.open("rb") as file, _pages(file.fileno()) as pages:
                    seconds = _read(pages, seconds) if pages else seconds


def _read(pages: _Pages, seconds: float) -> float:
    """Read a file, and so many seconds long what is in small pages again; what is left of them."""
    for part in pages.parts(_PART):
        before = pages.huge()
        pages.read(part)
        if seconds <= 0 or _are_huge(part, pages.huge() - before):
            continue
        probe = range(part.start, min(part.start + _PROBE, part.stop))
        began = time.monotonic()
        huge = pages.read_again(probe)
        per_byte = (time.monotonic() - began) / len(probe)
        if not huge or per_byte * len(part) > seconds:
            seconds = 0
            continue
        if probe.stop < part.stop:
            pages.read_again(range(probe.stop, part.stop))
        seconds -= time.monotonic() - began
    return seconds
