"""Depth auto where acceptance changes: how soon it adapts, and what the change costs.

The cost curves are not those of test_depth.py, which the policy was tuned on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean, median

import pytest

from support.depth_scenarios import OTHER_CURVES as CURVES
from support.depth_scenarios import bursts, drift
from support.depth_simulator import Curve, Cycle, play, rate

MAX_DEPTH = 4  # as depth auto has it unless more is asked for
SEEDS = range(100, 160)

SOON = 50  # tokens
SETTLED_CYCLES = 10
SETTLED = 0.95  # of the best depth, to which its neighbour may come close
# Throughput relative to the best fixed depth of each stretch, the change point included: stretches
# of 400 tokens, and of 1000.
AROUND_A_CHANGE = 0.96
IN_A_LONG_STRETCH = 0.975
IN_A_TEXT = 0.97


def settled_after(curve: Curve, cycles: Sequence[Cycle]) -> int:
    """Tokens of a stretch until ten cycles in a row, without probes, are as good as the best."""
    best = curve.best(cycles[0].chance)
    for i in range(len(cycles) - SETTLED_CYCLES + 1):
        following = cycles[i : i + SETTLED_CYCLES]
        ms = sum(curve.cycle_ms(cycle.verified, cycle.verified) for cycle in following)
        if sum(cycle.tokens for cycle in following) / ms >= SETTLED * best:
            return cycles[i].at - cycles[0].at
    return cycles[-1].at - cycles[0].at


def stretches(
    curve: Curve, chances: Sequence[float], n: int, seeds: Sequence[int]
) -> list[list[list[Cycle]]]:
    """Of each stretch of n tokens the cycles of all runs."""
    runs = [
        list(play(curve, lambda at: chances[at // n], seed, n * len(chances), max_depth=MAX_DEPTH))
        for seed in seeds
    ]
    return [
        [[cycle for cycle in run if cycle.at // n == part] for run in runs]
        for part in range(len(chances))
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_follows_within_fifty_tokens(curve: Curve) -> None:
    """90 %, 10 %, 90 %: in nine of ten runs, and at little cost."""
    chances = (0.9, 0.1, 0.9)
    parts = stretches(curve, chances, 400, SEEDS)
    for chance, runs in zip(chances, parts, strict=True):
        after = sorted(settled_after(curve, run) for run in runs)
        assert median(after) <= SOON / 2
        assert after[len(after) * 9 // 10] <= SOON
        assert mean(map(rate, runs)) / curve.best(chance) > AROUND_A_CHANGE


@pytest.mark.parametrize(
    ("chances", "tokens", "seeds", "bar"),
    [
        ((0.9, 0.1, 0.9), 1000, SEEDS[:10], IN_A_LONG_STRETCH),
        ((0.6, 0.2, 0.6), 400, SEEDS[:20], AROUND_A_CHANGE),
    ],
    ids=["long stretches", "smaller changes"],
)
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_changes(
    curve: Curve, chances: tuple[float, ...], tokens: int, seeds: range, bar: float
) -> None:
    for chance, runs in zip(chances, stretches(curve, chances, tokens, seeds), strict=True):
        assert mean(map(rate, runs)) / curve.best(chance) > bar


@pytest.mark.parametrize("chance", [bursts, drift])
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_acceptance_that_keeps_changing(curve: Curve, chance: Callable[[int], float]) -> None:
    """A change point every 60 tokens, and a steady drift: no fixed depth is better."""
    n = 960
    best = max(
        n / sum(1 / curve.rate(depth, chance(at)) for at in range(n))
        for depth in range(MAX_DEPTH + 1)
    )
    runs = [list(play(curve, chance, seed, n, max_depth=MAX_DEPTH)) for seed in SEEDS[:10]]
    assert mean(map(rate, runs)) / best > IN_A_TEXT
