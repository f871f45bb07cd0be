"""What systems do differently with open files: reads and writes at an offset, and locks.

Windows has no calls that take an offset. There the position of the descriptor is moved, which all
threads share, so a lock is held meanwhile.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Held while the position of a descriptor matters.
position = threading.Lock()

# Windows keeps other processes from reading locked bytes, so the lock is far behind the end.
_LOCKED_BYTE = 1 << 40


def open_file(path: Path, flags: int) -> int:
    """Open a file for bytes, as os.open does; a new one is readable and writable as umask says."""
    return os.open(path, flags | getattr(os, "O_BINARY", 0), 0o666)


def read_at(fd: int, length: int, offset: int) -> bytes:
    """At most `length` bytes; empty at the end of the file."""
    if hasattr(os, "pread"):
        return os.pread(fd, length, offset)
    with position:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, length)


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Read into `buffer` and return the number of bytes, 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    data = read_at(fd, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)


def write_at(fd: int, data: "bytes | memoryview", offset: int) -> None:
    """Write all of `data`."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        if hasattr(os, "pwrite"):
            done += os.pwrite(fd, view[done:], offset + done)
            continue
        with position:
            os.lseek(fd, offset + done, os.SEEK_SET)
            done += os.write(fd, view[done:])


def lock(fd: int, *, wait: bool = False) -> bool:
    """Lock an open file until it is closed; False if another process has locked it.

    wait: wait for the other process instead. Raises OSError if the file system has no locks.
    """
    if sys.platform == "win32":
        import msvcrt  # noqa: PLC0415  (only on Windows)

        mode = msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK  # LK_LOCK gives up after ten seconds
        while True:
            try:
                with position:
                    os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
                    msvcrt.locking(fd, mode, 1)
            except OSError:
                if not wait:
                    return False
            else:
                return True
    import fcntl  # noqa: PLC0415  (not on Windows)

    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def file_lock(path: Path, occupied: Callable[[], None]) -> Iterator[int]:
    """Hold a lock file, which is made if there is none; yields its descriptor.

    occupied: called where another process holds it, which is then waited for; raises to give up.
    The system releases the lock when all processes with the descriptor have ended. A file system
    without locks keeps nobody out.
    """
    while True:
        with path.open("w") as file:
            try:
                is_free = lock(file.fileno())
            except OSError:
                is_free = True
            if not is_free:
                occupied()
                lock(file.fileno(), wait=True)
            if _is_there(path, file.fileno()):  # unless the other process has removed it
                yield file.fileno()
                return


def _is_there(path: Path, fd: int) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
