"""Changes a draft vocabulary in place, without rewriting the file.

Only a list of the same length can be replaced: a different length would move all data after it,
and a power failure halfway would destroy the header. The list is first hidden by changing one byte
of its key (`token_ids` becomes `token_id_`), then overwritten, then shown again; each step is
synced to the disk before the next. At every moment the file is readable, with the old list, no
list, or the new one.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from ..errors import OutputError, raising
from ..heads.draft_list import HIDDEN_IDS_KEY
from ..heads.fastmtp import COVERAGE_KEY, IDS_KEY, SOURCE_KEY
from ..machine import os_files
from ..model import header_keys
from .format import ArrayRef, GgufFile, Value, ValueType, lay_out

_BLOCK_BYTES = 1 << 16


def replace_list(path: Path, file: GgufFile, keys: Mapping[str, Value]) -> str | None:
    """Overwrite the stored list with the list of `keys` (`ids` layout) of the same length.

    file: the header of `path`, which may be the first of several shards. The text that describes
    the origin of the list is padded or cut to the available space. Returns None on success, else
    the reason why it is impossible; the file is then unchanged.
    """
    list_key = _list_key(file)
    if list_key is None:
        return "it has no list that could be replaced"
    array = file.keys[list_key]
    ids = keys[IDS_KEY].data
    assert isinstance(array, ArrayRef)
    assert not isinstance(ids, bool | int | float | str)
    if array.count != len(ids) or array.type is not ValueType.U32:
        return f"its list has {array.count} ids, the new one {len(ids)}"
    if (COVERAGE_KEY in file.keys) != (COVERAGE_KEY in keys):
        return "one of the lists was counted on a corpus and the other was not"
    values = {list_key: keys[IDS_KEY]}
    if SOURCE_KEY in file.keys:
        values[SOURCE_KEY] = _fitted(keys[SOURCE_KEY], file)
    if COVERAGE_KEY in keys:
        values[COVERAGE_KEY] = keys[COVERAGE_KEY]
    old = header_keys(file)
    before, after = (lay_out(keys, file.tensors).header for keys in (old, old | values))
    if len(after) != len(before) or before != file.source.read(0, file.data_offset):
        return "its header is not laid out as this tool lays it out"
    if reason := _is_shared(path):
        return reason
    shown = list_key == IDS_KEY
    at = _key_end(array)
    after = after[:at] + HIDDEN_IDS_KEY[-1:].encode() + after[at + 1 :]
    with _Patch(path) as patch:
        if shown:
            patch.write(at, HIDDEN_IDS_KEY[-1:].encode())
        for start in range(0, len(after), _BLOCK_BYTES):
            block = after[start : start + _BLOCK_BYTES]
            if block != before[start : start + _BLOCK_BYTES]:
                patch.write(start, block)
        patch.write(at, IDS_KEY[-1:].encode())
    return None


def hide_list(path: Path, file: GgufFile) -> str | None:
    """Hide the list of `path` by changing one byte; returns None on success, else the reason."""
    if IDS_KEY not in file.keys:
        return "its draft vocabulary is not in the ids layout"
    if HIDDEN_IDS_KEY in file.keys:
        return "it has a hidden list already"
    if reason := _is_shared(path):
        return reason
    array = file.keys[IDS_KEY]
    if not isinstance(array, ArrayRef):
        return "its draft vocabulary is not in the ids layout"
    with _Patch(path) as patch:
        patch.write(_key_end(array), HIDDEN_IDS_KEY[-1:].encode())
    return None


class _Patch:
    """A file for writes at offsets; each write is synced to the disk before the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._raising():
            self._fd = os_files.open_file(path, os.O_RDWR)

    def __enter__(self) -> "_Patch":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, offset: int, data: bytes) -> None:
        with self._raising():
            os_files.write_at(self._fd, data, offset)
            os.fsync(self._fd)

    def _raising(self) -> AbstractContextManager[None]:
        return raising(OutputError, f"{self._path}: cannot be written")


def _list_key(file: GgufFile) -> str | None:
    """The key of the list, active or hidden; None if there is none or more than one."""
    found = [k for k in (IDS_KEY, HIDDEN_IDS_KEY) if isinstance(file.keys.get(k), ArrayRef)]
    return found[0] if len(found) == 1 else None


def _key_end(array: ArrayRef) -> int:
    """Offset of the last byte of an array's key, which precedes type, element type and count."""
    return array.offset - 8 - 4 - 4 - 1


def _fitted(value: Value, file: GgufFile) -> Value:
    """A text padded or cut to exactly the bytes that the file has for it."""
    source = file.scalar(SOURCE_KEY)
    room = len(str(source).encode("utf-8", "surrogateescape"))
    text = str(value.data).encode()[:room].decode("utf-8", "ignore")
    return Value(ValueType.STRING, text + " " * (room - len(text.encode())))


def _is_shared(path: Path) -> str | None:
    """The reason why a change would also affect another name (hard link); None if it would not."""
    return "its data are shared with another name" if path.stat().st_nlink > 1 else None
