"""Sources of bytes: anything with a name, a size and reads at an offset."""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..errors import FormatError
from ..machine import os_files
from ..machine.shell import quoted

# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER_START = b"version https://git-lfs.github.com/spec/"
_POINTER_LIMIT = 1024
_SHOWN = 3  # names in an error message


class Source(Protocol):
    """A seekable source of bytes, as the readers of this package need it."""

    @property
    def name(self) -> str:
        """The name of the source in messages."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; FormatError if the source ends before."""

    def close(self) -> None:
        """Close what is open; later reads fail."""


class WeightSource(Source, Protocol):
    """A file of weights, which threads read at the same time into arrays."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable bytes) from `offset`; FormatError if the file ends before."""


@runtime_checkable
class StreamedSource(Source, Protocol):
    """A remote source, for which one long read costs less than many short ones."""

    def pieces(self, offset: int, length: int) -> Iterator[bytes]:
        """The `length` bytes from `offset`, in chunks as they arrive."""


@contextmanager
def closed_on_failure(source: Source) -> Iterator[None]:
    """Close a source that was just opened if it cannot be used."""
    try:
        yield
    except BaseException:
        source.close()
        raise


def what_is_at(path: Path) -> str:
    """Describes what is at a path where a file was expected, for "found …"."""
    if (path / "config.json").is_file():
        return f"a checkpoint; `mtp-gguf up {quoted(path)}` converts and serves it"
    if path.is_dir():
        return f"a folder{ggufs_in(path)}"
    return "a device or pipe" if path.exists() else "none"


def ggufs_in(folder: Path) -> str:
    """The end of an error message about a folder: the GGUFs in it, if there are any."""
    found = sorted(folder.glob("*.gguf"))
    shown = ", ".join(map(quoted, found[:_SHOWN]))
    more = f" and {len(found) - _SHOWN} more" if found[_SHOWN:] else ""
    return f"; name a GGUF in it: {shown}{more}" if found else ""


class FileSource:
    """A local file, read at offsets so that threads can share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self._fd = -1
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
                raise FormatError(f"{path}: expected a file, found {what_is_at(path)}")
            self._fd = os_files.open_file(path, os.O_RDONLY)
            self._opened = self._state()
            self.size = self._opened[0]
        except OSError as error:
            raise FormatError(f"{path}: cannot be opened: {error.strerror}") from None
        if self.size < _POINTER_LIMIT and self.read(0, self.size).startswith(_POINTER_START):
            self.close()
            raise FormatError(
                f"{path}: expected the file itself, found a Git LFS pointer to it; run git lfs "
                "pull in its folder and try again"
            )

    def __reduce__(self) -> "tuple[Callable[[Path, tuple[int, int]], FileSource], tuple[Any, ...]]":
        """Pickled as the path, for a process that sees the same unchanged file."""
        return _reopened, (self.path.absolute(), self._opened)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; FormatError if the file ends before."""
        parts = []
        while length > 0:
            try:
                part = os_files.read_at(self._fd, length, offset)
            except OSError as error:
                raise self._fault(error) from None
            if not part:
                raise FormatError(f"{self.name}: the file ends at byte {offset}, data is missing")
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable bytes) from `offset`; FormatError if the file ends before."""
        done = 0
        while done < len(buffer):
            try:
                count = os_files.read_into(self._fd, buffer[done:], offset + done)
            except OSError as error:
                raise self._fault(error) from None
            if count == 0:
                raise FormatError(
                    f"{self.name}: the file ends at byte {offset + done}, data is missing"
                )
            done += count

    def check_unchanged(self) -> None:
        """FormatError if the file was written to since it was opened."""
        if self._state() != self._opened:
            raise FormatError(
                f"{self.name}: the file changed while it was read; try again when it is complete"
            )

    @property
    def state(self) -> tuple[int, int]:
        """Size and time of the last change, in nanoseconds, when the file was opened."""
        return self._opened

    def _state(self) -> tuple[int, int]:
        about = os.fstat(self._fd)
        return about.st_size, about.st_mtime_ns

    def fileno(self) -> int:
        """The descriptor of the open file, for copies in the kernel."""
        return self._fd

    def _fault(self, error: OSError) -> FormatError:
        return FormatError(f"{self.name}: cannot be read: {error.strerror}")

    def close(self) -> None:
        """Close the file; later reads fail."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _reopened(path: Path, state: tuple[int, int]) -> FileSource:
    source = FileSource(path)
    source._opened = state
    with closed_on_failure(source):
        source.check_unchanged()
    return source


def version_of(source: Source) -> str:
    """Stands for a file's contents: its name, its size, and when it changed if it is local.

    The name of a file on the hub has the commit, which decides its contents.
    """
    return f"{source.name} {source.state if isinstance(source, FileSource) else source.size}"


def check_unchanged(sources: Iterable[Source | None]) -> None:
    """FormatError if one of the local files was written to while it was read."""
    for source in set(sources):
        if isinstance(source, FileSource):
            source.check_unchanged()
