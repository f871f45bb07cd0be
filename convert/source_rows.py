"""Rows of a recipe's sources, as numbers: reads slices, dequantizes block-wise FP8, reorders."""

from functools import cache, lru_cache
from math import prod
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.sources import check_unchanged

from .checkpoint import Checkpoint, PlacedTensor
from .config import is_whole
from .recipe import Arithmetic, Order, Recipe, Target

Rows: TypeAlias = NDArray[Any]
"""Two dimensions, C order, of F32, F16 or BF16 (ml_dtypes.bfloat16)."""

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
SCALE_SUFFIX = "_scale_inv"
_SCALES_KEPT = 64  # slices of a tensor follow one another, so few need keeping


def check_quantization(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Rows and columns of a scale block when the checkpoint is FP8; None when it is not quantized.

    CheckpointError for every other scheme.
    """
    where = f"{checkpoint.folder / 'config.json'}: quantization_config"
    quantization = checkpoint.text_config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        raise CheckpointError(
            f"{where}: quant_method: expected fp8 or none, found {method!r}; "
            "convert from the original 16-bit checkpoint"
        )
    block = quantization.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(is_whole(n) and n > 0 for n in block)
    ):
        raise CheckpointError(
            f"{where}: weight_block_size: expected [rows, columns], found {block!r}"
        )
    return block[0], block[1]


class SourceRows:
    """Reads the rows of targets from a checkpoint; safe to call from several threads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors
        self._block = check_quantization(checkpoint)
        self._scales = lru_cache(_SCALES_KEPT)(self._read_scales)

    def check(self, target: Target) -> None:
        """Raise CheckpointError when a source of the target is of a type that cannot be read."""
        for name in target.recipe.sources:
            stored = self._tensors[name].stored
            if stored.dtype not in DTYPES:
                raise CheckpointError(
                    f"{self._tensors[name].source.name}: {name}: dtype: expected one of "
                    f"{', '.join(DTYPES)}, found {stored.dtype}"
                )
            if stored.dtype == "F8_E4M3" or name + SCALE_SUFFIX in self._tensors:
                self._check_scales(name)

    def dtype(self, target: Target) -> np.dtype[Any]:
        """The type in which the target's rows come: F32, F16 or BF16."""
        kinds = {self._row_dtype(name) for name in target.recipe.sources}
        if len(kinds) > 1 or target.recipe.arithmetic is not Arithmetic.NONE:
            return np.dtype(np.float32)
        return kinds.pop()

    def read(self, target: Target, start: int, stop: int) -> Rows:
        """Rows `start` to `stop` of the target, of type `dtype(target)`."""
        recipe = target.recipe
        if recipe.row_order is None:
            rows = self._stacked(recipe, start, stop)
        else:
            rows = self._gathered(recipe, recipe.row_order[start:stop])
        if recipe.column_order is not None:
            rows = rows[:, recipe.column_order]
        rows = _arithmetic(rows, recipe.arithmetic)
        return np.ascontiguousarray(rows, dtype=self.dtype(target))

    def check_unchanged(self) -> None:
        """FormatError when one of the checkpoint's files was written to since it was opened."""
        check_unchanged(tensor.source for tensor in self._tensors.values())

    def _gathered(self, recipe: Recipe, order: Order) -> Rows:
        """Rows of the stack in the given order, read in runs of consecutive ones."""
        breaks = np.flatnonzero(np.diff(order) != 1) + 1
        runs = [
            self._stacked(recipe, int(run[0]), int(run[-1]) + 1) for run in np.split(order, breaks)
        ]
        return runs[0] if len(runs) == 1 else np.concatenate(runs)

    def _stacked(self, recipe: Recipe, start: int, stop: int) -> Rows:
        """Rows `start` to `stop` of all sources, one below the other."""
        parts = []
        above = 0
        for name in recipe.sources:
            height = row_count(self._tensors[name])
            low, high = max(start - above, 0), min(stop - above, height)
            if low < high:
                parts.append(self._tensor_rows(name, low, high))
            above += height
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _tensor_rows(self, name: str, start: int, stop: int) -> Rows:
        tensor = self._tensors[name]
        dtype = DTYPES[tensor.stored.dtype]
        columns = tensor.stored.shape[-1]
        rows = np.empty((stop - start, columns), dtype)
        offset = tensor.stored.offset + start * columns * dtype.itemsize
        tensor.source.read_into(offset, rows.view(np.uint8).reshape(-1).data)
        if name + SCALE_SUFFIX not in self._tensors:
            return rows
        return self._dequantized(name, rows, start)

    def _dequantized(self, name: str, rows: Rows, start: int) -> NDArray[np.float32]:
        """The FP8 rows from `start` of a tensor, times the scale of the block each value is in."""
        assert self._block is not None
        scales = self._scales(name)  # (matrices, row blocks, column blocks)
        height = self._tensors[name].stored.shape[-2]
        index = np.arange(start, start + len(rows))
        per_row = scales[index // height, index % height // self._block[0]]
        values = _to_f32(rows)
        for block in range(per_row.shape[1]):
            columns = slice(block * self._block[1], (block + 1) * self._block[1])
            values[:, columns] *= per_row[:, block, None]
        return values

    def _read_scales(self, name: str) -> NDArray[np.float32]:
        shape = self._tensors[name + SCALE_SUFFIX].stored.shape
        rows = self._tensor_rows(name + SCALE_SUFFIX, 0, prod(shape[:-1]))
        return _to_f32(rows).reshape(-1, *shape[-2:])

    def _row_dtype(self, name: str) -> np.dtype[Any]:
        if name + SCALE_SUFFIX in self._tensors:
            return np.dtype(np.float32)
        return DTYPES[self._tensors[name].stored.dtype]

    def _check_scales(self, name: str) -> None:
        scale = self._tensors.get(name + SCALE_SUFFIX)
        where = f"{self._tensors[name].source.name}: {name}"
        if scale is None or self._block is None:
            missing = "its tensor " + name + SCALE_SUFFIX if scale is None else "fp8 in the config"
            raise CheckpointError(f"{where}: FP8 weights need {missing}, found none")
        if len(self._tensors[name].stored.shape) < 2:
            raise CheckpointError(
                f"{where}: expected scales of matrices only, found {scale.stored.name}"
            )
        *outer, rows, columns = self._tensors[name].stored.shape
        expected = (*outer, -(-rows // self._block[0]), -(-columns // self._block[1]))
        if scale.stored.shape != expected or scale.stored.dtype not in ("F32", "BF16", "F16"):
            raise CheckpointError(
                f"{where}{SCALE_SUFFIX}: expected shape {list(expected)} of F32, F16 or BF16, "
                f"found {list(scale.stored.shape)} {scale.stored.dtype}"
            )


def row_count(tensor: PlacedTensor) -> int:
    """Number of rows of a tensor taken as a matrix."""
    return prod(tensor.stored.shape[:-1])


def _to_f32(rows: Rows) -> NDArray[np.float32]:
    if rows.dtype == DTYPES["F8_E4M3"]:
        return _fp8_values()[rows.view(np.uint8)]
    return rows.astype(np.float32)


@cache
def _fp8_values() -> NDArray[np.float32]:
    """The 256 values of F8_E4M3: looking them up is several times faster than converting."""
    return np.arange(256, dtype=np.uint8).view(DTYPES["F8_E4M3"]).astype(np.float32)


def _arithmetic(rows: Rows, kind: Arithmetic) -> Rows:
    """The arithmetic as llama.cpp's converter does it: F16 stays F16, all else becomes F32.

    The exponential is taken in double precision and rounded once, since F32 kernels differ in the
    last bit from one another (NumPy's and torch's do).
    """
    if kind is Arithmetic.NONE:
        return rows
    narrow = np.dtype(np.float16 if rows.dtype == np.float16 else np.float32)
    values = rows.astype(narrow)
    if kind is Arithmetic.ADD_ONE:
        return np.asarray(values + narrow.type(1))
    return np.asarray(-np.exp(values.astype(np.float64)).astype(narrow))
