"""Repeated measurements: the order of those that are compared, their median and spread."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Stats:
    """Median and quartiles of n measurements; with fewer than four, the extremes."""

    median: float
    low: float
    high: float
    n: int

    @property
    def half_range(self) -> float:
        """Half the distance from low to high, as printed after ±."""
        return (self.high - self.low) / 2


def summarize(values: Sequence[float]) -> Stats:
    """The statistics of at least one value."""
    ordered = sorted(values)
    n = len(ordered)
    edge = n // 4
    return Stats(median(ordered), ordered[edge], ordered[n - 1 - edge], n)


def rotated(values: Sequence[T], by: int) -> list[T]:
    """The values in rotated order, so that none profits from its position in every round."""
    by %= max(1, len(values))
    return [*values[by:], *values[:by]]
