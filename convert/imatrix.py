"""Reads importance matrices in llama.cpp's formats: GGUF and the legacy `imatrix.dat`.

A GGUF contains, for each tensor NAME, `NAME.in_sum2` [row length, experts] (sums of squared
activations) and `NAME.counts` [1, experts] (how many were summed), both F32.

A legacy file contains, little-endian: i32 number of entries | entries | i32 number of chunks | i32
length and name of the dataset; the part after the entries may be absent. An entry: i32 length and
name of the tensor | i32 number of calls | i32 number of values | F32 values of all experts,
multiplied by the number of calls.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import FormatError, RequestError
from mtp_gguf.gguf_tools.fastmtp import EMBEDDING_TENSOR
from mtp_gguf.gguf_tools.format import MAGIC, GgufFile, TensorInfo, open_gguf
from mtp_gguf.gguf_tools.sources import FileSource
from mtp_gguf.gguf_tools.tensor_types import F32

from .recipe import Target

SUMS_SUFFIX = ".in_sum2"
COUNTS_SUFFIX = ".counts"


@dataclass(frozen=True, eq=False)
class Imatrix:
    """Mean squared activations by tensor name, and their origin.

    weights: shape (experts, row length), or flat if the file does not state the number of experts.
    """

    path: Path
    weights: dict[str, NDArray[np.float32]]
    datasets: list[str]
    chunks: int

    def fitted(self, targets: Sequence[Target]) -> "Imatrix":
        """The entries for these targets; RequestError if the shape of one does not fit."""
        kept = {}
        for target in targets:
            weights = self.weights.get(target.name)
            if weights is None:
                continue
            experts = target.shape[2] if len(target.shape) > 2 else 1
            if weights.shape == (experts * target.shape[0],):
                weights = weights.reshape(experts, -1)
            if weights.shape == (experts, target.shape[0]):
                kept[target.name] = weights
            elif target.name != EMBEDDING_TENSOR:  # not a matrix product, so it needs no imatrix
                raise RequestError(
                    f"--imatrix: {target.name}: expected weights of shape "
                    f"{[target.shape[0], experts]}, found {list(weights.shape[::-1])}; "
                    "was it made for another model?"
                )
        return replace(self, weights=kept)


def read_imatrix(path: Path) -> Imatrix:
    """Read an imatrix; FormatError if the file is another kind of GGUF or is inconsistent."""
    with closing(FileSource(path)) as source:
        if source.size >= len(MAGIC) and source.read(0, len(MAGIC)) != MAGIC:
            return _read_older(path, source.read(0, source.size))
    with open_gguf(path) as file:
        return _read(path, file)


def _read_older(path: Path, data: bytes) -> Imatrix:
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

    weights = {}
    for index in range(number("the number of entries")):
        name = text(f"the name of entry {index}")
        calls = number(f"the calls of {name!r:.60}")
        size = 4 * number(f"the number of values of {name!r:.60}")
        sums = np.frombuffer(take(size, f"the values of {name!r:.60}"), "<f4")
        if not np.isfinite(sums).all():
            raise FormatError(
                f"{path}: {name!r:.60}: expected finite values, found NaN or infinity"
            )
        weights[name] = sums / np.float32(calls) if calls > 0 else sums
    if not weights:
        raise FormatError(f"{path}: expected an importance matrix, found no entries")
    chunks = number("the number of chunks") if position < len(data) else 0
    dataset = text("the name of the dataset") if position < len(data) else ""
    return Imatrix(path, weights, [dataset] if dataset else [], max(chunks, 0))


def _read(path: Path, file: GgufFile) -> Imatrix:
    kind = file.scalar("general.type")
    if kind != "imatrix":
        raise FormatError(f"{path}: general.type: expected 'imatrix', found {kind!r}")
    weights = {}
    for name, sums in file.by_name.items():
        if not name.endswith(SUMS_SUFFIX):
            continue
        base = name.removesuffix(SUMS_SUFFIX)
        counts = file.by_name.get(base + COUNTS_SUFFIX)
        if counts is None:
            raise FormatError(f"{path}: {base}: has sums, expected {base + COUNTS_SUFFIX} too")
        weights[base] = _mean(_f32(file, sums), _f32(file, counts), f"{path}: {base}")
    datasets = [str(d) for d in file.array("imatrix.datasets") or []]
    return Imatrix(path, weights, datasets, file.integer("imatrix.chunk_count") or 0)


def _f32(file: GgufFile, tensor: TensorInfo) -> NDArray[np.float32]:
    """A tensor of the imatrix as (experts, values)."""
    if tensor.type is not F32:
        raise FormatError(
            f"{file.source.name}: {tensor.name}: expected F32, found {tensor.type.name}"
        )
    data = np.frombuffer(file.source.read(tensor.offset, tensor.nbytes), "<f4")
    return data.reshape(-1, tensor.shape[0])


def _mean(
    sums: NDArray[np.float32], counts: NDArray[np.float32], where: str
) -> NDArray[np.float32]:
    """Sums divided by counts in F32, as in llama-quantize; 1 for experts without activations."""
    if counts.shape != (len(sums), 1):
        raise FormatError(
            f"{where}: counts: expected shape {[1, len(sums)]}, found {list(counts.shape[::-1])}"
        )
    if not (np.isfinite(sums).all() and np.isfinite(counts).all()):
        raise FormatError(f"{where}: expected finite values, found NaN or infinity")
    seen = counts > 0
    return np.where(seen, sums / np.where(seen, counts, np.float32(1)), np.float32(1))
