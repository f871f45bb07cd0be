"""The measured acceptance rate of a file's head, in the keys `mtp.acceptance.*`.

Before a file is written its keys are reserved with counts of 0, because they are measured with the
finished file; `store` then replaces the values in place. Fingerprints of trunk and head say which
tensors were measured, so that counts which another program carried over to another file are
recognized. docs/acceptance.md describes keys and method.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from math import sqrt
from pathlib import Path
from typing import Any

from ..errors import FormatError, OutputError, RequestError, raising
from ..files.format import ArrayRef, Value, ValueType, encoded_keys
from ..hub.remote import is_remote
from ..model import ACCEPTANCE_PREFIX, Model, open_model
from .draft_list import DRAFT_KEYS

POSITIONS = 4  # of a chain of drafts
CORPUS, CORPUS_VERSION = "mtp-gguf", 1
LEAST = 0.3  # acceptance of first drafts below which a head is reported as bad

_FORMAT = 1  # of the keys and the method
_DEVIATIONS = 1.96  # of a normal distribution, for an interval of 95 %
_SAMPLE = 64  # bytes of each tensor in a fingerprint
_DIGEST = 8  # bytes of a fingerprint

_VERSION_KEY = f"{ACCEPTANCE_PREFIX}version"
_CORPUS_KEY = f"{ACCEPTANCE_PREFIX}corpus"
_CORPUS_VERSION_KEY = f"{ACCEPTANCE_PREFIX}corpus_version"
_TRUNK_KEY = f"{ACCEPTANCE_PREFIX}trunk"
_HEAD_KEY = f"{ACCEPTANCE_PREFIX}head"


@dataclass(frozen=True)
class Counts:
    """Drafts by position in the chain, and how many of them were accepted.

    A draft after a rejected one is rejected, so the rates fall from position to position.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """The acceptance rate of each position."""
        return tuple(a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True))

    def interval(self, position: int) -> tuple[float, float]:
        """Wilson's interval of 95 % for the rate of a position, counted from 0."""
        n, rate, z = self.drafted[position], self.rates[position], _DEVIATIONS
        if not n:
            return 0.0, 1.0
        middle = (rate + z * z / (2 * n)) / (1 + z * z / n)
        half = z * sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(middle - half, 0.0), min(middle + half, 1.0)

    @property
    def text(self) -> str:
        """The rates by position, as 61% / 38% / 20% / 11%."""
        return " / ".join(f"{rate:.0%}" for rate in self.rates)


@dataclass(frozen=True)
class Acceptance:
    """What was counted over the corpus: greedy, and sampled at temperature 1."""

    greedy: Counts
    sampled: Counts

    @property
    def share(self) -> float:
        """The acceptance rate of first drafts, greedy."""
        return self.greedy.rates[0]

    @property
    def text(self) -> str:
        """One line: rates by position, and how precise they are."""
        low, high = self.greedy.interval(0)
        sampled = f", at temperature 1 {self.sampled.text}" if sum(self.sampled.drafted) else ""
        return (
            f"greedy {self.greedy.text} of drafts 1 / 2 / 3 / 4{sampled} "
            f"({self.greedy.drafted[0]} chains; first drafts {low:.0%} to {high:.0%} at 95 %)"
        )

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Acceptance":
        """The acceptance that `fields` returned."""
        greedy, sampled = (
            Counts(tuple(counts["drafted"]), tuple(counts["accepted"]))
            for counts in (fields["greedy"], fields["sampled"])
        )
        return cls(greedy, sampled)

    def fields(self) -> dict[str, Any]:
        """Return the fields for --json."""
        low, high = self.greedy.interval(0)
        return {
            name: {"drafted": list(c.drafted), "accepted": list(c.accepted)}
            for name, c in (("greedy", self.greedy), ("sampled", self.sampled))
        } | {"share": self.share, "interval": [low, high]}


@dataclass(frozen=True)
class Stored:
    """What a file states about itself.

    acceptance: None if it states nothing that can be believed. fault: why what it states is not
    shown as its own; "" if there is no reason. checked: whether the fingerprints were compared,
    which needs bytes of every tensor, and for a head alone its trunk. alone: whether it is one.
    """

    acceptance: Acceptance | None
    fault: str = ""
    checked: bool = True
    alone: bool = False

    @property
    def text(self) -> str | None:
        """One line for a report; None if the file states nothing."""
        if self.fault:
            pair = "of this head with this trunk" if self.alone else "that of this file"
            return f"not {pair}: {self.fault}; mtp-gguf doctor --load measures it"
        if self.acceptance is None:
            return None
        origin = f"measured on the corpus {CORPUS} {CORPUS_VERSION}"
        if self.checked:
            return f"{self.acceptance.text}, {origin}"
        what = "a trunk, mtp-gguf doctor TRUNK --head FILE" if self.alone else "its tensors"
        return f"{self.acceptance.text}, {origin}, as the file states; not compared with {what}"

    def fields(self) -> dict[str, Any] | None:
        """Return the fields for --json; None if the file states nothing."""
        if self.text is None:
            return None
        counts = self.acceptance.fields() if self.acceptance else {}
        return {**counts, "fault": self.fault or None, "checked": self.checked}


def reserved() -> dict[str, Value]:
    """The keys of a file that is still to be measured."""
    none = Counts((0,) * POSITIONS, (0,) * POSITIONS)
    return _keys(Acceptance(none, none), "0" * 2 * _DIGEST, "0" * 2 * _DIGEST)


