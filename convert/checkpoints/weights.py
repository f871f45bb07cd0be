"""The weights of a checkpoint in all storage schemes, and their dequantized rows.

Each class is one way to store a matrix: unquantized, or quantized with scales and zero points. All
have the shape of the weight itself, so callers need not know how it is stored. The values are bit
for bit those that llama.cpp's converter computes (`dequant_model` in its conversion/base.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.hub.sources import WeightSource

from .checkpoint import PlacedTensor

Rows: TypeAlias = NDArray[Any]
"""A two-dimensional array in C order, of F32, F16 or BF16 (ml_dtypes.bfloat16)."""

PLAIN_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_BYTE_DTYPES: dict[str, np.dtype[Any]] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I8": np.dtype(np.int8),
}
_DTYPES = {
    **PLAIN_DTYPES,
    **_BYTE_DTYPES,
    "U8": np.dtype(np.uint8),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}

NVFP4_GROUP = 16  # values that share a scale
_NVFP4_RECORD = 1 + NVFP4_GROUP // 2  # bytes: the scale, then the values, two in each
_SUPER_BLOCK = 4  # groups in a block of ggml's NVFP4
_MXFP4_GROUP = 32  # values that share an exponent
_NO_EXPONENT = 255  # stands for NaN
_DEVICES = (8, 4)  # among which a matrix may have been divided
_FUSED = "self_attn.qkv_proj.weight"
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Extent(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    source: WeightSource
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight under the name that it has in the model, dequantized to F32 unless a class says so.

    values: the tensor with its values.
    """

    name: str
    values: PlacedTensor

    @property
    def where(self) -> str:
        """The file of the values, for messages."""
        return self.values.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, outermost dimension first; that of the values unless they are packed."""
        return self.values.stored.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its rows: F32, F16 or BF16."""
        return PLAIN_DTYPES["F32"]

    def check(self) -> None:
        """Raise CheckpointError if the stored tensors do not form a weight."""

    def rows(self, start: int, stop: int) -> Rows:
        """Rows `start` to `stop` of the weight as a matrix."""
        raise NotImplementedError

    def extent(self, start: int, stop: int) -> Extent:
        """The bytes that hold the values of these rows, without their scales."""
        stored = self.values.stored
        row = stored.nbytes // max(prod(stored.shape[:-1]), 1)
        first = stored.offset + start * row
        return Extent(self.values.source, first, first + (stop - start) * row)


class PlainWeight(Weight):
    """An unquantized weight, whose rows have the tensor's own type."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The tensor's own."""
        return PLAIN_DTYPES[self.values.stored.dtype]

    def check(self) -> None:
        """Raise CheckpointError if the tensor's type is not that of a weight."""
        if self.values.stored.dtype not in PLAIN_DTYPES:
            expected = f"one of {', '.join(PLAIN_DTYPES)}"
            raise _fault(self, expected, self.values.stored.dtype)

    def rows(self, start: int, stop: int) -> Rows:
        """Rows as they are stored."""
        return _read_rows(self.values, start, stop)


