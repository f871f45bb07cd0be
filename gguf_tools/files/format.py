"""Reads GGUF headers strictly, and lays out GGUF files for writing.

A file is, little-endian and without gaps up to the tensor data:

    "GGUF" | u32 version (2, 3) | u64 n_tensors | u64 n_kv
    n_kv     x  string key | u32 value type | value
    n_tensors x string name | u32 n_dims | n_dims x u64 | u32 tensor type | u64 offset
    zeros up to a multiple of general.alignment (default 32)
    tensor data, each tensor followed by zeros up to a multiple of the alignment

A string is a u64 length and UTF-8 bytes; an array is a u32 element type, a u64 count and the
elements. Dimensions are in ggml order, row length first; a dimension may be 0. A tensor's offset
counts from the start of the tensor data, and tensors are stored in the order of their entries.

The reader does not trust the file: it checks each count, length and offset against the file's size
before it allocates memory, and it reads arrays only on request.
"""

import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import prod
from pathlib import Path

from ..errors import FormatError
from ..hub.sources import FileSource, Source, closed_on_failure
from .tensor_types import BY_ID, TensorType

MAGIC = b"GGUF"
VERSION = 3
READABLE_VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32

# ggml's own limits: GGML_MAX_DIMS and GGML_MAX_NAME in ggml.h, the other two in gguf.cpp.
MAX_DIMS = 4
MAX_NAME_BYTES = 63
MAX_STRING_BYTES = 1 << 30
MAX_ARRAY_LENGTH = 1 << 30
# The format's own (gguf.md in ggml's docs, gguf_metadata_kv_t).
MAX_KEY_BYTES = (1 << 16) - 1

_WINDOW_BYTES = 1 << 20
_SHOWN = 80  # characters of a foreign string in a message
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class ValueType(IntEnum):
    """Types of metadata values (`enum gguf_type` in gguf.h)."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


_SCALARS = {
    ValueType.U8: struct.Struct("<B"),
    ValueType.I8: struct.Struct("<b"),
    ValueType.U16: struct.Struct("<H"),
    ValueType.I16: struct.Struct("<h"),
    ValueType.U32: struct.Struct("<I"),
    ValueType.I32: struct.Struct("<i"),
    ValueType.F32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<?"),
    ValueType.U64: struct.Struct("<Q"),
    ValueType.I64: struct.Struct("<q"),
    ValueType.F64: struct.Struct("<d"),
}

Scalar = int | float | bool | str


@dataclass(frozen=True)
class Value:
    """A metadata value to write: a scalar of `type`, or an array whose elements are of `type`."""

    type: ValueType
    data: Scalar | Sequence[Scalar]

    @property
    def is_array(self) -> bool:
        """Whether `data` is a sequence of scalars."""
        return not isinstance(self.data, Scalar)


@dataclass(frozen=True)
class RawValue:
    """A metadata value copied unread: its type and content, as they follow its key in a file."""

    encoded: bytes


@dataclass(frozen=True)
class ArrayRef:
    """An array of metadata whose extent is known, but which has not been read.

    `offset` is where its first element starts in the file, `length` its size in bytes.
    """

    type: ValueType
    count: int
    offset: int
    length: int


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write: `shape` in ggml order."""

    name: str
    shape: tuple[int, ...]
    type: TensorType

    @property
    def nbytes(self) -> int:
        """Bytes of the data, padding excluded."""
        return tensor_bytes(self.shape, self.type)


@dataclass(frozen=True)
class TensorInfo(TensorSpec):
    """A tensor of a file. `offset`: from the start of the file."""

    offset: int


def tensor_bytes(shape: Sequence[int], kind: TensorType) -> int:
    """Bytes of a tensor of ggml `shape`, whose row length is a multiple of the type's block."""
    return kind.row_bytes(shape[0]) * prod(shape[1:])


