"""All-pairs tables: few combinations that contain every pair of values of two settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]


def all_pairs(settings: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows that hold every pair of values at least once; the same rows every time.

    Greedy: each row starts from a pair that is missing, and each further value is the one that
    meets most pairs still missing, the least used one among equals.
    """
    names = list(settings)
    missing = {
        ((a, x), (b, y)): None
        for a, b in combinations(names, 2)
        for x in settings[a]
        for y in settings[b]
    }
    uses = {(name, value): 0 for name in names for value in settings[name]}
    rows: list[Row] = []
    while missing:
        row: Row = dict(next(iter(missing)))
        for name in names:
            if name in row:
                continue

            def gain(value: Any, name: str = name, row: Row = row) -> tuple[int, int]:
                met = sum(_pair(names, (name, value), other) in missing for other in row.items())
                return met, -uses[name, value]

            row[name] = max(settings[name], key=gain)
        for a, b in combinations(row.items(), 2):
            missing.pop(_pair(names, a, b), None)
        for item in row.items():
            uses[item] += 1
        rows.append({name: row[name] for name in names})
    return rows


def _pair(names: list[str], a: tuple[str, Any], b: tuple[str, Any]) -> Any:
    return (a, b) if names.index(a[0]) < names.index(b[0]) else (b, a)
