"""What the scripts of this folder share: options, processes of their own, rounds and tables.

Whatever is compared runs in rounds, one after the other in each, so that a slow minute affects all
of it alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import numpy as np
from numpy.typing import ArrayLike

from mtp_gguf.bench.stats import rotated

Key = TypeVar("Key")
Value = TypeVar("Value")


def options(
    description: str, defaults: Mapping[str, float] | None = None
) -> argparse.ArgumentParser:
    """A parser with these options, each a number, and what they are by default."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    for name, default in (defaults or {}).items():
        parser.add_argument(name, type=type(default), default=default, help=f"[{default}]")
    return parser


def numbers(text: str) -> list[int]:
    """Parse a comma-separated list of numbers."""
    return [int(number) for number in text.split(",") if number]


def words(text: str) -> list[str]:
    """Parse a comma-separated list of words."""
    return text.split(",")


def patched_server(parser: argparse.ArgumentParser, named: Path | None = None) -> Path:
    """The llama-server that is named, else that of `mtp-gguf build-server`."""
    from mtp_gguf.server.build import find_build  # noqa: PLC0415

    built = find_build()
    if named is None and built is None:
        parser.error("no llama-server with our patches: `mtp-gguf build-server` builds one")
    return named or built.server


@contextmanager
def new_process(**variables: str) -> Iterator[ProcessPoolExecutor]:
    """A process that calls functions, one after the other, with these environment variables."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with patch.dict(os.environ, variables):
            pool.submit(os.getpid).result()  # starts it
        yield pool


def in_new_process(function: Callable[..., Value], *arguments: object, **variables: str) -> Value:
    """What a function returns in a process that ends with it."""
    with new_process(**variables) as pool:
        return pool.submit(function, *arguments).result()


def in_rounds(
    jobs: Mapping[Key, Callable[[], Value]], rounds: int, *, warm_up: bool = True
) -> dict[Key, list[Value]]:
    """What each job returns in each round; every round begins with another job.

    warm_up: run another round before them, which does not count.
    """
    found: dict[Key, list[Value]] = {name: [] for name in jobs}
    for number in range(-warm_up, rounds):
        for name in rotated(list(jobs), number):
            value = jobs[name]()
            if number >= 0:
                found[name].append(value)
    return found


def median_with_interval(ratios: ArrayLike) -> tuple[float, float, float]:
    """The median of the rounds' ratios, and its 95 % interval (bootstrap)."""
    values = np.asarray(ratios)
    drawn = np.random.default_rng(0).choice(values, (4000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(np.median(values)), float(low), float(high)


def row(*cells: object) -> None:
    """Print a line of a table, at once."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def heading(*cells: object) -> None:
    """Print the first two lines of a table."""
    row(*cells)
    row(*["---"] * len(cells))


def random_prompts(count: int, tokens: int, below: int = 20_000) -> list[list[int]]:
    """Random tokens for prompts of a synthetic model: no padding, no control tokens."""
    drawn: list[list[int]] = np.random.default_rng(1).integers(0, below, (count, tokens)).tolist()
    return drawn
