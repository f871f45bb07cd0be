"""Where bytes come from: anything with a name, a size and reads at an offset."""

import os
from pathlib import Path
from typing import Protocol

from .errors import FormatError


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


class FileSource:
    """A local file, read with pread so that threads can share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise FormatError(f"{path}: cannot be opened: {error.strerror}") from None
        self.size = os.fstat(self._fd).st_size
        if path.is_dir():
            self.close()
            raise FormatError(f"{path}: expected a file, found a folder")

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; FormatError when the file ends before."""
        parts = []
        while length > 0:
            part = os.pread(self._fd, length, offset)
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
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                raise FormatError(
                    f"{self.name}: the file ends at byte {offset + done}, data is missing"
                )
            done += count

    def close(self) -> None:
        """Close the file; reading afterwards fails."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