@dataclass(frozen=True, eq=False)
class FoldedWeight(Weight):
    """A vector, `weight`, as a matrix with rows of `width` values."""

    weight: Weight
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return (prod(self.weight.shape) // self.width, self.width)

    def rows(self, start: int, stop: int) -> Rows:
        """Rows of the matrix."""
        return self.weight.rows(0, 1).reshape(-1, self.width)[start:stop]

    def extent(self, start: int, stop: int) -> Extent:
        """The bytes of the whole vector."""
        return self.weight.extent(0, 1)


@dataclass(frozen=True, eq=False)
class ScaledWeight(Weight):
    """8-bit values with a scale per tensor, per row or per block.

    scale: None if it is missing. block: rows and columns of a block; None if the scale has the
    shape of the weight without its last dimensions.
    """

    scale: PlacedTensor | None
    scale_name: str
    block: tuple[int, int] | None

    def check(self) -> None:
        """Raise CheckpointError if the scale is missing or does not fit."""
        dtype, shape = self.values.stored.dtype, self.shape
        if dtype not in (*_BYTE_DTYPES, *PLAIN_DTYPES):
            raise _fault(self, f"one of {', '.join(_BYTE_DTYPES)}", dtype)
        if self.scale is None:
            raise CheckpointError(
                f"{self.where}: {self.name}: FP8 weights need its tensor {self.scale_name}, "
                "found none"
            )
        if len(shape) < 2:
            raise _fault(self, "scales of matrices only", self.scale_name)
        found = self.scale.stored
        if found.dtype not in PLAIN_DTYPES or not self._fits(found.shape):
            raise CheckpointError(
                f"{self.where}: {self.scale_name}: expected shape {self._expected()} of F32, F16 "
                f"or BF16, found {list(found.shape)} {found.dtype}"
            )

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """The values of these rows, multiplied by their scales."""
        assert self.scale is not None
        *_, height, width = self.shape
        scales = _as_f32(_read_all(self.scale))
        if self.block is None:
            # One scale per row, per matrix or per tensor.
            steps = (prod(self.shape[:-1]) // scales.size, width)
            scales = scales.reshape(-1, 1)
            at = np.arange(start, stop) // steps[0]
        else:
            steps = self.block
            scales = scales.reshape(-1, scales.shape[-1])
            index, height = np.arange(start, stop), height // self.devices
            at = index // height * -(-height // steps[0]) + index % height // steps[0]
        per_row = scales[at]
        values = _as_f32(_read_rows(self.values, start, stop))
        for column in range(per_row.shape[1]):
            values[:, column * steps[1] : (column + 1) * steps[1]] *= per_row[:, column, None]
        return values

    @property
    def devices(self) -> int:
        """In how many equal groups of rows the blocks were counted; 1 unless the scales say so.

        More in checkpoints of MiMo-V2, whose matrices were divided among devices: the rows of each
        begin with a block, and its last block may be shorter. Only its fused projections are
        always divided.
        """
        fused = self.name.endswith(_FUSED)
        return next(filter(self._counted_on, (*_DEVICES, 1) if fused else (1, *_DEVICES)), 1)

    def _counted_on(self, devices: int) -> bool:
        """Whether the number of scales is that of blocks that were counted on so many devices."""
        if self.block is None or self.scale is None or len(self.shape) != 2:
            return devices == 1
        rows, step = self.shape[0], self.block[0]
        count = devices * -(-rows // devices // step)
        return rows % devices == 0 and self.scale.stored.shape[:1] == (count,)

    def _expected(self) -> list[int]:
        *outer, rows, columns = self.shape
        if self.block is None:
            return [*outer, rows, 1]
        return [*outer, -(-rows // self.block[0]), -(-columns // self.block[1])]

    def _fits(self, scale: tuple[int, ...]) -> bool:
        if self.block is not None:
            expected = self._expected()
            if self.devices > 1:
                expected[0] = scale[0]
            return list(scale) == expected
        if len(scale) > len(self.shape):
            return False
        padded = scale + (1,) * (len(self.shape) - len(scale))
        # The scale has the weight's leading dimensions, then ones: [experts, 1, 1].
        count = next((i for i, n in enumerate(padded) if n != self.shape[i]), len(padded))
        return count < len(padded) and all(n == 1 for n in padded[count:])


@dataclass(frozen=True, eq=False)
class _PairsWeight(Weight):
    """4-bit floats, two in each byte. scale: a scale for each group of values."""

    scale: PlacedTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        *outer, packed = self.values.stored.shape or (0,)
        return (*outer, packed * 2)


class Mxfp4Weight(_PairsWeight):
    """MXFP4: 4-bit floats with an exponent per 32 values.

    values: U8 [rows, columns / 2]. scale: U8 [rows, columns / 32], the exponents plus 127.
    """

    def check(self) -> None:
        """Raise CheckpointError if the scales do not fit."""
        if len(self.shape) != 2 or self.shape[1] % _MXFP4_GROUP:
            raise _fault(self, f"rows of a multiple of {_MXFP4_GROUP} values", list(self.shape))
        expected = (self.shape[0], self.shape[1] // _MXFP4_GROUP)
        _check_part(self.scale, expected, ("U8",), "for MXFP4")

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """The values multiplied by their scales."""
        exponents = _read_rows(self.scale, start, stop)
        if (exponents == _NO_EXPONENT).any():
            raise _fault(self, f"scales that are finite in {self.scale.stored.name}", "NaN")
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
        packed = _read_rows(self.values, start, stop)
        codes = np.stack([packed & 0x0F, packed >> 4], axis=-1)
        values = _E2M1[codes].reshape(*scales.shape, _MXFP4_GROUP) * scales[..., None]
        weight: NDArray[np.float32] = values.reshape(stop - start, -1)
        return weight


@dataclass(frozen=True, eq=False)
class GptqWeight(Weight):
    """GPTQ: values of `bits` bits, packed along the input and stored transposed.

    values: I32 [inputs * bits / 32, outputs]. qzeros: I32 [groups, outputs * bits / 32].
    scales: [groups, outputs]. g_idx: I32 [inputs], the group of each input. offset: added to stored
    zero points (the first version of the format stores them minus one).
    """

    qzeros: PlacedTensor
    scales: PlacedTensor
    g_idx: PlacedTensor
    bits: int
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs."""
        return (*self.values.stored.shape[1:], *self.g_idx.stored.shape)

    def check(self) -> None:
        """Raise CheckpointError if the four tensors do not fit together."""
        per_word = 32 // self.bits
        outputs, inputs = self.shape if len(self.shape) == 2 else (0, 0)
        groups = self.scales.stored.shape[0] if self.scales.stored.shape else 0
        for tensor, shape, dtypes in (
            (self.values, (inputs // per_word, outputs), ("I32",)),
            (self.qzeros, (groups, outputs // per_word), ("I32",)),
            (self.scales, (groups, outputs), tuple(PLAIN_DTYPES)),
            (self.g_idx, (inputs,), ("I32",)),
        ):
            _check_part(tensor, shape, dtypes, f"for GPTQ in {self.bits} bits")
        if inputs % per_word or outputs % per_word:
            raise _fault(self, f"multiples of {per_word} values", list(self.shape))

    def extent(self, start: int, stop: int) -> Extent:
        """The whole tensor, because outputs are its columns."""
        return super().extent(0, self.values.stored.shape[0])

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """The rows of these outputs, which are columns of the stored tensors."""
        per_word = 32 // self.bits
        groups = _read_all(self.g_idx)
        if groups.size and not 0 <= groups.min() <= groups.max() < self.scales.stored.shape[0]:
            raise _fault(self, f"g_idx below {self.scales.stored.shape[0]}", int(groups.max()))
        first = start // per_word
        words = _read_columns(self.qzeros, first, -(-stop // per_word))
        zeros = _unpacked(words, self.bits)[:, start - first * per_word :][:, : stop - start]
        scales = _as_f32(_read_columns(self.scales, start, stop))
        values = _unpacked(_read_columns(self.values, start, stop).T, self.bits)
        steps = values.astype(np.int32) - (zeros.astype(np.int32) + self.offset).T[:, groups]
        weight: NDArray[np.float32] = scales.T[:, groups] * steps.astype(np.float32)
        return weight


@dataclass(frozen=True, eq=False)
class PackedWeight(Weight):
    """Integers of `bits` bits, packed into I32 words along the row, with a scale per group.

    compressed-tensors' pack-quantized. values: I32 [rows, ceil(columns / values in a word)].
    scale: [rows, groups]. zero_point: I32 [ceil(rows / values in a word), groups], packed along
    the rows; None means half of the range. shape_tensor: I64 [2], the weight's shape.
    """

    scale: PlacedTensor
    zero_point: PlacedTensor | None
    shape_tensor: PlacedTensor
    bits: int
    group_size: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns; columns from the groups, or from the words if a row is one group."""
        words, scale = self.values.stored.shape, self.scale.stored.shape
        if len(words) != 2 or len(scale) != 2:
            return words
        columns = words[1] * (32 // self.bits)
        return words[0], columns if self.group_size is None else scale[1] * self.group_size

    def check(self) -> None:
        """Raise CheckpointError if the tensors do not fit together."""
        per_word = 32 // self.bits
        rows, columns = self.shape if len(self.shape) == 2 else (0, 0)
        groups = 1 if self.group_size is None else columns // self.group_size
        how = f"for {self.bits} bits in groups of {self.group_size or columns}"
        _check_part(self.values, (rows, -(-columns // per_word)), ("I32",), how)
        _check_part(self.scale, (rows, groups), tuple(PLAIN_DTYPES), how)
        _check_part(self.shape_tensor, (2,), ("I64", "I32"), how)
        if self.zero_point is not None:
            _check_part(self.zero_point, (-(-rows // per_word), groups), ("I32",), how)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """The values of these rows minus their zero points, multiplied by their scales."""
        stated = _read_all(self.shape_tensor).tolist()
        if stated != list(self.shape):
            raise _fault(self, f"shape {list(self.shape)} by its parts", stated)
        scale = _as_f32(_read_rows(self.scale, start, stop))
        values = _unpacked(_read_rows(self.values, start, stop), self.bits)
        grouped = values[:, : self.shape[1]].reshape(*scale.shape, -1).astype(np.int32)
        offset: NDArray[Any] | int = 1 << (self.bits - 1)
        if self.zero_point is not None:
            per_word = 32 // self.bits
            first = start // per_word
            words = _read_rows(self.zero_point, first, -(-stop // per_word))
            points = _unpacked(words.T, self.bits).T[start - first * per_word :][: stop - start]
            offset = points.astype(np.int32)[:, :, None]
        weight: NDArray[np.float32] = (grouped - offset).astype(np.float32) * scale[:, :, None]
        return weight.reshape(stop - start, -1)


@dataclass(frozen=True, eq=False)
class Nvfp4Weight(_PairsWeight):
    """NVFP4: 4-bit floats with an 8-bit scale per 16 values, and another scale per tensor.

    values: U8 [rows, columns / 2]. scale: F8_E4M3 [rows, columns / 16]. second: the tensor's scale;
    None means 1. inputs: the scale of the activations, which only the runtime uses. inverted:
    second and inputs are stored as reciprocals.
    """

    second: PlacedTensor | None
    inputs: PlacedTensor | None
    inverted: bool

    def check(self) -> None:
        """Raise CheckpointError if the tensors do not fit together."""
        rows, columns = self.shape if len(self.shape) == 2 else (0, 0)
        groups = columns // NVFP4_GROUP
        _check_part(self.values, (rows, groups * NVFP4_GROUP // 2), ("U8",), "for NVFP4")
        _check_part(self.scale, (rows, groups), ("F8_E4M3",), "for NVFP4")
        for scalar in (self.second, self.inputs):
            if scalar is not None and prod(scalar.stored.shape) != 1:
                raise _fault(self, f"one value in {scalar.stored.name}", list(scalar.stored.shape))
            if scalar is not None and scalar.stored.dtype not in PLAIN_DTYPES:
                raise _fault(self, f"a float in {scalar.stored.name}", scalar.stored.dtype)

    def tensor_scale(self) -> float:
        """The scale of the whole tensor, rounded to F32."""
        return self._scalar(self.second)

    def input_scale(self) -> float:
        """The scale of its activations, rounded to F32."""
        return self._scalar(self.inputs)

    def _scalar(self, tensor: PlacedTensor | None) -> float:
        if tensor is None:
            return 1.0
        value = _as_f32(_read_all(tensor)).reshape(1)
        with np.errstate(divide="ignore"):
            value = np.float32(1) / value if self.inverted else value
        if not np.isfinite(value).all():
            raise _fault(self, f"a finite scale in {tensor.stored.name}", float(value[0]))
        return float(value[0])

    def records(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows as groups of nine bytes: the scale, then the values in ggml's order."""
        scale = _read_rows(self.scale, start, stop).view(np.uint8) & 0x7F
        if (scale == 0x7F).any():
            raise _fault(self, f"scales that are finite in {self.scale.stored.name}", "NaN")
        pairs = _read_rows(self.values, start, stop).reshape(*scale.shape, -1)
        codes = np.stack([pairs & 0x0F, pairs >> 4], axis=-1).reshape(*scale.shape, NVFP4_GROUP)
        half = NVFP4_GROUP // 2
        packed = codes[..., :half] | (codes[..., half:] << 4)
        return np.concatenate([scale[..., None], packed], axis=-1).reshape(stop - start, -1)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """The values multiplied by their scales and the tensor's scale."""
        records = self.records(start, stop).reshape(stop - start, -1, _NVFP4_RECORD)
        scale = records[..., :1].view(_BYTE_DTYPES["F8_E4M3"]).astype(np.float32)
        packed = records[..., 1:]
        values = _E2M1[np.concatenate([packed & 0x0F, packed >> 4], axis=-1)] * scale
        weight: NDArray[np.float32] = values * np.float32(self.tensor_scale())
        return weight.reshape(stop - start, -1)


def nvfp4_group_order(column_order: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """The permutation of groups for a permutation of columns; ValueError if it splits a group."""
    if column_order is None:
        return None
    groups = column_order.reshape(-1, NVFP4_GROUP)
    whole = (groups == groups[:, :1] + np.arange(NVFP4_GROUP)).all()
    if not whole or (groups[:, 0] % NVFP4_GROUP).any():
        raise ValueError("columns that share a scale are not neighbours")
    return groups[:, 0] // NVFP4_GROUP


def nvfp4_blocks(
    records: NDArray[np.uint8], column_order: NDArray[np.int64] | None
) -> NDArray[np.uint8]:
    """Converts rows of records to ggml's blocks: four scales, then the values of four groups."""
    groups = records.reshape(len(records), -1, _NVFP4_RECORD)
    order = nvfp4_group_order(column_order)
    if order is not None:
        groups = groups[:, order]
    blocks = groups.reshape(len(records), -1, _SUPER_BLOCK, _NVFP4_RECORD)
    scales = blocks[..., 0]
    values = blocks[..., 1:].reshape(*scales.shape[:-1], -1)
    return np.concatenate([scales, values], axis=-1).reshape(len(records), -1)


def row_count(weight: Weight) -> int:
    """Number of rows of a weight as a matrix."""
    return prod(weight.shape[:-1])


def _fault(weight: Weight, expected: str, found: object) -> CheckpointError:
    return CheckpointError(f"{weight.where}: {weight.name}: expected {expected}, found {found}")


def _check_part(
    tensor: PlacedTensor, shape: Sequence[int], dtypes: Sequence[str], how: str
) -> None:
    stored = tensor.stored
    if stored.shape != tuple(shape) or stored.dtype not in dtypes:
        raise CheckpointError(
            f"{tensor.source.name}: {stored.name}: expected shape {list(shape)} of "
            f"{' or '.join(dtypes)} {how}, found {list(stored.shape)} {stored.dtype}"
        )


def _read_rows(tensor: PlacedTensor, start: int, stop: int) -> Rows:
    dtype = _DTYPES[tensor.stored.dtype]
    columns = tensor.stored.shape[-1] if tensor.stored.shape else 1
    rows = np.empty((stop - start, columns), dtype)
    offset = tensor.stored.offset + start * columns * dtype.itemsize
    tensor.source.read_into(offset, rows.view(np.uint8).reshape(-1).data)
    return rows


def _read_columns(tensor: PlacedTensor, start: int, stop: int) -> Rows:
    """Columns `start` to `stop` of a matrix, read row by row, because rows may be far longer."""
    dtype = _DTYPES[tensor.stored.dtype]
    height, width = tensor.stored.shape
    columns = np.empty((height, stop - start), dtype)
    for index, row in enumerate(columns.view(np.uint8).reshape(height, -1)):
        offset = tensor.stored.offset + (index * width + start) * dtype.itemsize
        tensor.source.read_into(offset, row.data)
    return columns


def read_integers(tensor: PlacedTensor) -> tuple[int, ...]:
    """The values of a small I64 tensor; CheckpointError for one of another type."""
    if tensor.stored.dtype != "I64":
        raise CheckpointError(
            f"{tensor.source.name}: {tensor.stored.name}: expected I64, found {tensor.stored.dtype}"
        )
    return tuple(_read_all(tensor).reshape(-1).tolist())


def _read_all(tensor: PlacedTensor) -> Rows:
    """All of a small tensor, in its own shape."""
    return _read_rows(tensor, 0, prod(tensor.stored.shape[:-1])).reshape(tensor.stored.shape)


def _unpacked(words: Rows, bits: int) -> NDArray[np.uint8]:
    """Unpack values of `bits` bits from 32-bit words along the last dimension, low bits first."""
    shifts = np.arange(0, 32 - (bits - 1), bits, dtype=np.uint32)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    values: NDArray[np.uint32] = (unsigned[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return values.astype(np.uint8).reshape(len(words), -1)


def _as_f32(rows: Rows) -> NDArray[np.float32]:
    """The values as F32; always a copy."""
    if rows.dtype.itemsize == 1:
        return _byte_values(rows.dtype)[rows.view(np.uint8)]
    return rows.astype(np.float32)


@cache
def _byte_values(dtype: np.dtype[Any]) -> NDArray[np.float32]:
    """The 256 values of an 8-bit type; lookup is several times faster than conversion."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
