"""Where bytes come from: anything with a name, a size and reads at an offset."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from .errors import FormatError

# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER_START = b"version https://git-lfs.github.com/spec/"
_POINTER_LIMIT = 1024


class Source(Protocol):
    """A seekable source of bytes, as the readers of this package need it."""

    @property
    def name(self) -> str:
        """What to call the source in a message."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; FormatError when they are not there."""

    def close(self) -> None:
        """Let go of what is open; reading afterwards fails."""


@runtime_checkable
class StreamedSource(Source, Protocol):
    """A source where one long read costs less than many short ones: a file elsewhere."""

    def pieces(self, offset: int, length: int) -> Iterator[bytes]:
        """The `length` bytes from `offset`, as they arrive."""


class FileSource:
    """A local file, read with pread so that threads can share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self._fd = -1
        try:
            mode = os.stat(path).st_mode
            if not stat.S_ISREG(mode):  # opening a pipe would wait for its other end
                found = "a folder" if stat.S_ISDIR(mode) else "a device or pipe"
                raise FormatError(f"{path}: expected a file, found {found}")
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            self.size = os.fstat(self._fd).st_size
        except OSError as error:
            raise FormatError(f"{path}: cannot be opened: {error.strerror}") from None
        if self.size < _POINTER_LIMIT and self.read(0, self.size).startswith(_POINTER_START):
            self.close()
            raise FormatError(
                f"{path}: expected the file itself, found a Git LFS pointer to it; run git lfs "
                "pull in its folder and try again"
            )

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; FormatError when the file ends before."""
        parts = []
        while length > 0:
            try:
                part = os.pread(self._fd, length, offset)
            except OSError as error:
                raise self._fault(error) from None
            if not part:
                raise FormatError(f"{self.name}: the file ends at byte {offset}, data is missing")
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable bytes) from `offset`; FormatError when the file ends before."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise self._fault(error) from None
            if count == 0:
                raise FormatError(
                    f"{self.name}: the file ends at byte {offset + done}, data is missing"
                )
            done += count

    def fileno(self) -> int:
        """The open file's descriptor, for copies that the kernel does."""
        return self._fd

    def _fault(self, error: OSError) -> FormatError:
        return FormatError(f"{self.name}: cannot be read: {error.strerror}")

    def close(self) -> None:
        """Close the file; reading afterwards fails."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
