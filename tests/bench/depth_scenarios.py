"""Throughput of depth auto in all scenarios of the simulator, relative to the best fixed depth.

    cd tests; python -m bench.depth_scenarios

Prints one line for each group of scenarios: the mean, the worst scenario, and their number. The
best fixed depth knows the acceptance rate; where that changes, it is the best one of each stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import mean

from bench.depth_simulator import Cycle, play, quiet, rough

from bench import test_depth, test_depth_turns

CHANCES = (0.0, 0.1, 0.3, 0.6, 0.8, 0.95)


def relative(runs: Sequence[Sequence[Cycle]], best: Callable[[float], float]) -> float:
    """Tokens per millisecond, in terms of what the best depth of each cycle would have given."""
    wanted = sum(cycle.tokens / best(cycle.chance) for run in runs for cycle in run)
    return wanted / sum(cycle.ms for run in runs for cycle in run)


def constant(noise: Callable) -> Iterator[float]:
    for curve, chance in product(test_depth.CURVES.values(), CHANCES):
        runs = [
            list(play(curve, lambda _, c=chance: c, seed, 512, noise=noise)) for seed in range(10)
        ]
        yield relative(runs, curve.best)


def changing(chances: Sequence[float], n: int) -> Iterator[float]:
    for noise, curve in product((quiet, rough), test_depth_turns.CURVES.values()):
        runs = [
            list(
                play(
                    curve,
                    lambda at: chances[min(at // n, len(chances) - 1)],
                    seed,
                    n * len(chances),
                    noise=noise,
                    max_depth=4,
                )
            )
            for seed in range(20)
        ]
        yield relative(runs, curve.best)


def restless(chance: Callable[[int], float]) -> Iterator[float]:
    for noise, curve in product((quiet, rough), test_depth_turns.CURVES.values()):
        runs = [
            list(play(curve, chance, seed, 960, noise=noise, max_depth=4)) for seed in range(20)
        ]
        yield relative(runs, curve.best)


def doubtful(surest: float) -> Iterator[float]:
    """The head's probabilities say how often drafts are right: half of them are sure."""
    for curve in test_depth_turns.CURVES.values():
        runs = [
            list(play(curve, lambda _: 0.6, seed, 512, max_depth=4, surest=surest))
            for seed in range(20)
        ]
        tokens = sum(run[-1].at for run in runs)  # which drafts are verified is no accident
        yield tokens / sum(cycle.ms for run in runs for cycle in run[:-1]) / curve.best(0.6)


def sharing() -> Iterator[float]:
    for curve, chances in product(test_depth.CURVES.values(), test_depth.SHARING):
        runs = [test_depth.together(curve, chances, 400, seed, 100) for seed in range(3)]
        yield mean(runs) / test_depth.best_together(curve, chances)


GROUPS: dict[str, Callable[[], Iterator[float]]] = {
    "constant, quiet": lambda: constant(quiet),
    "constant, rough": lambda: constant(rough),
    "90, 10, 90 %, 400 tokens each": lambda: changing((0.9, 0.1, 0.9), 400),
    "90, 10, 90 %, 1000 tokens each": lambda: changing((0.9, 0.1, 0.9), 1000),
    "60, 20, 60 %, 400 tokens each": lambda: changing((0.6, 0.2, 0.6), 400),
    "95 or 20 %, 60 tokens each": lambda: restless(test_depth_turns.bursts),
    "10 to 90 %, slowly": lambda: restless(test_depth_turns.drift),
    "probabilities that tell": lambda: doubtful(0.95),
    "several sequences": sharing,
}


def main() -> None:
    for name, group in GROUPS.items():
        found = list(group())
        print(f"{name:32} {mean(found):.4f}  {min(found):.4f}  {len(found):3}", flush=True)


if __name__ == "__main__":
    main()
