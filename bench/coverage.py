"""How much of a text a draft vocabulary can write."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

_HALVINGS = 7  # of the whole list, down to a 128th


def coverage(ids: Sequence[int], written: Counter[int]) -> dict[int, float]:
    """Share of the written tokens among the first rows of a ranked list, by number of rows."""
    total = written.total()
    shares: dict[int, float] = {}
    covered, at = 0, 0
    for size in sorted({max(1, len(ids) >> shift) for shift in range(_HALVINGS + 1)}):
        covered += sum(written[token] for token in ids[at:size])
        at = size
        shares[size] = covered / total if total else 0.0
    return shares