def store(path: Path, acceptance: Acceptance, trunk: Path | None = None) -> None:
    """Replace the values of the reserved keys of a written model, or of a head alone.

    path: any shard of it; the keys are in the first one. trunk: that a head alone was measured
    with. RequestError if the keys are not reserved.
    """
    with ExitStack() as stack:
        model = stack.enter_context(open_model(path))
        first, target = model.first, model.paths[0]
        whole = stack.enter_context(open_model(trunk)) if trunk else None
        new = _keys(acceptance, *fingerprints(model, whole))
        at = 24  # magic, version and the two counts
        for key in first.keys:
            if key == _VERSION_KEY:
                break
            at += len(encoded_keys({key: first.raw(key)}))
        own = [key for key in first.keys if key.startswith(ACCEPTANCE_PREFIX)]
        before = encoded_keys({key: first.raw(key) for key in own})
    after = encoded_keys(new)
    if own != [*new] or len(before) != len(after):
        raise RequestError(f"{target}: expected reserved keys {ACCEPTANCE_PREFIX}*, found none")
    with raising(OutputError, f"{target}: cannot be written"), target.open("r+b") as file:
        file.seek(at)
        if file.read(len(before)) != before:
            raise RequestError(f"{target}: was changed meanwhile; acceptance is not stored")
        file.seek(at)
        file.write(after)
        file.flush()
        os.fsync(file.fileno())


def read_stored(model: Model, trunk: Model | None = None) -> Stored:
    """Return what a model, or a head alone, states about its acceptance.

    The fingerprints of local files are compared, which reads a few bytes of each tensor. trunk:
    that a head alone is to run with; without it that fingerprint is not compared.
    """
    alone = False
    try:
        stated = _stated(model)
        files = [model, trunk] if trunk else [model]
        if stated is None or any(is_remote(str(file.path)) for file in files):
            return Stored(stated, checked=False)
        alone = model.head.is_alone
        other = None
        trunk_print, head_print = fingerprints(model, trunk)
        if model.first.scalar(_HEAD_KEY) != head_print:
            other = "head or draft vocabulary"
        if model.first.scalar(_TRUNK_KEY) != trunk_print and (trunk or not alone):
            other = "trunk"
        if other:
            return Stored(None, f"the stated one was measured with another {other}", alone=alone)
    except (FormatError, RequestError) as error:
        return Stored(None, str(error), alone=alone)
    return Stored(stated, checked=trunk is not None or not alone, alone=alone)


def fingerprints(model: Model, trunk: Model | None = None) -> tuple[str, str]:
    """Return the fingerprints of trunk and head: of names, types, shapes and some bytes of each.

    That of the head includes its draft vocabulary, and of a head alone everything in the file.
    trunk: of a head alone. Sharding and the order of tensors have no part.
    """
    head = set(model.tensors if model.head.is_alone else model.head.names)
    draft = [
        encoded_keys({key: model.first.raw(key)}) for key in DRAFT_KEYS if key in model.first.keys
    ]
    whole = trunk or model
    return _digest(whole, whole.tensors.keys() - set(whole.head.names)), _digest(model, head, draft)


def _digest(model: Model, names: Iterable[str], more: Iterable[bytes] = ()) -> str:
    found = blake2b(digest_size=_DIGEST)
    for name in sorted(names):
        tensor = model.tensors[name]
        found.update(f"{name} {tensor.type.name} {tensor.shape}\n".encode())
        length = min(_SAMPLE, tensor.nbytes)
        found.update(model.read(name, (tensor.nbytes - length) // 2, length))
    for data in more:
        found.update(data)
    return found.hexdigest()


def _keys(acceptance: Acceptance, trunk: str, head: str) -> dict[str, Value]:
    counts = {
        f"{ACCEPTANCE_PREFIX}{way}.{name}": Value(ValueType.U32, values)
        for way, found in (("greedy", acceptance.greedy), ("sampled", acceptance.sampled))
        for name, values in (("drafted", found.drafted), ("accepted", found.accepted))
    }
    return {
        _VERSION_KEY: Value(ValueType.U32, _FORMAT),
        _CORPUS_KEY: Value(ValueType.STRING, CORPUS),
        _CORPUS_VERSION_KEY: Value(ValueType.U32, CORPUS_VERSION),
        **counts,
        _TRUNK_KEY: Value(ValueType.STRING, trunk),
        _HEAD_KEY: Value(ValueType.STRING, head),
    }


def _stated(model: Model) -> Acceptance | None:
    """The counts of the keys; None without them, or if they are reserved or of another version."""
    first = model.first
    if not model.head.is_known or not model.head.names:
        return None
    if first.integer(_VERSION_KEY) != _FORMAT:
        return None
    if (first.scalar(_CORPUS_KEY), first.integer(_CORPUS_VERSION_KEY)) != (CORPUS, CORPUS_VERSION):
        return None
    found = Acceptance(_counts(model, "greedy"), _counts(model, "sampled"))
    return found if found.greedy.drafted[0] else None


def _counts(model: Model, way: str) -> Counts:
    columns = []
    for name in ("drafted", "accepted"):
        key = f"{ACCEPTANCE_PREFIX}{way}.{name}"
        stored = model.first.keys.get(key)
        if (
            not isinstance(stored, ArrayRef)
            or stored.type is not ValueType.U32
            or stored.count != POSITIONS
        ):
            raise FormatError(f"{key}: expected {POSITIONS} counts as U32, found something else")
        columns.append(tuple(int(count) for count in model.first.array(key) or ()))
    drafted, accepted = columns
    if any(a > d for a, d in zip(accepted, drafted, strict=True)):
        raise FormatError(
            f"{ACCEPTANCE_PREFIX}{way}: expected at most {list(drafted)} accepted drafts, found "
            f"{list(accepted)}"
        )
    return Counts(drafted, accepted)
