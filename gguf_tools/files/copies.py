"""Ways to copy bytes from a source into a file, cheapest first.

Each takes (descriptor to write to, offset there, source, start there, length) and returns the
number of bytes copied, which may be fewer than requested. An OSError with a code of `CANNOT_COPY`
means that this way does not work for the two files and the caller should try the next one.
"""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable

from ..hub.sources import FileSource, Source
from ..machine import os_files

CopyWay = Callable[[int, int, Source, int, int], int]

# Error codes of ioctl_ficlonerange(2), copy_file_range(2) and sendfile(2) if they do not support
# the two files.
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


def copy_ways(source: Source) -> list[CopyWay]:
    """The ways that may work for `source`; the last one always does."""
    if not isinstance(source, FileSource) or sys.platform != "linux":
        # On other systems sendfile needs a socket, and the other calls do not exist.
        return [_copy_by_read]
    return [_share_blocks, _copy_in_kernel, _copy_by_sendfile, _copy_by_read]


def start_writing(out: int, offset: int, length: int) -> None:
    """Start writing these bytes to the disk while others are still copied (a hint to the kernel).

    Without it the disk stays idle until fsync, which then has to write the whole file.
    """
    if sys.platform == "linux":
        sync = ctypes.CDLL(None).sync_file_range
        sync(out, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


def _share_blocks(out: int, offset: int, source: Source, start: int, length: int) -> int:
    """Make both files share the same blocks (reflink): XFS, Btrfs, bcachefs, NFS 4.2.

    Only whole blocks can be shared, so both places must have the same offset within a block. The
    bytes before the first block boundary and after the last one are copied.
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
    with os_files.position:  # sendfile(2) writes at the descriptor's position
        os.lseek(out, offset, os.SEEK_SET)
        return os.sendfile(out, source.fileno(), start, length)


def _copy_by_read(out: int, offset: int, source: Source, start: int, length: int) -> int:
    data = source.read(start, min(length, _BUFFER_BYTES))
    os_files.write_at(out, data, offset)
    return len(data)
