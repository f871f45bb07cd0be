"""The slices of rows in which a conversion is carried out, and the bytes of each.

A slice is read once and encoded at every type in which its tensor is written. The slices of plans
depend on nothing but the plans and the number of values in a slice, so that a later run, or another
machine, finds the same ones.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.files.tensor_types import F32, NVFP4, TensorType
from mtp_gguf.gguf_tools.imatrix import Imatrix
from mtp_gguf.quantize import ggml

from ..plans.plan import Plan, PlannedTensor
from ..plans.recipe import Order, Target
from .source_rows import SourceRows
from .weights import PLAIN_DTYPES, Extent, Rows

Write = Callable[[int, int, "bytes | memoryview"], None]
"""Writes bytes: the number of the output file, the offset in it, the data."""


@dataclass(frozen=True, eq=False)
class Place:
    """The destination of a tensor's rows at one type: row 0 is at `offset` of file `output`.

    Files are counted over the shards of all plans.
    """

    output: int
    offset: int


@dataclass(frozen=True, eq=False)
class Slice:
    """Rows of a tensor, and their destinations by type.

    rows: in the order of their sources. extents: the bytes of the sources that they are made from.
    """

    tensor: PlannedTensor
    rows: "range | Order"
    places: dict[TensorType, list[Place]]
    extents: list[Extent]

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        spec = self.tensor.spec
        if self.tensor.target is None:
            return sum(map(len, self.places.values())) * spec.nbytes
        width = sum(kind.row_bytes(spec.shape[0]) * len(at) for kind, at in self.places.items())
        return width * len(self.rows)

    def write(self, rows: SourceRows, imatrix: Imatrix | None, write: Write) -> int:
        """Read, encode and write the slice; returns the number of bytes written."""
        target = self.tensor.target
        source = None if target is None else _read(rows, target, self.rows)
        written = 0
        for kind, places in self.places.items():
            data = self._encoded(source, kind, imatrix)
            width = kind.row_bytes(self.tensor.spec.shape[0])
            for place in places:
                for first, part in self._runs(data):
                    write(place.output, place.offset + first * width, part.data)
                written += data.nbytes
        return written

    def _runs(self, data: NDArray[np.generic]) -> Iterator[tuple[int, NDArray[np.generic]]]:
        """The encoded rows in runs that are neighbours in the file, each with its first row."""
        if isinstance(self.rows, range):
            yield self.rows.start, data
            return
        breaks = np.flatnonzero(np.diff(self.rows) != 1) + 1
        bounds = [0, *breaks.tolist(), len(self.rows)]
        for start, stop in pairwise(bounds):
            yield int(self.rows[start]), data[start:stop]

    def _encoded(
        self, source: Rows | None, kind: TensorType, imatrix: Imatrix | None
    ) -> NDArray[np.generic]:
        """The bytes of the slice at one type, as a contiguous array."""
        target = self.tensor.target
        if target is None or source is None:
            data = self.tensor.data
            assert data is not None
            return np.ascontiguousarray(data, data.dtype.newbyteorder("<"))
        try:
            return encode(source, kind, self._importance(target, kind, imatrix))
        except ggml.GgmlError as error:
            low, high = min(self.rows), max(self.rows)
            raise CheckpointError(
                f"{target.recipe.sources[0]}: rows {low} to {high} of {target.name} "
                f"cannot be written as {kind.name}: {error}"
            ) from None

    def _importance(
        self, target: Target, kind: TensorType, imatrix: Imatrix | None
    ) -> NDArray[np.float32] | None:
        """The importance weights of the expert that the slice belongs to."""
        weights = imatrix.weights.get(target.name) if imatrix else None
        if weights is None or not kind.is_quantized:
            return None
        height = target.shape[1] if len(target.shape) > 1 else 1
        expert: NDArray[np.float32] = weights[int(self.rows[0]) // height]
        return expert


def slices_of(plans: Sequence[Plan], rows: SourceRows, values: int) -> list[Slice]:
    """The slices of the files of all plans, in the order of the bytes that they read.

    Tensors of one name and shape have the same content in all plans. values: the most in a slice,
    unless a row has more.
    """
    places: dict[object, dict[TensorType, list[Place]]] = defaultdict(lambda: defaultdict(list))
    tensors: dict[object, PlannedTensor] = {}
    shards = [shard for plan in plans for shard in plan.shards]
    for number, shard in enumerate(shards):
        for tensor, offset in zip(shard.tensors, shard.layout.offsets, strict=True):
            fixed = tensor.target.fixed if tensor.target else None
            key = (tensor.spec.name, tensor.spec.shape, fixed)
            tensors.setdefault(key, tensor)
            places[key][tensor.spec.type].append(Place(number, offset))
    found = [
        Slice(tensor, part, dict(places[key]), rows.extents(tensor.target, part))
        if tensor.target is not None
        else Slice(tensor, part, dict(places[key]), [])
        for key, tensor in tensors.items()
        for part in _parts(tensor, rows, values)
    ]
    found.sort(key=lambda s: min(((e.source.name, e.start) for e in s.extents), default=("", 0)))
    return found


def _parts(tensor: PlannedTensor, rows: SourceRows, values: int) -> "Iterator[range | Order]":
    """The rows of each slice of a tensor."""
    target = tensor.target
    if target is None:
        yield range(1)
        return
    height = tensor.spec.shape[1] if len(tensor.spec.shape) > 1 else 1
    step = max(values // tensor.spec.shape[0], 1)
    # Slices do not span experts, because each expert has its own importance weights.
    for matrix in range(0, target.rows, height):
        order = rows.in_source_order(target, matrix, matrix + height)
        for start in range(matrix, matrix + height, step):
            stop = min(start + step, matrix + height)
            if order is None:
                yield range(start, stop)
            else:
                yield order[start - matrix : stop - matrix]


def _read(rows: SourceRows, target: Target, wanted: "range | Order") -> Rows:
    if isinstance(wanted, range):
        return rows.read(target, wanted.start, wanted.stop)
    return rows.read_rows(target, wanted)


def encode(
    rows: Rows, kind: TensorType, importance: NDArray[np.float32] | None
) -> NDArray[np.generic]:
    """Encode rows as `kind`; 16-bit floats of the same type are returned unchanged.

    GgmlError if they contain NaN or infinity, or weights that are too large for the type.
    """
    if kind is NVFP4:
        return rows  # the checkpoint's own blocks, unchanged
    if rows.dtype != PLAIN_DTYPES.get(kind.name):
        if kind is not F32:
            return ggml.quantize(kind, rows, importance)
        rows = ggml.to_f32(rows)
    if not ggml.is_finite(rows):
        raise ggml.GgmlError("expected finite weights, found NaN or infinity")
    return rows.view(np.uint8)
