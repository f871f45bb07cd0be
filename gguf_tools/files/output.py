"""Output files that appear under their name only once they are complete."""

import errno
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

from ..errors import FormatError, OutputError
from ..hub.sources import FileSource, Source, StreamedSource
from ..machine import os_files
from ..machine.huge_pages import reserve_huge_pages
from .copies import CANNOT_COPY, copy_ways, start_writing

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Files are copied in parts of this size, so that progress is shown and Ctrl-C takes effect. It is a
# multiple of every file system's block size, so that no block that could be shared is split.
_COPY_BYTES = 32 << 20
# Copying between cached pages is limited by one core, so a second thread halves the time.
_COPIERS = 2
_SYNC_SECONDS = 5.0  # between two records of what is written, which is what a power failure costs
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL)  # posix_fallocate(3), of the file system


class OutputFile:
    """A file of known size, written at offsets from several threads, renamed when complete.

    A context manager: leaving it without `commit()` removes what was written. Until `commit()` (or
    `commit_all()` for several files) renames it, the file has a hidden name in the same folder.

    identity: of the contents, 16 hexadecimal digits. With one, what was written stays unless
    `discard()` is called, and the next output of this path and identity goes on with it
    (`resumed`).
    """

    def __init__(self, path: Path, size: int, identity: str | None = None) -> None:
        self.path = path
        self.size = size
        self.partial = unfinished(path, identity or str(os.getpid()))
        self.resumed = False
        self._keep = identity is not None
        self._aside = self.partial.with_suffix(".replaced")
        self._fd = -1
        self._created = False

    def __enter__(self) -> "OutputFile":
        try:
            if self._keep and self.partial.exists():
                self._fd = _open_locked(self.partial)
                self._created = self.resumed = True
                if os.fstat(self._fd).st_size != self.size:
                    os.ftruncate(self._fd, self.size)
                return self
            check_space(self.path, self.size)
            remove_leftovers(self.path.parent, re.escape(self.path.name), besides=self.partial)
            self.partial.unlink(missing_ok=True)  # left by a killed process with the same pid
            self._created = True  # a signal may come before the descriptor is here
            self._fd = _create_locked(self.partial)
            self._reserve()
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise self._fault(error) from None
            raise
        return self

    def _reserve(self) -> None:
        """Reserve the disk space if the file system can, so that a full disk is noticed early.

        The pages in the system's cache are huge ones, so that what reads the file next is fast.
        """
        os.ftruncate(self._fd, self.size)
        if self.size and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, 0, self.size)
            except OSError as error:
                if error.errno not in _CANNOT_RESERVE:
                    raise
        reserve_huge_pages(self._fd)

    def write(self, offset: int, data: "bytes | memoryview") -> None:
        """Write all of `data` at `offset`."""
        try:
            os_files.write_at(self._fd, data, offset)
        except OSError as error:
            raise self._fault(error) from None

    def copy(
        self,
        offset: int,
        source: Source,
        start: int,
        length: int,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Write `length` bytes of `source` from `start` at `offset`; not from several threads.

        The kernel copies between files (and shares blocks if the file system can); other sources
        are read in small parts. progress: called with the number of bytes of each part.
        """
        if isinstance(source, StreamedSource):
            for piece in source.pieces(start, length):
                self.write(offset, piece)
                offset += len(piece)
                progress(len(piece))
            return
        first = (start // _COPY_BYTES + 1) * _COPY_BYTES
        bounds = [start, *range(first, start + length, _COPY_BYTES), start + length]
        shift = offset - start
        if len(bounds) == 2 or not isinstance(source, FileSource):
            for part, end in pairwise(bounds):
                progress(self._copy_part(shift, source, part, end))
            return
        with ThreadPoolExecutor(_COPIERS) as pool:
            jobs = [
                pool.submit(self._copy_part, shift, source, part, end)
                for part, end in pairwise(bounds)
            ]
            try:
                for part, job in zip(bounds, jobs, strict=False):
                    count = job.result()
                    start_writing(self._fd, part + shift, count)
                    progress(count)
            finally:
                for job in jobs:
                    job.cancel()

    def _copy_part(self, shift: int, source: Source, start: int, end: int) -> int:
        """Copy bytes `start` to `end` of `source` to offset `start + shift`; returns how many."""
        ways = copy_ways(source)
        at = start
        while at < end:
            try:
                count = ways[0](self._fd, at + shift, source, at, end - at)
            except OSError as error:
                if error.errno not in CANNOT_COPY or len(ways) == 1:
                    raise self._fault(error) from None
                ways = ways[1:]
                continue
            if count == 0:
                raise FormatError(f"{source.name}: the file ends at byte {at}, data is missing")
            at += count
        return end - start

    def commit(self) -> None:
        """Rename the complete file to its name, replacing any file there."""
        self._finish()
        self._appear()
        self._created = False

    def _finish(self) -> None:
        """Sync all bytes to the disk; a full disk is noticed here at the latest."""
        self.sync()
        try:
            self._close()
        except OSError as error:
            raise self._fault(error) from None

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _rename(self, old: Path, new: Path) -> None:
        try:
            os.replace(old, new)
        except OSError as error:
            raise self._fault(error) from None

    def _set_aside(self) -> None:
        """Keep the file that is to be replaced until all outputs are renamed.

        It gets a hard link if the file system supports that, so that its name always exists.
        """
        if not os.path.lexists(self.path):
            return
        if self.path.is_dir():
            raise self._fault(IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
        try:
            self._aside.unlink(missing_ok=True)
            os.link(self.path, self._aside, follow_symlinks=False)
        except (OSError, NotImplementedError):
            self._rename(self.path, self._aside)

    def _appear(self) -> None:
        """Rename the file to its name."""
        self._rename(self.partial, self.path)

    def _restore(self) -> None:
        """Roll back `_set_aside` and `_appear`, as far as they were done."""
        with suppress(OSError):
            if os.path.lexists(self._aside):
                os.replace(self._aside, self.path)
                self._aside.unlink(missing_ok=True)  # rename(2) does nothing for two hard links
            elif not os.path.lexists(self.partial):
                os.replace(self.path, self.partial)

    def _forget(self) -> None:
        """Remove the file that was set aside."""
        self._created = False
        with suppress(OSError):
            self._aside.unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        if self._keep:
            self._close()
        else:
            self.discard()

    def sync(self) -> None:
        """Wait until everything that was written is on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._fault(error) from None

    def discard(self) -> None:
        """Close and remove what was written, unless it was committed."""
        self._close()
        if self._created:
            self._created = False
            with suppress(OSError):
                self.partial.unlink()

    def _fault(self, error: OSError) -> OutputError:
        return write_fault(self.path, self.size, error)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears under its name, in place of an older one, once it is complete."""
    with OutputFile(path, len(data)) as file:
        file.write(0, data)
        file.commit()


def commit_all(outputs: Sequence[OutputFile]) -> None:
    """Rename complete files to their names, all of them or none.

    If one cannot be renamed, those before it are removed and the files they replaced restored.
    """
    if len(outputs) == 1:
        outputs[0].commit()
        return
    for output in outputs:
        output._finish()
    with ExitStack() as undo:
        for output in outputs:
            undo.callback(output._restore)
            output._set_aside()
            output._appear()
        undo.pop_all()
    for output in outputs:
        output._forget()


class Journal:
    """Which of `count` parts of some resumable outputs are written, as a file beside the first.

    Enter it after the outputs, whose bytes reach the disk before their parts are marked.
    """

    def __init__(self, outputs: Sequence[OutputFile], count: int) -> None:
        self._outputs = outputs
        self._path = outputs[0].partial.with_suffix(".done")
        self._count = count
        self._fd = -1
        self._lock = threading.Lock()
        self._new: list[int] = []
        self._synced = time.monotonic()
        self.done: frozenset[int] = frozenset()
        if not all(output.partial.exists() for output in outputs):
            self.remove()

    def __enter__(self) -> "Journal":
        fd = self._fd = os_files.open_file(self._path, os.O_RDWR | os.O_CREAT)
        _is_lockable(fd)
        marks = os_files.read_at(fd, self._count, 0)
        self.done = frozenset(index for index, mark in enumerate(marks) if mark)
        return self

    def mark(self, index: int) -> None:
        """Record that a part is written; from any thread."""
        with self._lock:
            self._new.append(index)
            if time.monotonic() - self._synced >= _SYNC_SECONDS:
                self._flush()

    def _flush(self) -> None:
        for output in self._outputs:
            output.sync()
        for index in self._new:
            os_files.write_at(self._fd, b"\1", index)
        self._new.clear()
        self._synced = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            with suppress(OSError, OutputError):
                self._flush()
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Forget everything, as before outputs are written anew, or after they are complete."""
        self._new.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, name: str, *, besides: Path | None) -> None:
    """Remove partial files of killed processes; running processes have locked theirs.

    name: a regular expression for the name of the complete file. besides: a partial file that is
    kept, with its journal.
    """
    pattern = re.compile(rf"\.{name}\.[0-9a-f]+\.(partial|done)")
    for path in folder.iterdir():
        if besides is not None and path.stem == besides.stem:
            continue
        if pattern.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            with suppress(OSError):
                fd = os_files.open_file(path, os.O_RDWR)
                try:
                    abandoned = _is_lockable(fd)
                    if abandoned and sys.platform != "win32":
                        path.unlink()
                finally:
                    os.close(fd)
                if abandoned and sys.platform == "win32":
                    path.unlink()  # which Windows refuses while a process has it open


