"""Importance matrices in llama.cpp's formats: GGUF, and the legacy `imatrix.dat` for reading.

A GGUF contains, for each tensor NAME, `NAME.in_sum2` [row length, experts] (sums of squared
activations) and `NAME.counts` [1, experts] (how many were summed), both F32.

A legacy file contains, little-endian: i32 number of entries | entries | i32 number of chunks | i32
length and name of the dataset; the part after the entries may be absent. An entry: i32 length and
name of the tensor | i32 number of calls | i32 number of values | F32 values of all experts,
multiplied by the number of calls.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import FormatError, RequestError
from .files.format import (
    MAGIC,
    GgufFile,
    TensorInfo,
    TensorSpec,
    Value,
    ValueType,
    lay_out,
    open_gguf,
)
from .files.output import OutputFile
from .files.tensor_types import F32
from .heads.fastmtp import EMBEDDING_TENSOR
from .hub.sources import FileSource

SUMS_SUFFIX = ".in_sum2"
COUNTS_SUFFIX = ".counts"
CHUNK_SIZE = 512  # tokens, llama-imatrix's default; legacy files do not state it


@dataclass(frozen=True, eq=False)
class Activations:
    """What a calibration has seen of a tensor's inputs.

    sums: of squared inputs, shape (matrices, row length), F32. counts: rows summed, shape
    (matrices, 1), F32 as in the file. There is one matrix for each expert; a legacy file does not
    state their number and has all of them in one row.
    """

    sums: NDArray[np.float32]
    counts: NDArray[np.float32]

    def mean(self) -> NDArray[np.float32]:
        """Sums divided by counts in F32, as in llama-quantize; 1 for experts never chosen."""
        seen = self.counts > 0
        return np.where(seen, self.sums / np.where(seen, self.counts, np.float32(1)), np.float32(1))


@dataclass(frozen=True, eq=False)
class Calibration:
    """The contents of an imatrix file: activations by tensor name, and their origin.

    chunks: how many pieces of text of chunk_size tokens were read.
    """

    entries: dict[str, Activations]
    datasets: tuple[str, ...] = ()
    chunks: int = 0
    chunk_size: int = CHUNK_SIZE


@dataclass(frozen=True, eq=False)
class Imatrix:
    """Mean squared activations by tensor name, and their origin.

    weights: shape (experts, row length), or in one row if the file does not state the number of
    experts.
    """

    path: Path
    weights: dict[str, NDArray[np.float32]]
    datasets: list[str]
    chunks: int

    def fitted(self, shapes: Mapping[str, tuple[int, ...]]) -> "Imatrix":
        """The entries for the tensors of these shapes; RequestError if one does not fit."""
        fitting = {}
        for name, shape in shapes.items():
            weights = self.weights.get(name)
            if weights is None:
                continue
            experts = shape[2] if len(shape) > 2 else 1
            if weights.shape == (1, experts * shape[0]):
                weights = weights.reshape(experts, -1)
            if weights.shape == (experts, shape[0]):
                fitting[name] = weights
            elif name != EMBEDDING_TENSOR:  # not a matrix product, so it needs no imatrix
                raise RequestError(
                    f"--imatrix: {name}: expected weights of shape {[shape[0], experts]}, found "
                    f"{list(weights.shape[::-1])}; was it made for another model?"
                )
        return replace(self, weights=fitting)


def read_imatrix(path: Path) -> Imatrix:
    """Read an imatrix; FormatError if the file is another kind of GGUF or is inconsistent."""
    found = read_calibration(path)
    weights = {name: entry.mean() for name, entry in found.entries.items()}
    return Imatrix(path, weights, list(found.datasets), found.chunks)


def read_calibration(path: Path) -> Calibration:
    """Read what `read_imatrix` reads, with sums and counts apart."""
    with closing(FileSource(path)) as source:
        if source.size >= len(MAGIC) and source.read(0, len(MAGIC)) != MAGIC:
            return _read_older(path, source.read(0, source.size))
    with open_gguf(path) as file:
        return _read(path, file)


def _read_older(path: Path, data: bytes) -> Calibration:
    position = 0

    def take(count: int, field: str) -> bytes:
        nonlocal position
        if not 0 <= count <= len(data) - position:
            raise FormatError(
                f"{path}: magic: expected GGUF or an older imatrix.dat, found neither: {field} at "
                f"{position} has {count} bytes of {len(data)}"
            )
        position += count
        return data[position - count : position]

    def number(field: str) -> int:
        return int.from_bytes(take(4, field), "little", signed=True)

    def text(field: str) -> str:
        return take(number(f"the length of {field}"), field).decode("utf-8", "replace")

    entries = {}
    for index in range(number("the number of entries")):
        name = text(f"the name of entry {index}")
        calls = number(f"the calls of {name!r:.60}")
        size = 4 * number(f"the number of values of {name!r:.60}")
        sums = np.frombuffer(take(size, f"the values of {name!r:.60}"), "<f4")
        if not np.isfinite(sums).all():
            raise FormatError(
                f"{path}: {name!r:.60}: expected finite values, found NaN or infinity"
            )
        # The sums are means of rows times the calls, each of which read a chunk.
        calls = max(calls, 1)
        rows = np.full((1, 1), calls * CHUNK_SIZE, np.float32)
        entries[name] = Activations(sums.reshape(1, -1) * np.float32(CHUNK_SIZE), rows)
    if not entries:
        raise FormatError(f"{path}: expected an importance matrix, found no entries")
    chunks = number("the number of chunks") if position < len(data) else 0
    dataset = text("the name of the dataset") if position < len(data) else ""
    return Calibration(entries, (dataset,) if dataset else (), max(chunks, 0))


def _read(path: Path, file: GgufFile) -> Calibration:
    kind = file.scalar("general.type")
    if kind != "imatrix":
        raise FormatError(f"{path}: general.type: expected 'imatrix', found {kind!r}")
    entries = {}
    for name, sums in file.by_name.items():
        if not name.endswith(SUMS_SUFFIX):
            continue
        base = name.removesuffix(SUMS_SUFFIX)
        counts = file.by_name.get(base + COUNTS_SUFFIX)
        if counts is None:
            raise FormatError(f"{path}: {base}: has sums, expected {base + COUNTS_SUFFIX} too")
        entries[base] = _activations(_f32(file, sums), _f32(file, counts), f"{path}: {base}")
    return Calibration(
        entries,
        tuple(str(d) for d in file.array("imatrix.datasets") or []),
        file.integer("imatrix.chunk_count") or 0,
        file.integer("imatrix.chunk_size") or CHUNK_SIZE,
    )


def _f32(file: GgufFile, tensor: TensorInfo) -> NDArray[np.float32]:
    """A tensor of the imatrix as (experts, values)."""
    if tensor.type is not F32:
        raise FormatError(
            f"{file.source.name}: {tensor.name}: expected F32, found {tensor.type.name}"
        )
    data = np.frombuffer(file.source.read(tensor.offset, tensor.nbytes), "<f4")
    return data.reshape(-1, tensor.shape[0])


def _activations(sums: NDArray[np.float32], counts: NDArray[np.float32], where: str) -> Activations:
    if counts.shape != (len(sums), 1):
        raise FormatError(
            f"{where}: counts: expected shape {[1, len(sums)]}, found {list(counts.shape[::-1])}"
        )
    if not (np.isfinite(sums).all() and np.isfinite(counts).all()):
        raise FormatError(f"{where}: expected finite values, found NaN or infinity")
    return Activations(sums, counts)


def check_fits(where: str, calibration: Calibration, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """RequestError, naming the file `where`, unless all entries are of tensors of these shapes."""
    for name, entry in calibration.entries.items():
        shape = shapes.get(name)
        columns = entry.sums.shape[1] * len(entry.sums)
        if shape is None or columns not in (shape[0], shape[0] * math.prod(shape[2:])):
            found = "none" if shape is None else f"one of shape {list(shape)}"
            raise RequestError(
                f"{where}: {name}: expected a tensor with {columns} columns in the model, found "
                f"{found}; was it made for another model?"
            )


def merge(parts: Iterable[tuple[str, Calibration]]) -> Calibration:
    """Add up calibrations of one model, each with the name that an error gives it.

    RequestError if they are of models with tensors of different shapes. The chunk size is that of
    the first, in which the others' chunks are counted.
    """
    sums: dict[str, NDArray[np.float64]] = {}
    counts: dict[str, NDArray[np.float64]] = {}
    datasets: list[str] = []
    tokens = size = 0
    for where, part in parts:
        for name, entry in part.entries.items():
            if sums.setdefault(name, np.zeros(entry.sums.shape)).shape != entry.sums.shape:
                raise RequestError(
                    f"{where}: {name}: expected sums of shape {list(sums[name].shape[::-1])}, as "
                    f"before, found {list(entry.sums.shape[::-1])}; was it made for another model?"
                )
            sums[name] += entry.sums
            counts[name] = counts.get(name, 0) + entry.counts.astype(np.float64)
        datasets += [name for name in part.datasets if name not in datasets]
        size = size or part.chunk_size
        tokens += part.chunks * part.chunk_size
    entries = {
        name: Activations(sums[name].astype(np.float32), counts[name].astype(np.float32))
        for name in sums
    }
    return Calibration(entries, tuple(datasets), tokens // max(size, 1), size or CHUNK_SIZE)


def write_imatrix(
    path: Path, calibration: Calibration, extra: Mapping[str, Value] | None = None
) -> None:
    """Write a GGUF that llama.cpp reads, too. extra: more keys of metadata."""
    metadata = {
        "general.type": Value(ValueType.STRING, "imatrix"),
        "imatrix.datasets": Value(ValueType.STRING, list(calibration.datasets)),
        "imatrix.chunk_count": Value(ValueType.U32, calibration.chunks),
        "imatrix.chunk_size": Value(ValueType.U32, calibration.chunk_size),
        **(extra or {}),
    }
    arrays = {}
    for name, entry in sorted(calibration.entries.items()):
        arrays[name + SUMS_SUFFIX] = entry.sums
        arrays[name + COUNTS_SUFFIX] = entry.counts
    layout = lay_out(metadata, [TensorSpec(n, a.shape[::-1], F32) for n, a in arrays.items()])
    with OutputFile(path, layout.size) as file:
        file.write(0, layout.header)
        for array, offset in zip(arrays.values(), layout.offsets, strict=True):
            file.write(offset, np.ascontiguousarray(array, "<f4").tobytes())
        file.commit()
