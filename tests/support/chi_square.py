"""Pearson's chi-square test for samples of tokens; cells with few expected counts are pooled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEAST_EXPECTED = 5.0  # below it a cell's count is not near enough to normal (Cochran's rule)


def one_sample(counts: Mapping[Any, int], expected: Mapping[Any, float]) -> tuple[float, int]:
    """The statistic of counts against probabilities, and its degrees of freedom.

    expected may leave out improbable cells: these are pooled, and count with what is left to 1.
    """
    total = sum(counts.values())
    cells = {cell: p for cell, p in expected.items() if p * total >= LEAST_EXPECTED}
    pairs = [(counts.get(cell, 0), p * total) for cell, p in cells.items()]
    rest = (total - sum(n for n, _ in pairs), total - sum(e for _, e in pairs))
    if rest[1] >= LEAST_EXPECTED:
        pairs.append(rest)
    elif pairs:  # too little to stand alone: into the last cell
        last = pairs.pop()
        pairs.append((last[0] + rest[0], last[1] + rest[1]))
    return sum((n - e) ** 2 / e for n, e in pairs), len(pairs) - 1


def two_samples(a: Mapping[Any, int], b: Mapping[Any, int]) -> tuple[float, int]:
    """The statistic of two samples of equal size, and its degrees of freedom."""
    least = 4 * LEAST_EXPECTED  # of both together
    common = [cell for cell in {**a, **b} if a.get(cell, 0) + b.get(cell, 0) >= least]
    pairs = [(a.get(cell, 0), b.get(cell, 0)) for cell in common]
    rest = (sum(a.values()) - sum(x for x, _ in pairs), sum(b.values()) - sum(y for _, y in pairs))
    if sum(rest):
        pairs.append(rest)
    return sum((x - y) ** 2 / (x + y) for x, y in pairs), len(pairs) - 1


def far_off(statistic: float, freedom: int) -> bool:
    """Beyond five standard deviations of the chi-square distribution."""
    return statistic > freedom + 5 * (2 * freedom) ** 0.5