def padded(length: int, alignment: int) -> int:
    """`length` rounded up to a multiple of `alignment`."""
    return -(-length // alignment) * alignment


class GgufFile:
    """The header of a GGUF file: metadata and tensor entries, all checked against the source.

    `version`, `alignment`, `data_offset` (start of the tensor data; the end of the header if there
    are no tensors, as in ggml), `keys` (key to scalar or ArrayRef, in file order), `types` (key to
    ValueType), `tensors` (in file order).
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        cursor = _Cursor(source)
        self.version = _read_version(cursor)
        # Size of the shortest entries: a one-byte name with one dimension; a one-byte key with a
        # one-byte value.
        n_tensors = cursor.count("tensor count", 9 + 4 + 8 + 4 + 8)
        n_kv = cursor.count("metadata count", 9 + 4 + 1)
        self.keys: dict[str, Scalar | ArrayRef] = {}
        self.types: dict[str, ValueType] = {}
        for index in range(n_kv):
            key = cursor.name(f"metadata key {index}", MAX_KEY_BYTES, self.keys)
            self.types[key], self.keys[key] = _read_value(cursor, key)
        self.alignment = self._checked_alignment()
        self.tensors = _read_tensors(cursor, n_tensors, self.alignment)
        end = cursor.position
        self.data_offset = padded(end, self.alignment) if n_tensors else end
        self.tensors = [
            TensorInfo(t.name, t.shape, t.type, t.offset + self.data_offset) for t in self.tensors
        ]
        for tensor in self.tensors:
            if tensor.offset + tensor.nbytes > source.size:
                raise FormatError(
                    f"{source.name}: tensor {tensor.name!r}: expected data up to byte "
                    f"{tensor.offset + tensor.nbytes}, found a file of {source.size} bytes: it is "
                    "truncated, as by a download that was cut; fetch it again"
                )

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()

    def _checked_alignment(self) -> int:
        alignment = self.keys.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        kind = self.types.get(ALIGNMENT_KEY, ValueType.U32)
        if kind is not ValueType.U32 or not isinstance(alignment, int):
            raise FormatError(
                f"{self.source.name}: {ALIGNMENT_KEY}: expected type U32, found {kind.name}"
            )
        if not _is_power_of_two(alignment):
            raise FormatError(
                f"{self.source.name}: {ALIGNMENT_KEY}: expected a power of two, found {alignment}"
            )
        return alignment

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        """Tensors by name."""
        return {t.name: t for t in self.tensors}

    def scalar(self, key: str) -> Scalar | None:
        """The scalar under `key`; None if it is absent; FormatError if it is an array."""
        value = self.keys.get(key)
        if isinstance(value, ArrayRef):
            raise FormatError(f"{self.source.name}: {key}: expected one value, found an array")
        return value

    def integer(self, key: str) -> int | None:
        """The integer under `key`; None if it is absent; FormatError if it has another type."""
        value = self.scalar(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise FormatError(
                f"{self.source.name}: {key}: expected a whole number, "
                f"found type {self.types[key].name}"
            )
        return value

    def array(self, key: str) -> list[Scalar] | None:
        """The elements of the array under `key`; None if it is absent."""
        value = self.keys.get(key)
        if value is None:
            return None
        if not isinstance(value, ArrayRef):
            raise FormatError(f"{self.source.name}: {key}: expected an array, found one value")
        data = self.source.read(value.offset, value.length)
        if value.type is not ValueType.STRING:
            return [x for (x,) in _SCALARS[value.type].iter_unpack(data)]
        strings: list[Scalar] = []
        at = 0
        for _ in range(value.count):
            (length,) = _U64.unpack_from(data, at)
            strings.append(data[at + 8 : at + 8 + length].decode("utf-8", "surrogateescape"))
            at += 8 + length
        return strings

    def value(self, key: str) -> Value:
        """The value under `key`, which must exist, ready to be written to another file."""
        stored = self.keys[key]
        if isinstance(stored, ArrayRef):
            return Value(stored.type, self.array(key) or [])
        return Value(self.types[key], stored)

    def raw(self, key: str) -> RawValue:
        """The bytes of the value under `key`, which must exist, to be copied without decoding."""
        held = self.keys[key]
        if not isinstance(held, ArrayRef):
            return RawValue(_value_bytes(key, Value(self.types[key], held)))
        head = _U32.pack(ValueType.ARRAY) + _U32.pack(held.type) + _U64.pack(held.count)
        return RawValue(head + self.source.read(held.offset, held.length))


def open_gguf(path: Path) -> GgufFile:
    """Read the header of the GGUF file at `path`; the file stays open for reads of its data."""
    source = FileSource(path)
    with closed_on_failure(source):
        return GgufFile(source)


class _Cursor:
    """Reads a source from front to back through a window.

    `field_start` is the position of the field that was read last, for error messages.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.position = 0
        self.field_start = 0
        self._window = b""
        self._window_start = 0

    @property
    def remaining(self) -> int:
        return self.source.size - self.position

    def fault(self, field: str, expected: str, found: str) -> FormatError:
        return FormatError(
            f"{self.source.name}: {field} at byte {self.field_start}: "
            f"expected {expected}, found {found}"
        )

    def cut(self, field: str, expected: str, found: str) -> FormatError:
        """The error about a field that ends, or says that something ends, after the file's end."""
        found = f"{found}; the file is cut off or damaged: fetch it again"
        return self.fault(field, expected, found)

    def take(self, length: int, field: str) -> bytes:
        self._check_rest(length, field)
        start = self.position - self._window_start
        if start + length > len(self._window):
            self._slide(length)
            start = 0
        self.position += length
        return self._window[start : start + length]

    def skip(self, length: int, field: str) -> None:
        self._check_rest(length, field)
        self.position += length

    def _check_rest(self, length: int, field: str) -> None:
        self.field_start = self.position
        if length > self.remaining:
            raise self.cut(field, f"{length} bytes", f"{self.remaining} before the end")

    def _slide(self, at_least: int) -> None:
        length = min(max(at_least, _WINDOW_BYTES), self.remaining)
        self._window = self.source.read(self.position, length)
        self._window_start = self.position

    def u32(self, field: str) -> int:
        return int.from_bytes(self.take(4, field), "little")

    def u64(self, field: str) -> int:
        return int.from_bytes(self.take(8, field), "little")

    def count(self, field: str, least_bytes: int) -> int:
        """A number of entries; FormatError if that many of the shortest would exceed the file."""
        count = self.u64(field)
        limit = self.remaining // least_bytes
        if count > limit:
            raise self.cut(field, f"at most {limit} (by the file's size)", str(count))
        return count

    def string_length(self, field: str) -> int:
        length = self.u64(field)
        limit = min(self.remaining, MAX_STRING_BYTES)
        if length > limit:
            fault = self.cut if length > self.remaining else self.fault
            raise fault(field, f"a length of at most {limit} bytes", str(length))
        return length

    def string(self, field: str) -> bytes:
        start = self.position
        data = self.take(self.string_length(field), field)
        self.field_start = start
        return data

    def name(self, field: str, most_bytes: int, taken: Container[str]) -> str:
        """A key or a tensor's name: valid UTF-8 of an allowed length, and not yet in `taken`."""
        data = self.string(field)
        try:
            name = data.decode()
        except UnicodeDecodeError:
            raise self.fault(field, "UTF-8 text", repr(data[:_SHOWN])) from None
        if fault := _name_fault(name, most_bytes, taken):
            raise self.fault(field, f"a new name of 1 to {most_bytes} bytes", fault)
        return name

    def skip_strings(self, count: int, field: str) -> None:
        """Skip `count` strings. This is the hot loop of listing a file with a large vocabulary."""
        unpack = _U64.unpack_from
        while count:
            at = self.position - self._window_start
            window, end = self._window, len(self._window) - 8
            while count and 0 <= at <= end:
                after = at + 8 + unpack(window, at)[0]
                if after > end + 8:
                    break
                at = after
                count -= 1
            self.position = self._window_start + at
            if count:  # the next string crosses the window's edge or is too long
                self.skip(self.string_length(field), field)
                count -= 1


def _name_fault(name: str, most_bytes: int, taken: Container[str]) -> str | None:
    """Why `name` is invalid as a key or a tensor's name, for "found …"; None if it is valid."""
    if not name:
        return "an empty one"
    if "\0" in name:  # C strings end there, so ggml would see another name
        return f"a zero byte in {_quoted(name)}"
    if name in taken:
        return f"a name that occurred before: {_quoted(name)}"
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return f"invalid UTF-8: {_quoted(name)}"
    return f"{length} bytes: {_quoted(name)}" if length > most_bytes else None


def _quoted(text: str) -> str:
    """`text` for a message: quoted, and shortened if it is long."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _read_version(cursor: _Cursor) -> int:
    if cursor.remaining == 0:
        raise FormatError(f"{cursor.source.name}: expected a GGUF file, found an empty one")
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        raise FormatError(
            f"{cursor.source.name}: expected a GGUF file, which begins with {MAGIC!r}, found "
            f"{magic!r} there"
        )
    raw = cursor.take(4, "version")
    version = int.from_bytes(raw, "little")
    if int.from_bytes(raw, "big") in READABLE_VERSIONS:
        raise FormatError(
            f"{cursor.source.name}: version: this is a big-endian GGUF file, and only "
            "little-endian ones can be read"
        )
    if version not in READABLE_VERSIONS:
        raise FormatError(f"{cursor.source.name}: version: expected 2 or 3, found {version}")
    return version


def _value_type(cursor: _Cursor, field: str) -> ValueType:
    number = cursor.u32(field)
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.fault(field, "a value type of 0 to 12", str(number)) from None


def _read_value(cursor: _Cursor, key: str) -> tuple[ValueType, Scalar | ArrayRef]:
    field = _quoted(key)
    kind = _value_type(cursor, f"type of {field}")
    if kind is ValueType.ARRAY:
        return kind, _measure_array(cursor, field)
    if kind is ValueType.STRING:
        return kind, cursor.string(field).decode("utf-8", "surrogateescape")
    scalar = _SCALARS[kind]
    (value,) = scalar.unpack(cursor.take(scalar.size, field))
    return kind, value


def _measure_array(cursor: _Cursor, field: str) -> ArrayRef:
    element = _value_type(cursor, f"element type of {field}")
    if element is ValueType.ARRAY:
        raise cursor.fault(f"element type of {field}", "scalars or strings", "nested arrays")
    size = 8 if element is ValueType.STRING else _SCALARS[element].size
    count = cursor.count(f"length of {field}", size)
    if count > MAX_ARRAY_LENGTH:
        raise cursor.fault(f"length of {field}", f"at most {MAX_ARRAY_LENGTH}", str(count))
    start = cursor.position
    if element is ValueType.STRING:
        cursor.skip_strings(count, field)
    else:
        cursor.skip(count * size, field)
    return ArrayRef(element, count, start, cursor.position - start)


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> list[TensorInfo]:
    tensors: list[TensorInfo] = []
    names: set[str] = set()
    expected_offset = 0
    for index in range(count):
        name = cursor.name(f"name of tensor {index}", MAX_NAME_BYTES, names)
        names.add(name)
        n_dims = cursor.u32(f"dimension count of tensor {name!r}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise cursor.fault(
                f"dimension count of tensor {name!r}", f"1 to {MAX_DIMS}", str(n_dims)
            )
        dims = cursor.take(8 * n_dims, f"shape of tensor {name!r}")
        shape = tuple(n for (n,) in _U64.iter_unpack(dims))
        if not _fits_ggml(shape):
            raise cursor.fault(f"shape of tensor {name!r}", _FITS_GGML, str(list(shape)))
        number = cursor.u32(f"type of tensor {name!r}")
        kind = BY_ID.get(number)
        if kind is None:
            raise cursor.fault(f"type of tensor {name!r}", "a known tensor type", str(number))
        if shape[0] % kind.block_length:
            raise cursor.fault(
                f"row length of tensor {name!r}",
                f"a multiple of {kind.block_length} for {kind.name}",
                str(shape[0]),
            )
        offset = cursor.u64(f"offset of tensor {name!r}")
        if offset != expected_offset:
            raise cursor.fault(f"offset of tensor {name!r}", str(expected_offset), str(offset))
        expected_offset += padded(tensor_bytes(shape, kind), alignment)
        tensors.append(TensorInfo(name, shape, kind, offset))
    return tensors


_FITS_GGML = "dimensions from 0 and fewer than 2^63 elements"


def _fits_ggml(shape: Sequence[int]) -> bool:
    """Whether ggml, which uses signed 64-bit integers, can represent `shape`.

    ggml multiplies the dimensions from the left and may overflow before it reaches a 0, so the
    check ignores dimensions of 0.
    """
    return min(shape) >= 0 and prod(max(n, 1) for n in shape) < 1 << 63


@dataclass(frozen=True)
class Layout:
    """The layout of a file to be written.

    `header` ends where the tensor data starts (without padding if there are no tensors); `offsets`
    are absolute, one for each tensor; `size` is the length of the whole file.
    """

    header: bytes
    offsets: tuple[int, ...]
    size: int


def lay_out(metadata: Mapping[str, Value | RawValue], tensors: Sequence[TensorSpec]) -> Layout:
    """The bytes of the header and the offset of every tensor, in the given order.

    The alignment is `general.alignment` of the metadata if it is set. FormatError for anything
    that the reader would reject.
    """
    alignment = _alignment_to_write(metadata)
    parts = [MAGIC, _U32.pack(VERSION), _U64.pack(len(tensors)), _U64.pack(len(metadata))]
    parts.append(encoded_keys(metadata))
    relative = 0
    offsets = []
    names: set[str] = set()
    for tensor in tensors:
        _check_spec(tensor, names)
        names.add(tensor.name)
        parts += [_string_bytes(tensor.name), _U32.pack(len(tensor.shape))]
        parts += [_U64.pack(n) for n in tensor.shape]
        parts += [_U32.pack(tensor.type.id), _U64.pack(relative)]
        offsets.append(relative)
        relative += padded(tensor.nbytes, alignment)
    header = b"".join(parts)
    data_offset = padded(len(header), alignment) if tensors else len(header)
    header += bytes(data_offset - len(header))
    return Layout(header, tuple(data_offset + o for o in offsets), data_offset + relative)


def encoded_keys(metadata: Mapping[str, Value | RawValue]) -> bytes:
    """The bytes of these keys and values as they follow each other in a header."""
    parts = []
    for key, value in metadata.items():
        if fault := _name_fault(key, MAX_KEY_BYTES, ()):
            raise FormatError(f"key: expected a name of 1 to {MAX_KEY_BYTES} bytes, found {fault}")
        parts += [_string_bytes(key), _value_bytes(key, value)]
    return b"".join(parts)


def _alignment_to_write(metadata: Mapping[str, Value | RawValue]) -> int:
    value = metadata.get(ALIGNMENT_KEY, Value(ValueType.U32, DEFAULT_ALIGNMENT))
    assert isinstance(value, Value)  # only arrays are copied as raw values
    held = value.data
    if value.type is not ValueType.U32 or not isinstance(held, int) or not _is_power_of_two(held):
        raise FormatError(f"{ALIGNMENT_KEY}: expected a power of two as U32, found {value}")
    return held


def _check_spec(tensor: TensorSpec, names: Container[str]) -> None:
    if fault := _name_fault(tensor.name, MAX_NAME_BYTES, names):
        raise FormatError(
            f"name of a tensor: expected a new one of 1 to {MAX_NAME_BYTES} bytes, found {fault}"
        )
    shape, kind = tensor.shape, tensor.type
    if not 1 <= len(shape) <= MAX_DIMS or not _fits_ggml(shape):
        raise FormatError(
            f"shape of tensor {tensor.name!r}: expected 1 to {MAX_DIMS} {_FITS_GGML}, "
            f"found {list(shape)}"
        )
    if shape[0] % kind.block_length:
        raise FormatError(
            f"row length of tensor {tensor.name!r}: expected a multiple of {kind.block_length} "
            f"for {kind.name}, found {shape[0]}"
        )


def _string_bytes(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return _U64.pack(len(data)) + data


def _value_bytes(key: str, value: Value | RawValue) -> bytes:
    if isinstance(value, RawValue):
        return value.encoded
    data = value.data
    try:
        if isinstance(data, Scalar):
            return _U32.pack(value.type) + _scalar_bytes(value.type, (data,))
        head = _U32.pack(ValueType.ARRAY) + _U32.pack(value.type) + _U64.pack(len(data))
        return head + _scalar_bytes(value.type, data)
    except (struct.error, TypeError, AttributeError, OverflowError, UnicodeError):
        raise FormatError(
            f"{key}: expected {'an array of ' if value.is_array else ''}{value.type.name}, "
            f"found {str(data)[:80]}"
        ) from None


def _scalar_bytes(kind: ValueType, values: Iterable[Scalar]) -> bytes:
    if kind is ValueType.STRING:
        return b"".join(_string_bytes(v) for v in values)  # type: ignore[arg-type]
    pack = _SCALARS[kind].pack
    return b"".join(pack(v) for v in values)
