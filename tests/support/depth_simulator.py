"""A simulator for depth auto: costs from a table, outcomes from a seeded generator, no clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mtp_gguf.native.depth import DepthChooser, Outcome

MAX_DEPTH = 6


@dataclass(frozen=True)
class Curve:
    """Milliseconds: verify[i] of i + 1 tokens, draft[i] of i + 1 drafts."""

    verify: tuple[float, ...]
    draft: tuple[float, ...]

    def cycle_ms(self, drafted: int, verified: int) -> float:
        return (self.draft[drafted - 1] if drafted else 0.0) + self.verify[verified]

    def rate(self, depth: int, chance: float) -> float:
        """Expected tokens per millisecond of a fixed depth."""
        return expected_tokens(depth, chance) / self.cycle_ms(depth, depth)

    def best(self, chance: float) -> float:
        return max(self.rate(depth, chance) for depth in range(min(MAX_DEPTH, len(self.draft)) + 1))


def expected_tokens(depth: int, chance: float) -> float:
    return sum(chance**i for i in range(depth + 1))


def line(first: float, step: float, n: int) -> tuple[float, ...]:
    return tuple(first + step * i for i in range(n))


@dataclass
class Noise:
    """What measured times are multiplied by, in logarithms.

    drift: standard deviation of the machine's pace, which loses its memory over 20 cycles. white:
    of each time beside that. slow: share of the times that take 1.6 times as long.
    """

    drift: float
    white: float
    slow: float
    _pace: float = 0.0

    def next_cycle(self, draw: random.Random) -> None:
        self._pace = 0.95 * self._pace + draw.gauss(0, self.drift * math.sqrt(1 - 0.95**2))

    def factor(self, draw: random.Random) -> float:
        slow = 1.6 if draw.random() < self.slow else 1.0
        return slow * math.exp(self._pace + draw.gauss(0, self.white))


def quiet() -> Noise:
    return Noise(0.0, 0.03, 0.0)


def rough() -> Noise:
    """As measured on a virtual machine whose neighbours share its memory."""
    return Noise(0.12, 0.10, 0.02)


@dataclass(frozen=True)
class Cycle:
    """at: tokens written before it. ms: what it takes, without noise."""

    at: int
    chance: float
    drafted: int
    verified: int
    ms: float

    @property
    def tokens(self) -> float:
        """Expected of the depth that was verified, without the luck of the draw."""
        return expected_tokens(self.verified, self.chance)


def play(
    curve: Curve,
    chance: Callable[[int], float],
    seed: int,
    total: int,
    *,
    noise: Callable[[], Noise] = quiet,
    max_depth: int = MAX_DEPTH,
    surest: float | None = None,
    first_use: float = 1.0,
    chooser: DepthChooser | None = None,
) -> Iterator[Cycle]:
    """Let the chooser decode `total` tokens; chance: of drafts to be right, by tokens before.

    surest: half of the drafts are right so often, the others less, and the head's probabilities say
    which ones; None: they say nothing. first_use: how many times as long the first batch of a size
    takes, and the first draft graph of a depth. chooser: what has learned from other texts.
    """
    draw, machine = random.Random(seed), noise()
    used: set[tuple[str, int]] = set()

    def measured(what: str, size: int, ms: float) -> float:
        slow = 1.0 if (what, size) in used else first_use
        used.add((what, size))
        return ms * slow * machine.factor(draw)

    chooser = chooser or DepthChooser(max_depth)
    at = 0
    while at < total:
        now = chance(at)
        each = [0.99] * (max_depth + 1)
        if surest is None:
            right = [draw.random() < now for _ in each]
        else:
            each = [draw.choice((surest, 2 * now - surest)) for _ in each]
            right = [draw.random() < probability for probability in each]
        probabilities = each[: chooser.plan(max_depth)]
        drafted = len(probabilities)
        verified = chooser.keep(probabilities) if drafted else 0
        accepted = next((i for i in range(verified) if not right[i]), verified)
        unverified = accepted == verified < drafted
        machine.next_cycle(draw)
        draft_ms = curve.draft[drafted - 1] if drafted else 0.0
        verify_ms = curve.verify[verified]
        yield Cycle(at, now, drafted, verified, draft_ms + verify_ms)
        at += accepted + 1
        chooser.report(
            Outcome(
                probabilities,
                verified,
                accepted,
                float(right[verified]) if unverified else None,
                measured("draft", drafted, draft_ms),
                measured("verify", verified, verify_ms),
            )
        )


def rate(cycles: Sequence[Cycle]) -> float:
    """Expected tokens per millisecond."""
    return sum(cycle.tokens for cycle in cycles) / sum(cycle.ms for cycle in cycles)
