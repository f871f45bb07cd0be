"""The share of generated tokens that a draft vocabulary contains."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

_HALVINGS = 7  # sizes from the whole list down to a 128th of it


def coverage(ids: Sequence[int], generated: Counter[int]) -> dict[int, float]:
    """Share of the generated tokens among the first rows of a ranked list, by number of rows."""
    total = generated.total()
    shares: dict[int, float] = {}
    covered, start = 0, 0
    for size in sorted({max(1, len(ids) >> shift) for shift in range(_HALVINGS + 1)}):
        covered += sum(generated[token] for token in ids[start:size])
        start = size
        shares[size] = covered / total if total else 0.0
    return shares
