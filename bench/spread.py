"""Several measurements of one thing, as a median and how far they lie apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """low and high: the quarter points, or the extremes where there are fewer than four."""

    median: float
    low: float
    high: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    ordered = sorted(values)
    n = len(ordered)
    edge = n // 4
    return Spread(median(ordered), ordered[edge], ordered[n - 1 - edge], n)
