"""Looks at the values of a head, which can be all zero or not finite and still fit its trunk."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..model import Model
from .head import plain_shape

_BEGINNING = 1 << 16  # bytes read of each tensor; a head that is damaged as a whole shows it there
_CHUNK = 1 << 22  # bytes read at a time after that, of a tensor that begins with zeros


@dataclass(frozen=True)
class HeadValues:
    """What is wrong with the values of a head.

    not_finite: tensors that begin with NaN or infinity among their values. zero: matrices that
    are all zero. matrices: the number of matrices.
    """

    not_finite: tuple[str, ...]
    zero: tuple[str, ...]
    matrices: int


def head_values(model: Model) -> HeadValues:
    """Read the beginning of each tensor of the head, and those that begin with zeros further.

    A matrix of one row counts as a vector: the router of one expert chooses nothing, and is zero.
    """
    shapes = {name: plain_shape(model.tensors[name].shape) for name in model.head.suffixes}
    return inspect_values(shapes, lambda name: _chunks(model, name))


def inspect_values(
    shapes: Mapping[str, tuple[int, ...]], chunks: Callable[[str], Iterator[Any]]
) -> HeadValues:
    """Inspect tensors by their shapes.

    chunks: yields the values of a tensor as NumPy arrays, one after the other; the first, which is
    always read, should be short. NotImplementedError or ValueError for a type that cannot be read.
    """
    not_finite, zero, matrices = [], [], 0
    for name, shape in shapes.items():
        largest = (float(abs(values).max()) for values in chunks(name))  # NaN if a value is
        with suppress(NotImplementedError, ValueError):
            beginning = next(largest, 0.0)  # of no values
            matrices += len(shape) > 1
            if not math.isfinite(beginning):
                not_finite.append(name)
            elif len(shape) > 1 and beginning == 0 and not any(largest):
                zero.append(name)
    return HeadValues(tuple(not_finite), tuple(zero), matrices)


def _chunks(model: Model, name: str) -> Iterator[Any]:
    """The values of a tensor in F32; NotImplementedError if the gguf package cannot decode it."""
    import numpy as np  # noqa: PLC0415  (slow, and not needed to read headers)
    from gguf import GGMLQuantizationType, quants  # noqa: PLC0415

    tensor = model.tensors[name]
    block, start, size = tensor.type.block_bytes, 0, _BEGINNING
    while start < tensor.nbytes:
        length = min(max(size // block, 1) * block, tensor.nbytes - start)
        data = np.frombuffer(model.read(name, start, length), np.uint8)
        with np.errstate(all="ignore"):  # NaN and infinity are what is looked for
            yield quants.dequantize(data, GGMLQuantizationType(tensor.type.id))
        start, size = start + length, _CHUNK
