"""Say whether two builds of the patched llama.cpp decode equally fast, to a per cent or two.

    python benchmarks/two_builds.py MODEL.gguf --builds BEFORE AFTER [--rounds 30] [--tokens 48]
        [--alone 0,3] [--clients 1,4] [--depths 0,3,auto:4]

BEFORE and AFTER are folders of `mtp-gguf build-server` (its second line). For each of --alone,
`MTPLlama` drafts that far on the libraries of each, in processes that stay; for each of --clients
and --depths, so many clients ask the llama-server of each at once. The two builds alternate in
short rounds, in alternating order, so that a slow minute affects both. Prints a line for each
setting: the median over the pairs of rounds of AFTER's speed divided by BEFORE's, with the 95 %
interval of that median (bootstrap), and the median speeds. The first pair warms up. Meant for
synthetic models (benchmarks/dial_model.py).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
from decode import PROMPT_TOKENS, one_round, server, together
from server_clients import CONTEXT

from mtp_gguf.native import MTPLlama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray


def decode(asked: Connection, model: str, depth: int, threads: int, tokens: int) -> None:
    """Generate once for each True that is asked, and answer with the tokens per second.

    Runs in a process of its own, which loads the libraries that its environment names.
    """
    prompt = np.random.default_rng(1).integers(0, 20_000, PROMPT_TOKENS).tolist()
    with MTPLlama(
        model, depth=depth, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, profile=False
    ) as llm:
        while asked.recv():
            asked.send(one_round(llm, prompt, tokens)["tok_s"])


@contextmanager
def alone(build: Path, depth: int, arguments: argparse.Namespace) -> Iterator[Callable[[], float]]:
    """Yield a function that measures MTPLlama on the libraries of a build, in tokens per second."""
    start = multiprocessing.get_context("spawn")
    here, there = start.Pipe()
    options = (str(arguments.model), depth, arguments.threads, arguments.tokens)
    process = start.Process(target=decode, args=(there, *options), daemon=True)
    with patch.dict(os.environ, MTP_GGUF_LIBS=str(build)):
        process.start()

    def measure() -> float:
        here.send(True)
        speed: float = here.recv()
        return speed

    yield measure
    here.send(False)
    process.join()


@contextmanager
def served(
    build: Path, clients: int, depth: str, arguments: argparse.Namespace
) -> Iterator[Callable[[], float]]:
    """Yield a function that measures the llama-server of a build, in tokens per second."""
    prompts = np.random.default_rng(1).integers(0, 20_000, (clients, PROMPT_TOKENS)).tolist()
    more = ["-np", str(clients), "-c", str(clients * CONTEXT)]
    if depth != "0":
        more += ["--spec-type", "draft-mtp", "--spec-draft-n-max", depth]
    binary = str(build / "llama-server")
    with server(binary, str(arguments.model), 0, arguments.threads, *more) as url:
        yield lambda: together(url, prompts, arguments.tokens)


def median_with_interval(ratios: NDArray[np.float64]) -> tuple[float, float, float]:
    """The median of the rounds' ratios, and its 95 % interval (bootstrap)."""
    drawn = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(np.median(ratios)), float(low), float(high)


def compare(name: str, sides: list[Callable[[], float]], rounds: int) -> None:
    """Measure both sides, and print the line of this setting."""
    speeds = np.empty((rounds + 1, 2))
    for i in range(rounds + 1):
        for side in (0, 1) if i % 2 else (1, 0):
            speeds[i, side] = sides[side]()
    speeds = speeds[1:]
    ratio, low, high = median_with_interval(speeds[:, 1] / speeds[:, 0])
    before, after = np.median(speeds, axis=0)
    print(
        f"{name}: {ratio:.3f} ({low:.3f} to {high:.3f}), {rounds} pairs, "
        f"{before:.1f} and {after:.1f} tok/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--builds", type=Path, nargs=2, required=True, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--alone", type=lambda t: [*map(int, t.split(","))], default=[0, 3])
    parser.add_argument("--clients", type=lambda t: [*map(int, t.split(","))], default=[1, 4])
    parser.add_argument("--depths", type=lambda t: t.split(","), default=["0", "3", "auto:4"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    for file in (arguments.model, *(build / "llama-server" for build in arguments.builds)):
        if not file.is_file():
            parser.error(f"{file}: expected a file")
    for depth in arguments.alone:
        with ExitStack() as stack:
            sides = [stack.enter_context(alone(b, depth, arguments)) for b in arguments.builds]
            compare(f"MTPLlama, depth {depth}", sides, arguments.rounds)
    for clients in arguments.clients:
        for depth in arguments.depths:
            with ExitStack() as stack:
                sides = [
                    stack.enter_context(served(b, clients, depth, arguments))
                    for b in arguments.builds
                ]
                name = f"llama-server, {clients} client{'s' * (clients > 1)}, depth {depth}"
                compare(name, sides, arguments.rounds)


if __name__ == "__main__":
    main()
