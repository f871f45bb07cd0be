"""Files that appear under their name only when they are whole."""

import errno
import os
import shutil
from pathlib import Path

from .errors import OutputError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OutputFile:
    """A file of known size, written at offsets from several threads, renamed when complete.

    As a context manager: leaving with an exception removes what was written. `commit()` gives the
    file its name; until then it stands beside it under a hidden one.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._fd = -1

    def __enter__(self) -> "OutputFile":
        try:
            free = shutil.disk_usage(self.path.parent).free
            if free < self.size:
                raise OutputError(
                    f"{self.path}: needs {self.size} bytes, and {free} are free on its disk"
                )
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
            self._fd = os.open(self._partial, flags, 0o666)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, self.size)
            else:
                os.ftruncate(self._fd, self.size)
        except BaseException as error:
            self._discard()
            if isinstance(error, OSError):
                raise self._fault(error) from None
            raise
        return self

    def write(self, offset: int, data: "bytes | memoryview") -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], offset + done)
        except OSError as error:
            raise self._fault(error) from None

    def commit(self) -> None:
        """Put the complete file under its name, replacing what stood there."""
        try:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1
            os.replace(self._partial, self.path)
        except OSError as error:
            raise self._fault(error) from None

    def __exit__(self, *_: object) -> None:
        self._discard()

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._partial.unlink(missing_ok=True)

    def _fault(self, error: OSError) -> OutputError:
        if error.errno in _NO_SPACE:
            return OutputError(f"{self.path}: no space for its {self.size} bytes: {error.strerror}")
        return OutputError(f"{self.path}: cannot be written: {error.strerror}")


def check_output(path: Path, sources: "list[Path]", overwrite: bool) -> None:
    """Refuse a path that cannot be written, is one of the sources, or exists unasked."""
    if not path.parent.is_dir():
        raise OutputError(f"{path}: expected its folder to exist, found no {path.parent}")
    if path.is_dir():
        raise OutputError(f"{path}: expected a file name, found a folder")
    if not path.exists():
        return
    if any(source.exists() and path.samefile(source) for source in sources):
        raise OutputError(f"{path}: is the input; choose another name for the output")
    if not overwrite:
        raise OutputError(f"{path}: exists; pass --overwrite to replace it, or choose another name")
