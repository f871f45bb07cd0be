"""Compares two models tensor by tensor: identical bytes, or the error between their values.

A side is anything that has tensors and can return their rows as numbers: a GGUF (`GgufSide`), or a
checkpoint after the converter's transforms (`convert.checkpoint_side`). Several threads read the
tensors in slices of rows, so memory use does not grow with the model.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .files.format import ArrayRef, Scalar, tensor_bytes
from .files.tensor_types import BY_NAME, F32, TensorType
from .heads.head import plain_shape
from .model import Model

R = TypeVar("R")
Rows = NDArray[np.float32]
Decoder = Callable[[TensorType, bytes], Rows]

_SLICE_VALUES = 1 << 18  # 1 MB as F32, which stays in the cache for several passes
_PLAIN = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}
# Largest relative error (root mean square) that rounding to a type can cause. For block types the
# bound is four times 2^-bits; the error of ggml's quantizers on normal and on heavy-tailed weights
# stays below it.
_FLOAT_ERROR = {"F64": 0.0, "F32": 1e-6, "F16": 2**-10, "BF16": 2**-7}
# Blocks of these types have an F16 scale. For tiny weights the scale is subnormal or 0, so it is
# off by up to half of F16's smallest number. The error of a value is that times the largest factor
# that the type multiplies the scale by: the scale of the sub-block and the quant.
_F16_STEP = 2**-25
_LARGEST_FACTOR = {
    "F16": 1,
    "Q4_0": 8,
    "Q4_1": 15,
    "Q5_0": 16,
    "Q5_1": 31,
    "Q8_0": 127,
    "Q2_K": 15 * 3,
    "Q3_K": 32 * 4,
    "Q4_K": 63 * 15,
    "Q5_K": 63 * 31,
    "Q6_K": 128 * 32,
    "IQ4_NL": 127,
    "IQ4_XS": 32 * 127,
    "IQ3_S": 31 * 15,
    "IQ3_XXS": 8 * 62,
    "IQ2_S": 4 * 43,
    "IQ2_XS": 4 * 43,
    "IQ2_XXS": 4 * 43,
}


class Side(Protocol):
    """One of the two compared models. `exact`: its values are unrounded, the other may round."""

    name: str
    exact: bool

    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape in ggml order and type of each tensor."""

    def raw(self, name: str, start: int, stop: int) -> bytes | None:
        """The stored bytes of rows `start` to `stop`; None if they cannot be compared directly."""

    def values(self, name: str, start: int, stop: int) -> Rows:
        """The values of rows `start` to `stop`, shape (rows, row length)."""


class Outcome(str, Enum):
    """The result of comparing a tensor."""

    SAME = "same"  # identical bytes, or identical values
    ROUNDED = "rounded"  # the difference is within what rounding to the types explains
    DAMAGED = "damaged"  # the difference is larger than that
    OTHER_SHAPE = "other shape"
    ONLY_FIRST = "only in the first"
    ONLY_SECOND = "only in the second"


@dataclass(frozen=True)
class TensorDifference:
    """The result for one tensor.

    types: the tensor's type on each side, None if it is missing there. error: root mean square
    difference, relative to the root mean square of the first side's values; None if nothing was
    compared. largest: largest absolute difference.
    """

    name: str
    outcome: Outcome
    types: tuple[str | None, str | None]
    error: float | None = None
    largest: float | None = None
    note: str = ""


@dataclass(frozen=True)
class MetadataDifference:
    """A key whose values differ, with both values as text (None if the key is missing)."""

    key: str
    values: tuple[str | None, str | None]


@dataclass(eq=False)
class _Sums:
    """Sums over the slices of a tensor."""

    squares: float = 0.0
    difference: float = 0.0
    largest: float = 0.0
    equal: bool = True
    not_numbers: int = 0

    def add(self, other: "_Sums") -> None:
        """Add the sums of another slice."""
        self.squares += other.squares
        self.difference += other.difference
        self.largest = max(self.largest, other.largest)
        self.equal &= other.equal
        self.not_numbers += other.not_numbers


