"""A random walk over a session's drafts from the text, compared with a naive reference.

The reference is a list of tokens, in which all earlier occurrences of its end are found by
comparison, and the set of all places at which a copy may have been left
(native/src/lookup/text_drafts.h).
Which of them the index drafts from is not compared: any of them may be right.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field

import numpy as np
import pytest

from mtp_gguf.gguf_tools.profile import FROM_TEXT
from mtp_gguf.native.checkpoint import Checkpoint, CheckpointKind
from mtp_gguf.native.errors import ContextFullError, NativeError
from mtp_gguf.native.session import Session

SEQUENCES = 3
PASSAGE, MOST_WRONG = 8, 8  # kPassage and kMostWrong of native/src/lookup/text_drafts.cpp
MOST = 64  # kMostContext of native/src/lookup/suffix_index.h
KINDS = (CheckpointKind.HOST, CheckpointKind.HEAD, CheckpointKind.WHOLE)


@dataclass(frozen=True)
class Place:
    """Where a copy may go on: position, and tokens that were right and wrong there."""

    next: int
    right: int = 0
    wrong: int = 1


@dataclass
class Text:
    """What a sequence holds. known: the first position whose token is known."""

    tokens: list[int] = field(default_factory=list)
    known: int = 0
    places: frozenset[Place | None] = frozenset([None])

    def copy(self) -> Text:
        return Text(list(self.tokens), self.known, self.places)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        self.known = min(self.known, length)
        kept = len(self.tokens) - self.known
        self.places = frozenset(p if p and p.next < kept else None for p in self.places)

    def matches(self) -> tuple[int, list[int]]:
        """The longest suffix that ends earlier: its length, and all positions that follow it."""
        text = np.array(self.tokens[self.known :])
        ends = np.arange(len(text) - 1)
        length = 0
        while len(ends) and length < MOST:
            same = ends[(ends >= length) & (text[ends - length] == text[-1 - length])]
            if not len(same):
                break
            ends, length = same, length + 1
        return length, [int(end) + 1 for end in ends] if length else []

    def generated(self, token: int) -> None:
        text = self.tokens[self.known :]
        length, following = self.matches()
        places = set()
        for place in self.places:
            if length >= PASSAGE and length > (place.right if place else 0):
                places |= {None if text[n] == token else left(n, len(text)) for n in following}
            elif place is None:
                places.add(None)
            elif text[place.next] == token:
                places.add(Place(place.next + 1, place.right + 1, place.wrong))
            elif place.right:
                places.add(left(place.next, len(text)))
            else:
                again = Place(place.next, 0, place.wrong + 1)
                places.add(again if again.wrong <= MOST_WRONG else None)
        self.places = frozenset(places)
        self.tokens.append(token)

    def continuations(self, n: int) -> list[list[int]]:
        """The next n tokens after each earlier occurrence of the end, and after each place."""
        text = self.tokens[self.known :]
        found = []
        for start in [*self.matches()[1], *(p.next for p in self.places if p)]:
            longer = list(text)
            for i in range(n):
                longer.append(longer[start + i])
            found.append(longer[len(text) :])
        return found


def left(position: int, size: int) -> Place | None:
    """The place behind a token that another one has replaced."""
    return Place(position + 1) if position + 1 < size else None


@dataclass
class Saved:
    """A checkpoint, and the text of then."""

    checkpoint: Checkpoint
    text: Text


class Walk:
    """A session and what it must hold. counts: how often what happened."""

    def __init__(self, session: Session, n_ctx: int, seed: int, max_depth: int) -> None:
        self.session = session
        self.n_ctx = n_ctx
        self.max_depth = max_depth
        self.rng = np.random.default_rng(seed)
        self.texts = [Text() for _ in range(SEQUENCES)]
        self.saved: list[Saved] = []
        self.counts: Counter[str] = Counter()
        self.letters = 3

    def run(self, steps: int) -> None:
        actions: list[tuple[Callable[[int], None], float]] = [
            (self.read, 0.12),
            (self.cycle, 0.6),
            (self.remove, 0.06),
            (self.copy, 0.03),
            (self.save, 0.09),
            (self.restore, 0.1),
        ]
        chances = [chance for _, chance in actions]
        with ExitStack() as stack:
            stack.callback(self.close)
            for _ in range(steps):
                if self.rng.random() < 0.02:
                    self.letters = int(self.rng.choice([1, 2, 3, 40]))
                seq = int(self.rng.choice(SEQUENCES, p=[0.6, 0.3, 0.1]))
                actions[self.rng.choice(len(actions), p=chances)][0](seq)
                for number, text in enumerate(self.texts):
                    assert self.session.length(number) == len(text.tokens)

    def close(self) -> None:
        for saved in self.saved:
            saved.checkpoint.close()

    def read(self, seq: int) -> None:
        """Tokens of a prompt: few different ones, or an edited copy of the text; also none."""
        text = self.texts[seq]
        sizes = [0, int(self.rng.integers(0, 60)), self.n_ctx]
        n = int(self.rng.choice(sizes, p=[0.1, 0.8, 0.1]))
        tokens = self.rng.integers(0, self.letters, n).tolist()
        if text.known < len(text.tokens) and self.rng.random() < 0.5:
            start = int(self.rng.integers(text.known, len(text.tokens)))
            tokens = text.tokens[start : start + n]
            tokens[7::11] = [50 + i for i, _ in enumerate(tokens[7::11])]
        full = len(text.tokens) + len(tokens) > self.n_ctx
        with (
            pytest.raises(ContextFullError)
            if full
            else nullcontext()
            if tokens
            else pytest.raises(NativeError)
        ):
            self.session.decode(tokens, seq)
        if tokens and not full:
            text.tokens += tokens
        self.counts["full"] += full
        self.counts["empty"] += not tokens

    def cycle(self, seq: int) -> None:
        text = self.texts[seq]
        depth = int(self.rng.choice([0, self.max_depth]))
        token = int(self.rng.integers(0, self.letters))
        following = text.continuations(1)
        if following and self.rng.random() < 0.8:
            token = following[int(self.rng.integers(len(following)))][0]
        for _ in range(20):  # as if learned long ago: drafts are nearly free
            self.session.set_costs([10.0 + i / 10 for i in range(13)], [10.0] * 4)
        if len(text.tokens) == self.n_ctx:
            with pytest.raises(ContextFullError):
                self.session.begin(token, depth, seq)
            return
        drafts = self.session.begin(token, depth, seq)
        share = min(1.0, self.rng.uniform(0.0, 2.0))  # in every other cycle all
        accepted = int(len(drafts) * share)
        self.session.end(accepted)
        text.generated(token)
        assert len(text.tokens) + len(drafts) <= self.n_ctx
        if drafts and self.session.origin(1) == FROM_TEXT:
            assert drafts in text.continuations(len(drafts))
            self.counts["drafted"] += len(drafts)
        elif drafts:
            assert depth
        for draft in drafts[:accepted]:
            text.generated(draft)

    def remove(self, seq: int) -> None:
        text = self.texts[seq]
        length = len(text.tokens)
        few = max(0, length - int(self.rng.integers(0, 5)))
        firsts = [0, few, length, int(self.rng.integers(0, length + 1))]
        first = firsts[int(self.rng.integers(len(firsts)))]
        with suppress(NativeError):  # the recurrent state cannot be rolled back that far
            self.session.remove(first, seq)
            self.counts["removed"] += first < length
            self.counts["emptied"] += first == 0
            text.truncate(first)
            text.known *= first > 0

    def copy(self, seq: int) -> None:
        other = int(self.rng.integers(SEQUENCES))
        self.session.copy(seq, other)
        self.texts[other] = self.texts[seq].copy()
        self.counts["copied"] += 1

    def save(self, seq: int) -> None:
        kind = KINDS[int(self.rng.integers(len(KINDS)))]
        text = self.texts[seq]
        if not text.tokens:
            return
        with suppress(NativeError):  # of kind HEAD, if the head was not fed yet
            self.saved.append(Saved(self.session.save(kind, seq), text.copy()))
        if len(self.saved) > 6:
            self.saved.pop(int(self.rng.integers(len(self.saved)))).checkpoint.close()

    def restore(self, seq: int) -> None:
        if not self.saved:
            return
        saved = self.saved[int(self.rng.integers(len(self.saved)))]
        in_place = saved.checkpoint.kind is CheckpointKind.HOST
        if not in_place and self.rng.random() < 0.5:
            data = saved.checkpoint.to_bytes()
            saved.checkpoint.close()
            saved.checkpoint = Checkpoint.from_bytes(data)
        try:
            self.session.restore(saved.checkpoint, seq)
        except NativeError as error:
            if not re.search("have been removed|a trunk that holds its", str(error)):
                raise
            return
        self.counts[saved.checkpoint.kind.name] += 1
        if in_place:
            assert self.texts[seq].tokens[: len(saved.text.tokens)] == saved.text.tokens
        self.texts[seq] = saved.text.copy()
