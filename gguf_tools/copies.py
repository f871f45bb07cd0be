"""Ways to copy bytes from a source into a file, the cheapest first.

Each takes (descriptor to write to, offset there, source, start there, length) and answers with the
bytes it copied, fewer than asked for where it likes; an OSError of `CANNOT_COPY` says that another
way is to be taken for these two files.
"""

import ctypes
import errno
import os
import struct
import sys
import threading
from collections.abc import Callable

from .sources import FileSource, Source

CopyWay = Callable[[int, int, Source, int, int], int]

# What ioctl_ficlonerange(2), copy_file_range(2) and sendfile(2) answer where they cannot serve.
CANNOT_COPY = (
    errno.EXDEV,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EBADF,
    errno.ENOTTY,
    errno.EISDIR,
    errno.ETXTBSY,
)
_BUFFER_BYTES = 4 << 20
# linux/fs.h: _IOW(0x94, 13, struct file_clone_range), and that struct: descriptor, offset and
# length of the source, offset of the target.
_FICLONERANGE = 0x4020940D
_CLONE_RANGE = struct.Struct("=qQQQ")
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
# sendfile(2) writes where the descriptor stands, which all threads share.
_position = threading.Lock()


def copy_ways(source: Source) -> list[CopyWay]:
    """The ways that may serve for `source`; the last one always does."""
    if not isinstance(source, FileSource) or sys.platform != "linux":
        # Elsewhere sendfile wants a socket, and the others are not there.
        return [_copy_by_read]
    return [_share_blocks, _copy_in_kernel, _copy_by_sendfile, _copy_by_read]


def start_writing(out: int, offset: int, length: int) -> None:
    """Have these bytes on their way to the disk while others are copied; a hint, no promise.

    Without it all of a file waits for its fsync, and the disk stands idle until then.
    """
    if sys.platform == "linux":
        sync = ctypes.CDLL(None).sync_file_range
        sync(out, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


def _share_blocks(out: int, offset: int, source: Source, start: int, length: int) -> int:
    """Have both files point to the same blocks: XFS, Btrfs and their like, NFS 4.2.

    Blocks are shared as wholes, so both places must lie alike within a block; what is before the
    first boundary and after the last one is copied.
    """
    assert isinstance(source, FileSource)
    block = os.fstatvfs(out).f_frsize
    if (offset - start) % block:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    before = -start % block
    whole = (length - before) // block * block
    if before or whole <= 0:
        return _copy_in_kernel(out, offset, source, start, min(before or length, length))
    import fcntl  # noqa: PLC0415  (not everywhere)

    fcntl.ioctl(out, _FICLONERANGE, _CLONE_RANGE.pack(source.fileno(), start, whole, offset))
    return whole


def _copy_in_kernel(out: int, offset: int, source: Source, start: int, length: int) -> int:
    assert isinstance(source, FileSource)
    return os.copy_file_range(source.fileno(), out, length, start, offset)


def _copy_by_sendfile(out: int, offset: int, source: Source, start: int, length: int) -> int:
    assert isinstance(source, FileSource)
    with _position:
        os.lseek(out, offset, os.SEEK_SET)
        return os.sendfile(out, source.fileno(), start, length)


def _copy_by_read(out: int, offset: int, source: Source, start: int, length: int) -> int:
    view = memoryview(source.read(start, min(length, _BUFFER_BYTES)))
    done = 0
    while done < len(view):
        done += os.pwrite(out, view[done:], offset + done)
    return done