@dataclass(frozen=True)
class _Slice:
    """Rows `start` to `stop` of a tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Rows:
    """Rows of a stored tensor: `height` rows from `first` on, in each group of `period` rows."""

    tensor: str
    first: int
    height: int
    period: int

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Start and length, in the stored tensor, of the runs that make rows `start` to `stop`."""
        while start < stop:
            index, within = divmod(start, self.height)
            count = min(stop - start, self.height - within)
            yield index * self.period + self.first + within, count
            start += count


class GgufSide:
    """A GGUF model; fused tensors are presented as their parts.

    decode: dequantizes blocks (ggml's own decoder). A `X.scale` tensor next to `X.weight`, as NVFP4
    has it, is multiplied into the values of the weight. Neither it nor the scale of the activations
    (`X.input_scale`) is listed as a tensor.
    """

    exact = False

    def __init__(self, model: Model, decode: Decoder) -> None:
        self.name = str(model.path)
        self._model = model
        self._decode = decode
        self._scales = {
            weight: name
            for name, tensor in model.tensors.items()
            if name.endswith(".scale")
            and (weight := name.removesuffix("scale") + "weight") in model.tensors
            and tensor.shape in ((1,), model.tensors[weight].shape[2:])
            and tensor.type is F32
        }
        inputs = (n.removesuffix("weight") + "input_scale" for n in model.tensors)
        hidden = {*self._scales.values(), *inputs}
        self._rows: dict[str, _Rows] = {}
        self._tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, tensor in model.tensors.items():
            if name in hidden:
                continue
            height = math.prod(tensor.shape[1:])
            first = 0
            for part, rows in model.head.fused_parts(name).items():
                self._tensors[part] = (tensor.shape[0], rows, *tensor.shape[2:]), tensor.type.name
                self._rows[part] = _Rows(name, first, rows, tensor.shape[1])
                first += rows
            if not first:
                self._tensors[name] = tensor.shape, tensor.type.name
                self._rows[name] = _Rows(name, 0, height, height)

    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each tensor."""
        return self._tensors

    def raw(self, name: str, start: int, stop: int) -> bytes | None:
        """The bytes of these rows; None if a separate scale tensor is part of their values."""
        scaled = self._rows[name].tensor in self._scales
        return None if scaled else self._bytes(name, start, stop)

    def values(self, name: str, start: int, stop: int) -> Rows:
        """The values of these rows."""
        stored = self._rows[name]
        tensor = self._model.tensors[stored.tensor]
        data = self._bytes(name, start, stop)
        if tensor.type.name in _PLAIN:
            values = np.frombuffer(data, _PLAIN[tensor.type.name]).astype(np.float32)
        else:
            values = self._decode(tensor.type, data)
        rows = values.reshape(stop - start, tensor.shape[0])
        if stored.tensor not in self._scales:
            return rows
        scale = np.frombuffer(self._model.read(self._scales[stored.tensor]), "<f4")
        per_expert = min(stored.height, tensor.shape[1])
        expert = np.arange(start, stop) // per_expert if scale.size > 1 else [0]
        scaled: Rows = rows * scale[expert][:, None]
        return scaled

    def _bytes(self, name: str, start: int, stop: int) -> bytes:
        stored = self._rows[name]
        tensor = self._model.tensors[stored.tensor]
        length = tensor.type.row_bytes(tensor.shape[0])
        return b"".join(
            self._model.read(stored.tensor, row * length, count * length)
            for row, count in stored.runs(start, stop)
        )


def compare_tensors(
    first: Side, second: Side, progress: Callable[[int], None] = lambda _: None, workers: int = 4
) -> list[TensorDifference]:
    """Compare every tensor of both sides; the largest differences come first.

    progress: called with the number of bytes of the first side that were just compared.
    """
    exact = (first.exact, second.exact)
    ours, theirs = first.tensors(), second.tensors()
    found = []
    sums: dict[str, _Sums] = {}
    for name in [*ours, *(n for n in theirs if n not in ours)]:
        kinds = _kinds(name, ours, theirs)
        if name not in theirs:
            found.append(TensorDifference(name, Outcome.ONLY_FIRST, kinds))
        elif name not in ours:
            found.append(TensorDifference(name, Outcome.ONLY_SECOND, kinds))
        elif plain_shape(ours[name][0]) != plain_shape(theirs[name][0]):
            note = f"{list(ours[name][0])} and {list(theirs[name][0])}"
            found.append(TensorDifference(name, Outcome.OTHER_SHAPE, kinds, note=note))
        else:
            sums[name] = _Sums()
    slices = [_Slice(name, *rows) for name in sums for rows in _bounds(ours[name][0])]
    with ThreadPoolExecutor(workers) as pool:
        parts = _in_order(pool, lambda s: _compare(first, second, s), slices, 2 * workers)
        unread: dict[str, list[_Slice]] = {name: [] for name in sums}
        for part, place in zip(parts, slices, strict=True):
            if part is None:
                unread[place.name].append(place)
            else:
                sums[place.name].add(part)
            shape, kind = ours[place.name]
            progress((place.stop - place.start) * BY_NAME[kind].row_bytes(shape[0]))
        # If a tensor differs anywhere, its equal slices count towards the relative error, too.
        rest = [s for name, places in unread.items() if not sums[name].equal for s in places]
        for squares, place in zip(
            _in_order(pool, lambda s: _squares(first, s), rest, 2 * workers), rest, strict=True
        ):
            sums[place.name].squares += squares
    found += [
        _outcome_of(n, _kinds(n, ours, theirs), total, math.prod(ours[n][0]), exact)
        for n, total in sums.items()
    ]
    return sorted(found, key=_damage, reverse=True)


def compared_bytes(first: Side, second: Side) -> int:
    """Number of bytes of the first side that a comparison reads."""
    theirs = second.tensors()
    ours = first.tensors().items()
    return sum(tensor_bytes(shape, BY_NAME[kind]) for n, (shape, kind) in ours if n in theirs)


def compare_metadata(
    first: Mapping[str, Scalar | tuple[Scalar, ...]],
    second: Mapping[str, Scalar | tuple[Scalar, ...]],
) -> list[MetadataDifference]:
    """Keys that are missing on one side or have different values."""
    differing = []
    for key in [*first, *(k for k in second if k not in first)]:
        ours, theirs = first.get(key), second.get(key)
        if ours != theirs:
            differing.append(MetadataDifference(key, _shown(ours, theirs)))
    return differing


def all_metadata(model: Model) -> dict[str, Scalar | tuple[Scalar, ...]]:
    """Every key of a model with its value."""
    return {
        key: tuple(model.first.array(key) or ()) if isinstance(held, ArrayRef) else held
        for key, held in model.first.keys.items()
    }


def explained_error(kinds: tuple[str | None, str | None], exact: tuple[bool, bool]) -> float:
    """The largest relative error that rounding to these two types explains.

    exact: sides whose values are not rounded at all.
    """
    rounded = [kind for kind, plain in zip(kinds, exact, strict=True) if kind and not plain]
    return sum(_FLOAT_ERROR.get(kind, _block_error(kind)) for kind in rounded)


def explained_difference(kinds: tuple[str | None, str | None], exact: tuple[bool, bool]) -> float:
    """The absolute difference that these two types explain however small the values are."""
    rounded = [kind for kind, plain in zip(kinds, exact, strict=True) if kind and not plain]
    return _F16_STEP * sum(_LARGEST_FACTOR.get(kind, 0) for kind in rounded)


def _block_error(name: str) -> float:
    kind = BY_NAME.get(name)
    return 4.0 * 2.0 ** (-8 * kind.block_bytes / kind.block_length) if kind else 0.0


def _kinds(
    name: str,
    ours: Mapping[str, tuple[tuple[int, ...], str]],
    theirs: Mapping[str, tuple[tuple[int, ...], str]],
) -> tuple[str | None, str | None]:
    return (ours[name][1] if name in ours else None, theirs[name][1] if name in theirs else None)


def _in_order(
    pool: ThreadPoolExecutor, job: Callable[[_Slice], R], items: Sequence[_Slice], ahead: int
) -> Iterator[R]:
    """Yield the results in order, with at most `ahead` jobs submitted in advance."""
    waiting: deque[Future[R]] = deque()
    for item in items:
        waiting.append(pool.submit(job, item))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _bounds(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First and last row of each slice."""
    rows = math.prod(shape[1:])
    step = max(_SLICE_VALUES // max(shape[0], 1), 1)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _compare(first: Side, second: Side, place: _Slice) -> _Sums | None:
    """The sums of a slice; None if its bytes are identical, so that nothing was decoded."""
    where = (place.name, place.start, place.stop)
    if first.tensors()[place.name][1] == second.tensors()[place.name][1]:
        ours, theirs = first.raw(*where), second.raw(*where)
        if ours is not None and ours == theirs:
            return None
    a, b = first.values(*where), second.values(*where)
    with np.errstate(all="ignore"):
        apart = b - a
        squares, difference = _sum_of_squares(a), _sum_of_squares(apart)
    if not math.isfinite(squares + difference):
        return _compare_carefully(a.astype(np.float64), b.astype(np.float64))
    largest = float(max(apart.max(initial=0.0), -apart.min(initial=0.0)))
    return _Sums(squares, difference, largest, equal=largest == 0)


def _sum_of_squares(rows: Rows) -> float:
    """Sum in F32 along a row and in F64 over rows; without BLAS, which would start more threads."""
    return float(np.einsum("ij,ij->i", rows, rows).sum(dtype=np.float64))


def _compare_carefully(a: NDArray[np.float64], b: NDArray[np.float64]) -> _Sums:
    """Like `_compare`, for values that are not finite or too large for sums in F32."""
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    apart = b - a
    broken = int(finite.size - np.count_nonzero(finite))
    return _Sums(
        squares=float(np.square(a).sum()),
        difference=float(np.square(apart).sum()),
        largest=float(np.abs(apart).max(initial=0.0)),
        equal=not broken and not apart.any(),
        not_numbers=broken,
    )


def _squares(side: Side, place: _Slice) -> float:
    values = side.values(place.name, place.start, place.stop).astype(np.float64)
    return float(np.square(values[np.isfinite(values)]).sum())


def _outcome_of(
    name: str,
    kinds: tuple[str | None, str | None],
    sums: _Sums,
    count: int,
    exact: tuple[bool, bool],
) -> TensorDifference:
    if sums.equal:
        return TensorDifference(name, Outcome.SAME, kinds, 0.0, 0.0)
    if sums.not_numbers:
        note = f"{sums.not_numbers} values are not finite"
        return TensorDifference(name, Outcome.DAMAGED, kinds, math.inf, math.inf, note)
    error = math.sqrt(sums.difference / sums.squares) if sums.squares else math.inf
    size, apart = math.sqrt(sums.squares / count), math.sqrt(sums.difference / count)
    fine = apart <= explained_error(kinds, exact) * size + explained_difference(kinds, exact)
    outcome = Outcome.ROUNDED if fine else Outcome.DAMAGED
    return TensorDifference(name, outcome, kinds, error, sums.largest)


def _damage(found: TensorDifference) -> tuple[bool, float]:
    """Sort key: missing tensors and other shapes first, then by relative error."""
    compared = found.error is not None
    return (not compared, found.error if found.error is not None else math.inf)


def _shown(
    ours: Scalar | tuple[Scalar, ...] | None, theirs: Scalar | tuple[Scalar, ...] | None
) -> tuple[str | None, str | None]:
    """Two differing values as text; for arrays, the first entries that differ."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
        return _array_text(ours, at), _array_text(theirs, at)
    return _value_text(ours), _value_text(theirs)


def _array_text(values: tuple[Scalar, ...], at: int) -> str:
    there = f"[{at}] = {values[at]!r:.60}" if at < len(values) else f"nothing at [{at}]"
    return f"{len(values)} entries, {there}"


def _value_text(value: Scalar | tuple[Scalar, ...] | None) -> str | None:
    if value is None:
        return None
    return f"{len(value)} entries" if isinstance(value, tuple) else f"{value!r:.80}"
