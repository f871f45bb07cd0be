"""Throughput of depth auto in all scenarios of the simulator, relative to the best fixed depth.

    cd tests; python -m support.depth_scenarios

Prints one line for each group of scenarios: the mean, the worst scenario, and their number. The
best fixed depth knows the acceptance rate; where that changes, it is the best one of each stretch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

from mtp_gguf.native.depth import DepthChooser, Outcome, keep_batch, plan_batch
from support.depth_simulator import (
    MAX_DEPTH,
    Curve,
    Cycle,
    Noise,
    expected_tokens,
    line,
    play,
    quiet,
    rough,
)

CURVES = {
    # benchmarks/README.md, 2026-11-21: measured up to 5 tokens and 4 drafts, the rest by the line.
    "0.8B, stock": Curve((20.7, 36.1, 44.5, *line(54.2, 9.8, 5)), line(2.1, 2.0, 8)),
    "0.8B, patched": Curve((19.2, 23.2, 25.2, 29.0, *line(33.5, 4.5, 4)), line(2.2, 2.0, 8)),
    # The shapes that others have: verification nearly free, free drafts on a steep curve, a draft
    # over the whole vocabulary.
    "flat": Curve(line(10, 0.4, 8), line(1, 0.5, 8)),
    "steep": Curve((20, 36, 50, 62, 72, 80, 88, 95), line(2, 2, 8)),
    "slow head": Curve(line(20, 3, 8), line(8, 8, 8)),
    "small steps": Curve((15, 17, 19.5, 22, 25, 28, 31, 34), line(2.1, 2, 8)),
}
OTHER_CURVES = {  # up to depth 4
    # docs/verification.md: 1, 1.08, 1.19, 1.27 for up to four tokens.
    "0.8B, all patches": Curve((17.4, 18.8, 20.7, 22.1, 24.5), line(2.0, 1.9, 4)),
    "4B": Curve((58, 66, 79, 84, 95), line(8, 7, 4)),
    "GPU": Curve((14, 14.6, 15, 15.6, 16.5), line(1.2, 0.7, 4)),
}
FURTHER = 0.15  # of a draft graph's time for each further sequence
SHARING = [(0.9,) * 4, (0.9, 0.0), (0.95, 0.0, 0.5, 0.8), (0.0,) * 3]
CHANCES = (0.0, 0.1, 0.3, 0.6, 0.8, 0.95)


def bursts(at: int) -> float:
    return 0.95 if at % 120 < 60 else 0.2


def drift(at: int) -> float:
    return 0.5 + 0.4 * math.cos(math.tau * at / 800)


def batch_ms(curve: Curve, depths: Sequence[int]) -> float:
    """Of a batch that verifies drafts: a graph for all sequences with as many tokens.

    Beyond its end the curve goes on by its last step.
    """
    known = len(curve.verify)
    step = curve.verify[-1] - curve.verify[-2]
    rows = [(depth + 1) * depths.count(depth) for depth in set(depths)]
    return sum(curve.verify[min(n, known) - 1] + step * max(0, n - known) for n in rows)


def graph_ms(curve: Curve, depths: Sequence[int]) -> float:
    """Of one graph that drafts for all sequences: the deepest, and some more for each other one."""
    drafting = sum(depth > 0 for depth in depths)
    return curve.draft[max(depths) - 1] * (1 + FURTHER * (drafting - 1)) if drafting else 0.0


def together(curve: Curve, chances: Sequence[float], cycles: int, seed: int, skip: int) -> float:
    """Tokens per millisecond of sequences of these chances side by side, one batch a cycle.

    The first `skip` cycles are not counted.
    """
    draw, machine = random.Random(seed), quiet()
    first = DepthChooser(MAX_DEPTH)
    choosers = [first, *(first.beside() for _ in chances[1:])]
    tokens = ms = 0.0
    for cycle in range(cycles):
        for chooser in choosers:
            chooser.share(len(choosers))
        drafted = plan_batch(choosers, [MAX_DEPTH] * len(choosers))
        verified = keep_batch(choosers, [[0.99] * depth for depth in drafted])
        rows, draft_ms = sum(verified) + len(choosers), graph_ms(curve, drafted)
        verify_ms = batch_ms(curve, verified)
        if cycle >= skip:
            ms += verify_ms + draft_ms
        if draft_ms:
            deepest = max(drafted)
            drafting = sum(depth > 0 for depth in drafted)
            first.report_draft(drafting, deepest, draft_ms * machine.factor(draw))
        if len(set(verified)) == 1:
            first.report_batch(rows, verify_ms * machine.factor(draw))
        for chooser, chance, made, kept in zip(choosers, chances, drafted, verified, strict=True):
            right = [draw.random() < chance for _ in range(MAX_DEPTH + 1)]
            accepted = next((i for i in range(kept) if not right[i]), kept)
            seen = float(right[kept]) if accepted == kept < made else None
            chooser.report(Outcome([0.99] * made, kept, accepted, seen))
            if cycle >= skip:
                tokens += expected_tokens(kept, chance)
    return tokens / ms


def best_together(curve: Curve, chances: Sequence[float]) -> float:
    """Tokens per millisecond of the best fixed depths of all combinations."""
    return max(
        sum(map(expected_tokens, chosen, chances))
        / (batch_ms(curve, chosen) + graph_ms(curve, chosen))
        for chosen in product((0, 1, 2, 3, 4, 6), repeat=len(chances))
    )


def relative(runs: Sequence[Sequence[Cycle]], best: Callable[[float], float]) -> float:
    """Tokens per millisecond, in terms of what the best depth of each cycle would have given."""
    wanted = sum(cycle.tokens / best(cycle.chance) for run in runs for cycle in run)
    return wanted / sum(cycle.ms for run in runs for cycle in run)


def _always(chance: float, _: int) -> float:
    return chance


def runs_of(
    curve: Curve, chance: Callable[[int], float], seeds: int, total: int, **how: Any
) -> list[list[Cycle]]:
    return [list(play(curve, chance, seed, total, **how)) for seed in range(seeds)]


def constant(noise: Callable[[], Noise]) -> Iterator[float]:
    for curve, chance in product(CURVES.values(), CHANCES):
        yield relative(runs_of(curve, partial(_always, chance), 10, 512, noise=noise), curve.best)


def changing(chances: Sequence[float], n: int) -> Iterator[float]:
    for noise, curve in product((quiet, rough), OTHER_CURVES.values()):
        chance = lambda at: chances[min(at // n, len(chances) - 1)]  # noqa: E731
        runs = runs_of(curve, chance, 20, n * len(chances), noise=noise, max_depth=4)
        yield relative(runs, curve.best)


def restless(chance: Callable[[int], float]) -> Iterator[float]:
    for noise, curve in product((quiet, rough), OTHER_CURVES.values()):
        runs = runs_of(curve, chance, 20, 960, noise=noise, max_depth=4)
        yield relative(runs, curve.best)


def doubtful(surest: float) -> Iterator[float]:
    """The head's probabilities say how often drafts are right: half of them are sure."""
    for curve in OTHER_CURVES.values():
        runs = runs_of(curve, partial(_always, 0.6), 20, 512, max_depth=4, surest=surest)
        tokens = sum(run[-1].at for run in runs)  # which drafts are verified is no accident
        yield tokens / sum(cycle.ms for run in runs for cycle in run[:-1]) / curve.best(0.6)


