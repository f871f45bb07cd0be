"""Texts at several settings that take turns, and what they add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from mtp_gguf.native.checkpoint import Checkpoint
from mtp_gguf.native.session import Depth

from .model import BenchModel, Setting
from .result import ALL, TextResult
from .spread import spread
from .texts import Written, write

T = TypeVar("T")


@dataclass(frozen=True)
class Contender:
    """What takes part: a setting, the depth that it is asked for, and the list it names."""

    setting: Setting
    depth: Depth
    fastmtp_size: int = 0


class Turns:
    """Every contender writes all texts in its turn, in every round, so that a slow minute hits all.

    Each has a context of its own kind in its turn, as MTPLlama would give it. A turn that is
    cut short leaves nothing; those before it stay.
    """

    def __init__(
        self,
        model: BenchModel,
        prompts: Mapping[str, Sequence[Sequence[int]]],
        tokens: int,
        contenders: Mapping[Hashable, Contender],
        before: Checkpoint | None = None,
    ) -> None:
        """prompts: ids by kind of text. tokens: of each answer. before: what all stand behind."""
        self._model = model
        self._prompts = prompts
        self._tokens = tokens
        self._contenders = dict(contenders)
        self._before = before
        self._rows: dict[Hashable, int] = {}
        self.written: dict[Hashable, list[dict[str, list[Written]]]] = {k: [] for k in contenders}
        self._rounds = 0

    def round(self, step: Callable[[Hashable], None] = lambda _: None) -> None:
        """One round. step: called after each turn with whose it was."""
        for key in rotated(list(self._contenders), self._rounds):
            contender = self._contenders[key]
            turn: dict[str, list[Written]] = {}
            with self._model.session(contender.setting) as session:
                self._rows[key] = session.head.n_draft_vocab if session.head else 0
                for kind, prompts in self._prompts.items():
                    turn[kind] = [
                        write(
                            self._model,
                            session,
                            prompt,
                            self._tokens,
                            contender.depth,
                            self._before,
                        )
                        for prompt in prompts
                    ]
            self.written[key].append(turn)
            step(key)
        self._rounds += 1

    def tokens(self, key: Hashable) -> Counter[int]:
        """How often each token is in the texts of one contender's first turn."""
        first = self.written[key][:1]
        return Counter(
            t for turn in first for texts in turn.values() for w in texts for t in w.tokens
        )

    def speeds(self, key: Hashable) -> list[float]:
        """Tokens per second of one contender over all texts, round by round."""
        return [
            _Round([w for texts in turn.values() for w in texts]).tok_s
            for turn in self.written[key]
        ]

    def results(self) -> list[TextResult]:
        """For each contender that had a turn a result of each kind, then one of all texts."""
        out = []
        context = self._before.length if self._before else 0
        for key, turns in self.written.items():
            if not turns:
                continue
            c = self._contenders[key]
            depth = 0 if c.depth is None else c.depth
            of_kind = {kind: [turn[kind] for turn in turns] for kind in self._prompts}
            of_kind[ALL] = [[w for texts in turn.values() for w in texts] for turn in turns]
            out += [
                text_result(kind, context, c.fastmtp_size, self._rows[key], depth, rounds)
                for kind, rounds in of_kind.items()
            ]
        return out


def text_result(
    kind: str,
    context: int,
    size: int,
    rows: int,
    depth: int | str,
    rounds: Sequence[Sequence[Written]],
) -> TextResult:
    """The sum of some texts; speed as a spread over the rounds, times as medians of them."""
    every = [w for runs in rounds for w in runs]
    deepest = max((len(w.stats.drafted) for w in every), default=0)
    drafted = [sum(_at(w.stats.drafted, i) for w in every) for i in range(deepest)]
    accepted = [sum(_at(w.stats.accepted, i) for w in every) for i in range(deepest)]
    cycles = sum(w.stats.cycles for w in every)
    given = sum(w.stats.tokens for w in every)
    sums = [_Round(runs) for runs in rounds]
    return TextResult(
        kind,
        context,
        size,
        rows,
        depth,
        sum(len(w.tokens) for w in rounds[0]),
        spread([r.tok_s for r in sums]),
        given / max(1, cycles),
        tuple(a / d for a, d in zip(accepted, drafted, strict=True) if d),
        median(r.draft_ms for r in sums),
        median(r.verify_ms for r in sums),
        median(r.rollback_ms for r in sums),
        median(r.rest_ms for r in sums),
        median(r.limit_tok_s for r in sums),
    )


class _Round:
    """The sum of one round's texts. Milliseconds are of a cycle."""

    def __init__(self, texts: Sequence[Written]) -> None:
        cycles = max(1, sum(w.stats.cycles for w in texts))
        given = sum(w.stats.tokens for w in texts)
        seconds = sum(w.seconds for w in texts)
        verify = sum(w.stats.verify_ms for w in texts)
        draft = sum(w.stats.draft_ms for w in texts)
        rollback = sum(w.stats.rollback_ms for w in texts)
        # The first token of a text is the prompt's; the others took the time.
        self.tok_s = sum(len(w.tokens) - 1 for w in texts) / max(1e-9, seconds)
        self.draft_ms = draft / cycles
        self.verify_ms = verify / cycles
        self.rollback_ms = rollback / cycles
        self.rest_ms = max(0.0, seconds * 1e3 - verify - draft - rollback) / cycles
        self.limit_tok_s = given * 1e3 / verify if verify else 0.0


def rotated(values: Sequence[T], by: int) -> list[T]:
    """The values, another one first each time, so that no one profits from its place."""
    by %= max(1, len(values))
    return [*values[by:], *values[:by]]


def _at(values: Sequence[int], i: int) -> int:
    return values[i] if i < len(values) else 0
