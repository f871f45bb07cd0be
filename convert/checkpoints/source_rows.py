"""Reads the rows of targets: reads slices of the sources, dequantizes and reorders them."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.tensor_types import NVFP4
from mtp_gguf.gguf_tools.hub.sources import check_unchanged

from ..plans.recipe import Arithmetic, Order, Recipe, Target
from .checkpoint import Checkpoint, PlacedTensor
from .quantized import weights_of
from .weights import (
    Extent,
    FoldedWeight,
    Nvfp4Weight,
    Rows,
    Weight,
    nvfp4_blocks,
    nvfp4_group_order,
    row_count,
)


class SourceRows:
    """Reads the rows of targets from a checkpoint; safe to call from several threads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._weights = weights_of(checkpoint.tensors).by_name
        self._sources = checkpoint.sources
        # Where each source of a recipe begins in the stack; a layer may have hundreds of experts.
        self._bounds: dict[Recipe, list[int]] = {}
        self._dtypes: dict[Recipe, np.dtype[Any]] = {}

    def only(self, wanted: "Iterable[tuple[Target, range | Order]]") -> "SourceRows":
        """A copy that reads just these rows of targets, and can be pickled without the others."""
        weights: dict[str, Weight] = {}
        bounds: dict[Recipe, list[int]] = {}
        dtypes: dict[Recipe, np.dtype[Any]] = {}
        for target, rows in wanted:
            for weight, _, _ in self._read_for(target, rows):
                weights[weight.name] = self._weights[weight.name]
            bounds[target.recipe] = self._bounds[target.recipe]
            dtypes[target.recipe] = self.dtype(target)
        parts = (part for weight in weights.values() for part in vars(weight).values())
        sources = {part.source for part in parts if isinstance(part, PlacedTensor)}
        part = SourceRows.__new__(SourceRows)
        part._weights, part._bounds, part._dtypes = weights, bounds, dtypes
        part._sources = tuple(sources)
        return part

    def close(self) -> None:
        """Close the files of the checkpoint."""
        for source in self._sources:
            source.close()

    def check(self, target: Target) -> None:
        """Raise CheckpointError if a source of the target cannot be read."""
        for name in target.recipe.sources:
            self._weights[name].check()

    def dtype(self, target: Target) -> np.dtype[Any]:
        """The type of the target's rows: F32, F16 or BF16."""
        known = self._dtypes.get(target.recipe)
        if known is None:
            kinds = {self._weights[name].dtype for name in target.recipe.sources}
            mixed = len(kinds) > 1 or target.recipe.arithmetic is not Arithmetic.NONE
            known = np.dtype(np.float32) if mixed else kinds.pop()
            self._dtypes[target.recipe] = known
        return known

    def nvfp4_sources(self, target: Target) -> list[Nvfp4Weight]:
        """The sources of a target if their NVFP4 blocks can be kept; else empty."""
        weights = [self._weights[name] for name in target.recipe.sources]
        sources = [weight for weight in weights if isinstance(weight, Nvfp4Weight)]
        recipe = target.recipe
        plain = recipe.arithmetic is Arithmetic.NONE and not recipe.joined and not recipe.transposed
        whole = plain and len(sources) == len(weights)
        if not whole or target.shape[0] % NVFP4.block_length:
            return []
        try:
            nvfp4_group_order(recipe.column_order)
        except ValueError:
            return []
        return sources

    def read(self, target: Target, start: int, stop: int) -> Rows:
        """Rows `start` to `stop` of the target, of type `dtype(target)`.

        For a target that keeps its NVFP4 blocks, the bytes of the blocks. Values that overflow
        are infinite, which whoever encodes them reports.
        """
        if target.recipe.transposed:
            return self._finished(target, lambda read: self._transposed(target, start, stop, read))
        if target.recipe.row_order is not None:
            return self.read_rows(target, np.arange(start, stop))
        return self._finished(target, lambda read: self._stacked(target.recipe, start, stop, read))

    def read_rows(self, target: Target, rows: Order) -> Rows:
        """As `read`, for these rows of the target in this order."""
        order = target.recipe.row_order
        stacked = rows if order is None else order[rows]
        return self._finished(target, lambda read: self._gathered(target.recipe, stacked, read))

    def in_source_order(self, target: Target, start: int, stop: int) -> Order | None:
        """Rows `start` to `stop` of the target in the order of their sources; None if they are."""
        order = target.recipe.row_order
        if order is None or target.recipe.transposed:
            return None
        sorted_rows: Order = start + np.argsort(order[start:stop], kind="stable")
        return sorted_rows

    def extents(self, target: Target, rows: "range | Order") -> list[Extent]:
        """The bytes of the sources in which these rows of the target are."""
        return [weight.extent(first, last) for weight, first, last in self._read_for(target, rows)]

    def _read_for(self, target: Target, rows: "range | Order") -> list[tuple[Weight, int, int]]:
        """The weights in which these rows of the target are, each with its first and last row."""
        order = target.recipe.row_order
        if target.recipe.transposed:
            assert isinstance(rows, range)
            width, height = target.shape[:2]
            rows = range(rows.start // height * width, -(-rows.stop // height) * width)
        if isinstance(rows, range) and order is None:
            low, high = rows.start, rows.stop
        else:
            stacked = np.asarray(rows) if order is None else order[np.asarray(rows)]
            low, high = int(stacked.min()), int(stacked.max()) + 1
        return self._parts(target.recipe, low, high)

    def check_unchanged(self) -> None:
        """FormatError if one of the checkpoint's files was written to since it was opened."""
        check_unchanged(self._sources)

    def _finished(self, target: Target, rows_by: "Callable[[_Read], Rows]") -> Rows:
        """The target's rows from those of its sources, which `rows_by` reads."""
        recipe = target.recipe
        if target.fixed is NVFP4:
            return nvfp4_blocks(rows_by(_records), recipe.column_order)
        with np.errstate(over="ignore", invalid="ignore"):
            rows = rows_by(_numbers)
            if recipe.column_order is not None:
                rows = rows[:, recipe.column_order]
            rows = _arithmetic(rows, recipe.arithmetic)
            return np.ascontiguousarray(rows, dtype=self.dtype(target))

    def _transposed(self, target: Target, start: int, stop: int, read: "_Read") -> Rows:
        """Rows of a target of transposed matrices, of each of which all rows are read."""
        width, height = target.shape[:2]
        order = target.recipe.row_order
        parts = []
        for matrix in range(start // height, -(-stop // height)):
            rows = np.arange(matrix * width, (matrix + 1) * width)
            block = self._gathered(target.recipe, rows if order is None else order[rows], read)
            first = matrix * height
            parts.append(block[:, max(start - first, 0) : min(stop - first, height)].T)
        return np.concatenate(parts)

    def _gathered(self, recipe: Recipe, order: Order, read: "_Read") -> Rows:
        """Rows of the stack in the given order; consecutive rows are read together."""
        breaks = np.flatnonzero(np.diff(order) != 1) + 1
        runs = [
            self._stacked(recipe, int(run[0]), int(run[-1]) + 1, read)
            for run in np.split(order, breaks)
        ]
        return runs[0] if len(runs) == 1 else np.concatenate(runs)

    def _stacked(self, recipe: Recipe, start: int, stop: int, read: "_Read") -> Rows:
        """Rows `start` to `stop` of the stacked or joined sources."""
        parts = [read(*part) for part in self._parts(recipe, start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=int(recipe.joined))

    def _weight(self, recipe: Recipe, name: str) -> Weight:
        """A source of a recipe, in the form that the recipe reads."""
        weight = self._weights[name]
        if recipe.width is None:
            return weight
        return FoldedWeight(weight.name, weight.values, weight, recipe.width)

    def _parts(self, recipe: Recipe, start: int, stop: int) -> list[tuple[Weight, int, int]]:
        """The sources that rows `start` to `stop` of the stack come from, with their own rows."""
        bounds = self._bounds.get(recipe)
        if bounds is None:
            heights = (row_count(self._weight(recipe, name)) for name in recipe.sources)
            bounds = self._bounds[recipe] = [0, *accumulate(heights)]
        if recipe.joined:
            return [(self._weight(recipe, name), start, stop) for name in recipe.sources]
        parts = []
        for index in range(bisect_right(bounds, start) - 1, len(recipe.sources)):
            above = bounds[index]
            if above >= stop:
                break
            weight = self._weight(recipe, recipe.sources[index])
            low, high = max(start - above, 0), min(stop, bounds[index + 1]) - above
            if low < high:
                parts.append((weight, low, high))
        return parts


_Read = Callable[[Weight, int, int], Rows]


def _numbers(weight: Weight, start: int, stop: int) -> Rows:
    return weight.rows(start, stop)


def _records(weight: Weight, start: int, stop: int) -> NDArray[np.uint8]:
    assert isinstance(weight, Nvfp4Weight)
    return weight.records(start, stop)


def _arithmetic(rows: Rows, kind: Arithmetic) -> Rows:
    """Apply the arithmetic as llama.cpp's converter does: F16 stays F16, all else becomes F32.

    The exponential is computed in double precision and rounded once, because F32 kernels (NumPy's
    and torch's) differ from one another in the last bit.
    """
    if kind is Arithmetic.NONE:
        return rows
    narrow = np.dtype(np.float16 if rows.dtype == np.float16 else np.float32)
    values = rows.astype(narrow)
    if kind is Arithmetic.ADD_ONE:
        return np.asarray(values + narrow.type(1))
    return np.asarray(-np.exp(values.astype(np.float64)).astype(narrow))
