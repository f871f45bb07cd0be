"""Describes how target tensors are made from source tensors.

Every tensor is treated as a matrix: rows of the last (fastest) dimension, with all other dimensions
flattened. Each transform of the converter is then a permutation of rows, a permutation of columns,
or arithmetic on single values, and a tensor of any size can be processed in slices of rows.
"""

from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.tensor_types import TensorType

Order: TypeAlias = NDArray[np.int64]


class Arithmetic(Enum):
    """The arithmetic applied to each value."""

    NONE = "as it is"
    ADD_ONE = "1 + w"
    NEGATED_EXP = "-exp(w)"


@dataclass(frozen=True, eq=False)
class Recipe:
    """How to make a target from the rows of one or more sources.

    sources: names; their rows are stacked in this order and have the same length.
    joined: the sources have equally many rows, which are joined instead of stacked.
    row_order: row i of the target is row `row_order[i]` of the stack; None keeps the order.
    column_order: likewise for the columns.
    width: the values of the only source, a vector, are rows of so many; None for one row.
    transposed: each matrix of the target is the transpose of as many rows, after reordering, as it
    has columns.
    """

    sources: tuple[str, ...]
    row_order: Order | None = None
    column_order: Order | None = None
    arithmetic: Arithmetic = Arithmetic.NONE
    joined: bool = False
    width: int | None = None
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class Target:
    """A tensor of the GGUF that is made from weights; `shape` is in ggml order.

    fixed: the type of this tensor in every precision; None if it can be chosen.
    """

    name: str
    shape: tuple[int, ...]
    recipe: Recipe
    fixed: TensorType | None = None

    @property
    def rows(self) -> int:
        """Number of rows, summed over all experts."""
        return prod(self.shape[1:])
