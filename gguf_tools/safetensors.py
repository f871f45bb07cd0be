"""Safetensors headers, read strictly; the tensors' bytes stay where they are.

A file is: u64 header length, little-endian | the header, JSON | tensor data. The header maps names
to {"dtype", "shape", "data_offsets": [begin, end]}, offsets counted from the end of the header;
`__metadata__` maps strings to strings. Tensors cover the data without holes or overlaps.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .errors import FormatError
from .sources import FileSource, Source

# The limit of the reference implementation (MAX_HEADER_SIZE in safetensors' tensor.rs).
MAX_HEADER_BYTES = 100_000_000

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    `shape` stands outermost dimension first, `offset` counts from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """The header of a safetensors file: tensors by name, in the order of their data."""

    source: Source
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def open_safetensors(path: Path) -> SafetensorsFile:
    """Read the header of the file at `path`; the file stays open for reads of its data."""
    source = FileSource(path)
    try:
        return read_safetensors(source)
    except BaseException:
        source.close()
        raise


def read_safetensors(source: Source) -> SafetensorsFile:
    """Read and check the header of `source`; FormatError names what is wrong."""
    if source.size < 8:
        raise FormatError(
            f"{source.name}: header length: expected 8 bytes, found a file of {source.size}"
        )
    length = int.from_bytes(source.read(0, 8), "little")
    limit = min(MAX_HEADER_BYTES, source.size - 8)
    if not 2 <= length <= limit:
        raise FormatError(
            f"{source.name}: header length: expected 2 to {limit} bytes, found {length}"
        )
    header = _parse_json(source, length)
    start = 8 + length
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
        raise FormatError(f"{source.name}: __metadata__: expected strings by name")
    tensors = [_check_entry(source, name, entry, start) for name, entry in header.items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    position = start
    for tensor in tensors:
        if tensor.offset != position:
            raise FormatError(
                f"{source.name}: data_offsets of {tensor.name!r}: expected to begin at "
                f"{position - start}, found {tensor.offset - start} "
                f"({'overlap' if tensor.offset < position else 'hole'})"
            )
        position += tensor.nbytes
    if position != source.size:
        raise FormatError(
            f"{source.name}: expected a file of {position} bytes by its header, "
            f"found {source.size} bytes ({'truncated' if position > source.size else 'extra data'})"
        )
    return SafetensorsFile(source, {t.name: t for t in tensors}, notes)


def _parse_json(source: Source, length: int) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        held = dict(pairs)
        if len(held) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in held if names.count(name) > 1)
            raise FormatError(f"{source.name}: header: {twice!r} occurs twice")
        return held

    try:
        header = json.loads(source.read(8, length).decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{source.name}: header: expected JSON, found: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"{source.name}: header: expected a JSON object")
    return header


def _check_entry(source: Source, name: str, entry: Any, start: int) -> StoredTensor:
    where = f"{source.name}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: expected dtype, shape and data_offsets, found {entry!r:.60}")
    dtype, shape, offsets = (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise FormatError(
            f"{where}: dtype: expected one of {', '.join(DTYPE_BYTES)}, found {dtype!r:.40}"
        )
    if not isinstance(shape, list) or not _are_sizes(shape):
        raise FormatError(f"{where}: shape: expected whole numbers from 0, found {shape!r:.60}")
    if (
        not isinstance(offsets, list)
        or not _are_sizes(offsets)
        or len(offsets) != 2
        or offsets[0] > offsets[1]
    ):
        raise FormatError(f"{where}: data_offsets: expected [begin, end], found {offsets!r:.60}")
    nbytes = prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise FormatError(
            f"{where}: data_offsets: expected {nbytes} bytes for {dtype} {shape}, "
            f"found {offsets[1] - offsets[0]}"
        )
    return StoredTensor(name, dtype, tuple(shape), start + offsets[0], nbytes)


def _are_sizes(values: list[Any]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 63 for v in values)