def unfinished(path: Path, identity: str) -> Path:
    """The name under which an output is written until it is complete."""
    return path.with_name(f".{path.name}.{identity}.partial")


def _open_locked(path: Path) -> int:
    """Open the partial file of an earlier run; OutputError if another process writes it."""
    fd = os_files.open_file(path, os.O_RDWR)
    try:
        free = os_files.lock(fd)
    except OSError:  # the file system has no locks
        free = True
    if not free:
        os.close(fd)
        raise OutputError(f"{path}: another process is writing it; wait until it ends")
    return fd


def _create_locked(path: Path) -> int:
    """Create a file that stays locked while it is open, and return its descriptor."""
    while True:
        fd = os_files.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if not _is_lockable(fd) or os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # another process removed it as a leftover before it was locked


def _is_lockable(fd: int) -> bool:
    """Lock an open file until it is closed; False if it is locked already or cannot be locked."""
    try:
        return os_files.lock(fd)
    except OSError:
        return False


def is_full(error: OSError) -> bool:
    """Whether an error says that the disk has no space for what was written."""
    return error.errno in _NO_SPACE


def write_fault(path: Path, size: int, error: OSError) -> OutputError:
    """Return the error to raise where a file of `size` bytes cannot be written."""
    if is_full(error):
        return OutputError(f"{path}: no space for its {size} bytes: {error.strerror}")
    return OutputError(f"{path}: cannot be written: {error.strerror}")


def check_space(path: Path, size: int) -> None:
    """OutputError unless as many bytes are free on the disk of a file that is to be written."""
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise OutputError(f"{path}: needs {size} bytes, and {free} are free on its disk")


def check_output(path: Path, sources: "list[Path]", overwrite: bool) -> None:
    """OutputError for a path that is not writable, is a source, or exists without `overwrite`."""
    if not path.parent.is_dir():
        raise OutputError(f"{path}: expected its folder to exist, found no {path.parent}")
    if path.is_dir():
        raise OutputError(f"{path}: expected a file name, found a folder")
    if path.exists():
        if any(source.exists() and path.samefile(source) for source in sources):
            raise OutputError(f"{path}: is the input; choose another name for the output")
        if not overwrite:
            raise OutputError(
                f"{path}: exists; pass --overwrite to replace it, or choose another name"
            )
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written: {error.strerror}; choose another folder"
        ) from None
