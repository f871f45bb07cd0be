"""All mutations of one value of a JSON file, for the sweep of test_hostile_json.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]

# Null, wrong types, empty values, and numbers that no size of a model can be.
VALUES: tuple[Any, ...] = (
    *(None, True, "text", "", [], {}, [1], ["a"], {"a": 1}),
    *(0, -1, 7, 1 << 31, 10**30, 10**400, 0.5, -0.5, 1e300),
)
LONG = 12  # a longer list or object of values of one kind is spoiled at both ends only


class Removed:
    """Stands for a key that is not there."""

    def __repr__(self) -> str:
        return "removed"


REMOVED = Removed()


@dataclass(frozen=True)
class Mutation:
    """One value replaced: where, and by what."""

    path: Path
    value: Any

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))}={self.value!r:.24}"

    def of(self, whole: dict[str, Any]) -> dict[str, Any]:
        """A copy of the file's object with this change."""
        spoiled = copy.deepcopy(whole)
        *outer, last = self.path
        node: Any = spoiled
        for key in outer:
            node = node[key]
        if self.value is REMOVED:
            del node[last]
        else:
            node[last] = self.value
        return spoiled


def paths(node: Any, prefix: Path = ()) -> Iterator[Path]:
    """The place of every value, outer ones first."""
    keys: list[str | int] = []
    if isinstance(node, dict):
        keys = [*node]
    elif isinstance(node, list):
        keys = [*range(len(node))]
    if len(keys) > LONG and len({type(node[key]) for key in keys}) == 1:
        keys = [*keys[:2], keys[-1]]
    for key in keys:
        yield (*prefix, key)
        yield from paths(node[key], (*prefix, key))


def mutations(whole: dict[str, Any]) -> Iterator[Mutation]:
    """Each value of a file replaced by each of VALUES, and removed."""
    for path in paths(whole):
        for value in (REMOVED, *VALUES):
            yield Mutation(path, value)
