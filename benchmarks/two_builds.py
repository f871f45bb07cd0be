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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from decode import PROMPT_TOKENS, one_round, opened, server, together
from measuring import (
    in_rounds,
    median_with_interval,
    new_process,
    numbers,
    options,
    random_prompts,
    words,
)
from server_clients import CONTEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mtp_gguf.native import MTPLlama

_loaded: list[MTPLlama] = []  # of a process of `alone`: its model


def decode(model: Path, depth: int, threads: int, tokens: int) -> float:
    """Generate once, and return the tokens per second; the model is loaded once in a process."""
    if not _loaded:
        _loaded.append(opened(model, depth, CONTEXT, threads))
    return one_round(_loaded[0], random_prompts(1, PROMPT_TOKENS)[0], tokens)["tok_s"]


@contextmanager
def alone(build: Path, depth: int, arguments: argparse.Namespace) -> Iterator[Callable[[], float]]:
    """Yield a function that measures MTPLlama on the libraries of a build, in tokens per second."""
    work = (arguments.model, depth, arguments.threads, arguments.tokens)
    with new_process(MTP_GGUF_LIBS=str(build)) as process:
        yield lambda: process.submit(decode, *work).result()


@contextmanager
def served(
    build: Path, clients: int, depth: str, arguments: argparse.Namespace
) -> Iterator[Callable[[], float]]:
    """Yield a function that measures the llama-server of a build, in tokens per second."""
    prompts = random_prompts(clients, PROMPT_TOKENS)
    more = ["-np", str(clients), "-c", str(clients * CONTEXT)]
    if depth != "0":
        more += ["--spec-type", "draft-mtp", "--spec-draft-n-max", depth]
    with server(build / "llama-server", arguments.model, 0, arguments.threads, *more) as url:
        yield lambda: together(url, prompts, arguments.tokens)


def compare(name: str, sides: list[Callable[[], float]], rounds: int) -> None:
    """Measure both sides, and print the line of this setting."""
    before, after = map(np.array, in_rounds(dict(enumerate(sides)), rounds).values())
    ratio, low, high = median_with_interval(after / before)
    print(
        f"{name}: {ratio:.3f} ({low:.3f} to {high:.3f}), {rounds} pairs, "
        f"{np.median(before):.1f} and {np.median(after):.1f} tok/s",
        flush=True,
    )


def main() -> None:
    parser = options(__doc__, {"--threads": 2, "--tokens": 48, "--rounds": 30})
    parser.add_argument("model", type=Path)
    parser.add_argument("--builds", type=Path, nargs=2, required=True, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--alone", type=numbers, default=[0, 3])
    parser.add_argument("--clients", type=numbers, default=[1, 4])
    parser.add_argument("--depths", type=words, default=["0", "3", "auto:4"])
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
