"""How a target tensor is made from source tensors, said without reading a byte.

Every tensor is taken as a matrix: rows of the last (fastest) dimension, all others multiplied.
That makes each transform of the converter a choice of rows, a choice of columns, or arithmetic on
single values, and lets a tensor of any size be made in slices of rows.
"""

from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.tensor_types import TensorType

Order: TypeAlias = NDArray[np.int64]


class Arithmetic(Enum):
    """What happens to each value."""

    NONE = "as it is"
    ADD_ONE = "1 + w"
    NEGATED_EXP = "-exp(w)"


@dataclass(frozen=True, eq=False)
class Recipe:
    """A target made from the rows of one or more sources.

    sources: names, their rows stacked in this order; all of one row length.
    row_order: row i of the target is row `row_order[i]` of the stack; None keeps all in place.
    column_order: likewise within each row.
    """

    sources: tuple[str, ...]
    row_order: Order | None = None
    column_order: Order | None = None
    arithmetic: Arithmetic = Arithmetic.NONE


@dataclass(frozen=True, eq=False)
class Target:
    """A tensor of the GGUF to be written, made from weights: `shape` in ggml order.

    fixed: the type of this tensor whatever the precision asked for; None where it can be chosen.
    """

    name: str
    shape: tuple[int, ...]
    recipe: Recipe
    fixed: TensorType | None = None

    @property
    def rows(self) -> int:
        """Number of rows, those of all experts together."""
        return prod(self.shape[1:])