def sharing() -> Iterator[float]:
    for curve, chances in product(CURVES.values(), SHARING):
        runs = [together(curve, chances, 400, seed, 100) for seed in range(3)]
        yield mean(runs) / best_together(curve, chances)


def remembered(before: float | None, chance: float, total: int) -> Iterator[float]:
    """A process after one whose drafts were right as often as `before` says; None: after none."""
    for curve in CURVES.values():
        runs = []
        for seed in range(12):
            chooser = DepthChooser(MAX_DEPTH)
            if before is not None:
                earlier = DepthChooser(MAX_DEPTH)
                same = partial(_always, before)
                list(play(curve, same, seed + 1000, 400, first_use=2.0, chooser=earlier))
                state = earlier.state()
                # The debt of probes is none, as after read_depth_file.
                chooser.set_state(state[:16] + bytes(8) + state[24:])
            same = partial(_always, chance)
            runs.append(list(play(curve, same, seed, total, first_use=2.0, chooser=chooser)))
        yield relative(runs, curve.best)


REMEMBERED = [
    *((before, chance) for chance in CHANCES for before in (None, chance)),
    *((0.0, 0.8), (0.8, 0.0), (0.95, 0.3)),
]

GROUPS: dict[str, Callable[[], Iterator[float]]] = {
    "constant, quiet": lambda: constant(quiet),
    "constant, rough": lambda: constant(rough),
    "90, 10, 90 %, 400 tokens each": lambda: changing((0.9, 0.1, 0.9), 400),
    "90, 10, 90 %, 1000 tokens each": lambda: changing((0.9, 0.1, 0.9), 1000),
    "60, 20, 60 %, 400 tokens each": lambda: changing((0.6, 0.2, 0.6), 400),
    "95 or 20 %, 60 tokens each": lambda: restless(bursts),
    "10 to 90 %, slowly": lambda: restless(drift),
    "probabilities that tell": lambda: doubtful(0.95),
    "several sequences": sharing,
    **{
        f"{total} tokens, {chance:.0%} after {'nothing' if before is None else f'{before:.0%}'}": (
            partial(remembered, before, chance, total)
        )
        for total in (64, 400)
        for before, chance in REMEMBERED
    },
}


def main() -> None:
    for name, group in GROUPS.items():
        found = list(group())
        print(f"{name:32} {mean(found):.4f}  {min(found):.4f}  {len(found):3}", flush=True)


if __name__ == "__main__":
    main()
