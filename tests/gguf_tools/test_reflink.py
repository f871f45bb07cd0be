"""Blocks are shared between files if the file system can; the bytes are correct either way.

The tests that need such a file system (XFS, Btrfs) are skipped elsewhere; a loop device will do:

    truncate -s 1G x && mkfs.xfs x && mount -o loop x /mnt
    pytest tests/gguf_tools/test_reflink.py --basetemp=/mnt/tmp
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files import copies, output, rewrite
from mtp_gguf.gguf_tools.files.format import Value, ValueType, open_gguf
from mtp_gguf.gguf_tools.files.output import OutputFile
from mtp_gguf.gguf_tools.files.rewrite import OutputSpec, write
from mtp_gguf.gguf_tools.hub.sources import FileSource
from mtp_gguf.gguf_tools.model import open_model
from support.checkpoints import DENSE
from support.failing_files import failing
from support.models import Models

BLOCK = 4096
SIZE = 40 * BLOCK + 777

# linux/fiemap.h: start, length, flags, mapped extents, room for extents, reserved; an extent is
# logical, physical, length, two reserved, flags, three reserved. SYNC is a flag of the request.
FIEMAP = 0xC020660B
REQUEST = struct.Struct("=QQIIII")
EXTENT = struct.Struct("=QQQQQIIII")
SYNC, SHARED, ROOM = 1, 0x2000, 64


@pytest.fixture(autouse=True, params=["whole", "in parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in one part, and in many parts by several threads."""
    if request.param == "in parts":
        monkeypatch.setattr(output, "_COPY_BYTES", 4 * BLOCK)


def shared_bytes(path: Path) -> int:
    """Bytes of the file in blocks that another file has as well."""
    with path.open("rb") as file:
        buffer = bytearray(REQUEST.pack(0, 1 << 40, SYNC, 0, ROOM, 0) + bytes(EXTENT.size * ROOM))
        fcntl.ioctl(file, FIEMAP, buffer)
    count = REQUEST.unpack_from(buffer)[3]
    assert count < ROOM
    extents = [EXTENT.unpack_from(buffer, REQUEST.size + i * EXTENT.size) for i in range(count)]
    return sum(length for _, _, length, _, _, flags, *_ in extents if flags & SHARED)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(np.random.default_rng(1).bytes(SIZE))
    return path


@pytest.fixture
def can_share(source: Path) -> None:
    """Skip unless the file system shares blocks."""
    other = source.with_name("probe")
    with source.open("rb") as held, other.open("wb") as made:
        try:
            fcntl.ioctl(made, 0x40049409, held.fileno())  # FICLONE, the whole file
        except OSError:
            pytest.skip("this file system cannot share blocks; the module says how to try")
    other.unlink()


def copied(source: Path, start: int, length: int, offset: int) -> Path:
    """`length` bytes from `start` of the source at `offset` of a new file; checks the bytes."""
    target = source.with_name("target")
    opened = FileSource(source)
    done: list[int] = []
    with OutputFile(target, offset + length + 5) as file:
        file.copy(offset, opened, start, length, done.append)
        file.commit()
    opened.close()
    assert sum(done) == length
    expected = bytes(offset) + source.read_bytes()[start : start + length] + bytes(5)
    assert target.read_bytes() == expected
    return target


# Places that lie alike within a block, places that do not, and copies below a block.
PLACES = [
    (0, SIZE, 0, 40),
    (100, SIZE - 100, 3 * BLOCK + 100, 39),
    (BLOCK, 5 * BLOCK, 0, 5),
    (BLOCK - 1, 2, 2 * BLOCK - 1, 0),
    (10, 20, BLOCK + 10, 0),
    (100, SIZE - 100, 132, 0),
]


@pytest.mark.usefixtures("can_share")
def test_whole_blocks_are_shared(source: Path) -> None:
    for start, length, offset, blocks in PLACES:
        assert shared_bytes(copied(source, start, length, offset)) == blocks * BLOCK


@pytest.mark.usefixtures("can_share")
def test_a_change_of_one_file_leaves_the_other(source: Path) -> None:
    before = source.read_bytes()
    target = copied(source, 0, SIZE, 0)
    with target.open("r+b") as file:
        file.write(b"changed")
    assert source.read_bytes() == before


@pytest.mark.usefixtures("can_share")
def test_a_model_shares_the_blocks_of_its_base(models: Models, tmp_path: Path) -> None:
    """A key of a block's length moves the tensors by whole blocks."""
    base = tmp_path / "base.gguf"
    base.write_bytes(models.convert(DENSE, "--quant", "Q8_0").read_bytes())
    with open_model(base) as model:
        # Key: its length and text, type, the string's length.
        filler = Value(ValueType.STRING, "x" * (BLOCK - 8 - 6 - 4 - 8))
        metadata = {**model.metadata(), "filler": filler}
        tensors = rewrite.copies(model)
        write(tmp_path / "made.gguf", OutputSpec(metadata, tensors))
        with open_gguf(tmp_path / "made.gguf") as made:
            assert made.data_offset == model.first.data_offset + BLOCK
            for old, new in zip(model.first.tensors, made.tensors, strict=True):
                assert made.source.read(new.offset, new.nbytes) == model.read(old.name)
    assert shared_bytes(tmp_path / "made.gguf") > 0.95 * base.stat().st_size


@pytest.mark.parametrize(("start", "length", "offset", "_blocks"), PLACES)
def test_without_shared_blocks_the_bytes_are_the_same(
    start: int,
    length: int,
    offset: int,
    _blocks: int,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied(source, start, length, offset)  # as this file system does it
    for code in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ETXTBSY):
        monkeypatch.setattr(fcntl, "ioctl", failing(code))
        copied(source, start, length, offset)
    monkeypatch.setattr(os, "copy_file_range", failing(errno.EXDEV))
    seek = os.lseek

    def seek_slowly(*place: int) -> int:
        """Long enough for another thread to come between this and the sendfile after it."""
        at = seek(*place)
        time.sleep(0.0005)
        return at

    monkeypatch.setattr(os, "lseek", seek_slowly)
    copied(source, start, length, offset)
    monkeypatch.setattr(os, "sendfile", failing(errno.EINVAL))
    copied(source, start, length, offset)


def test_sharing_is_tried_where_the_places_lie_alike(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any file system, only whole blocks are requested from the kernel."""
    asked: list[tuple[int, int, int]] = []

    def clone(out: int, request: int, packed: bytes) -> int:
        held, start, length, offset = copies._CLONE_RANGE.unpack(packed)
        assert request == copies._FICLONERANGE
        asked.append((start, length, offset))
        os.pwrite(out, os.pread(held, length, start), offset)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    for start, length, offset, blocks in PLACES:
        asked.clear()
        copied(source, start, length, offset)
        assert sum(n for _, n, _ in asked) == blocks * BLOCK
        assert all(n % BLOCK == 0 for place in asked for n in place)
