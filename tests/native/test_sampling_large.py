"""Sampling with drafts from whole vocabularies, as large as real ones and unfiltered.

What is drawn is compared with probabilities computed in double precision from the trunk's logits.
A vocabulary of 248,320 is where running sums in single precision fail: what comes after a likely
token is swallowed, and the last token of all takes its place.
"""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.checkpoints import NARROW
from support.chi_square import far_off, one_sample
from support.models import Dial
from support.native_trunk import opened_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mtp_gguf.native.session import Session

PROMPT = [3, 1, 4]
SMALL, LARGE = 32_768, 248_320
HIT = 0.9
# Factors on all logits: with the first every token is as likely as any other; with the second one
# has nearly everything, and each token outside the model's cycle less than half of what a single
# precision number near 1 can tell apart.
FLAT = 1e-3
GAINS = {"flat": FLAT, "peaked": 2.05}
BLOCK = 512  # tokens that a number may be too early by: drafts are drawn by blocks first
TAIL = 256  # seeds are chosen by the last of so many parts of [0, 1)


class Drawn:
    """A model at a token: draws of what follows, and how likely that is."""

    def __init__(self, session: Session, token: int, logits: np.ndarray) -> None:
        self.session = session
        self.token = token
        weights = np.exp(logits.astype(np.float64) - logits.max())
        self.chances = weights / weights.sum()

    def draw(self) -> int:
        """The token after `token`: a draft or what came in its place."""
        self.session.remove(0)
        self.session.decode(PROMPT)
        return self.session.step_sampled(self.token)[0]


@contextmanager
def opened(dial: Any, rows: int, gain: float, *, missed: bool = False) -> Iterator[Drawn]:
    """missed: at a token after which the head is wrong."""
    spec = replace(
        NARROW,
        name=f"rows-{rows}-{gain}",
        vocab_size=rows,
    )
    folder = dial.models.root / spec.name
    if not folder.is_dir():
        dial.module.write_dial_model(folder, spec, HIT, dial.LAYER_SCALE, gain)
    cycle = dial.module.cycle_of(spec)
    flags = dial.module.missed_tokens(spec, HIT)
    # The successor comes early, so that nearly the whole vocabulary stands after it.
    token = next(int(t) for t, n in itertools.pairwise(cycle) if flags[t] == missed and n < 2000)
    model = dial.models.gguf(folder, "F16", "F16")
    with opened_session(model, "snapshot", 1, fastmtp_size=-1) as (session, trunk):
        session.decode([*PROMPT, token])
        drawn = Drawn(session, token, trunk.logits())
        session.set_sampling(1.0, seed=23)
        session.reset_stats()
        yield drawn


def check(counts: Counter[int], chances: np.ndarray, parts: int) -> None:
    """Compare counts with chances: the likeliest token alone, the others by their place."""
    top = int(chances.argmax())
    edges = np.linspace(0, len(chances), parts + 1).astype(int)
    seen: Counter[int] = Counter()
    for token, count in counts.items():
        part = -1 if token == top else int(np.searchsorted(edges, token, "right"))
        seen[part] += count
    others = chances.copy()
    others[top] = 0
    want = {i + 1: others[a:b].sum() for i, (a, b) in enumerate(itertools.pairwise(edges))}
    want[-1] = chances[top]
    statistic, freedom = one_sample(seen, want)
    assert freedom >= 1
    assert not far_off(statistic, freedom), (statistic, freedom)


@pytest.fixture(scope="module")
def late_seeds(dial: Dial) -> list[int]:
    """Seeds whose second number lies in the last 256th of [0, 1).

    Found with a model whose tokens are all as likely as each other: what is drawn tells the number.
    """
    with opened_session(dial("tiny", gain=FLAT), "snapshot", 0) as (session, trunk):
        session.decode(PROMPT)
        first = trunk.n_vocab - trunk.n_vocab // TAIL
        found = []
        for seed in range(20_000):
            session.set_sampling(1.0, seed=seed)
            session.sample()
            if session.sample() >= first:
                found.append(seed)
    assert 50 < len(found) < 110
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("gain", GAINS.values(), ids=GAINS)
@pytest.mark.parametrize("rows", [SMALL, LARGE])
def test_late_numbers_draw_late_tokens(
    dial: Dial, late_seeds: range, rows: int, gain: float
) -> None:
    """As late as their probabilities say, and not the last one alone."""
    with opened(dial, rows, gain) as drawn:
        tokens = []
        for seed in late_seeds[:25]:
            drawn.session.remove(0)
            drawn.session.decode([*PROMPT, drawn.token])
            drawn.session.set_sampling(1.0, seed=seed)
            drawn.session.sample()  # drafts reach as far down as the last row did
            tokens.append(drawn.draw())
        before = drawn.chances.cumsum()
        late = [before[min(t + BLOCK, rows - 1)] > 1 - 1 / TAIL - 1e-5 for t in tokens]
        assert sum(late) > 20  # the others were drafted, and replaced
        assert tokens.count(rows - 1) <= 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("missed", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("gain", [FLAT, 1.6], ids=GAINS)
def test_drafts_and_their_replacements_come_as_the_trunk_says(
    dial: Dial, gain: float, missed: bool
) -> None:
    with opened(dial, SMALL, gain, missed=missed) as drawn:
        check(Counter(drawn.draw() for _ in range(300)), drawn.chances, 16)
        accepted = drawn.session.stats().acceptance[0]
        assert accepted < 0.5 if missed and gain > FLAT else accepted > 0.8


@pytest.mark.parametrize("gain", [FLAT, 1.6], ids=GAINS)
def test_a_row_comes_as_its_logits_say(dial: Dial, gain: float) -> None:
    with opened(dial, SMALL, gain) as drawn:
        check(Counter(drawn.session.sample() for _ in range(2000)), drawn.chances, 64)


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", [0.3, 0.99])
@pytest.mark.parametrize("gain", [FLAT, 1.6], ids=GAINS)
def test_top_p_without_top_k_keeps_the_likeliest(dial: Dial, gain: float, part: float) -> None:
    with opened(dial, SMALL, gain) as drawn:
        drawn.session.set_sampling(1.0, top_p=part, seed=29)
        counts = Counter(drawn.session.sample() for _ in range(500))
        order = np.argsort(-drawn.chances, kind="stable")
        kept = order[: int(np.searchsorted(drawn.chances[order].cumsum(), part)) + 1]
        # rounding decides about the last one, and about tokens as likely as it
        least = drawn.chances[kept[-1]] * (1 - 1e-6)
        assert set(counts) <= set(np.flatnonzero(drawn.chances >= least).tolist())
        chances = np.zeros_like(drawn.chances)
        chances[kept] = drawn.chances[kept] / drawn.chances[kept].sum()
        if len(kept) > 1:
            check(counts, chances, 32)


@pytest.mark.slow
@pytest.mark.parametrize("missed", [False, True], ids=["right", "wrong"])
@pytest.mark.parametrize("gain", GAINS.values(), ids=GAINS)
@pytest.mark.parametrize("rows", [SMALL, LARGE])
def test_10000_draws(dial: Dial, rows: int, gain: float, missed: bool) -> None:
    """pytest -m slow tests/native/test_sampling_large.py"""
    with opened(dial, rows, gain, missed=missed) as drawn:
        counts = Counter(drawn.draw() for _ in range(10_000))
        check(counts, drawn.chances, 128)
        assert counts[rows - 1] <= 2
