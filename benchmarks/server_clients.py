"""Measure what drafting gains with several clients at once.

    python benchmarks/server_clients.py MODEL.gguf --stock LLAMA_SERVER
        [--patched LLAMA_SERVER] [--clients 1,2,4,8] [--depths 0,auto:4,3] [--rounds 3]

Total tokens per second of as many clients as slots, from the first prompt to the last token: a
stock llama-server without drafting, and the patched one (that of `mtp-gguf build-server`) at each
depth, 0 without drafting. For each number of clients all sides run interleaved, and the first round
warms up. Prints a line for each number of clients: medians, and in parentheses the ratio to stock.
Meant for synthetic models (benchmarks/dial_model.py), whose acceptance rate is known.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from decode import PROMPT_TOKENS, server, together
from measuring import in_rounds, numbers, options, patched_server, random_prompts, words

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTEXT = 1024  # of each slot, in tokens
STOCK = "stock, no drafting"


def commands(arguments: argparse.Namespace, patched: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Names, servers and options of all sides."""
    yield STOCK, arguments.stock, []
    for depth in arguments.depths:
        if depth == "0":
            yield "patched, no drafting", patched, []
        else:
            options = ["--spec-type", "draft-mtp", "--spec-draft-n-max", depth]
            yield f"patched, {depth}", patched, options


def main() -> None:
    parser = options(__doc__, {"--threads": 2, "--tokens": 128, "--rounds": 3})
    parser.add_argument("model", type=Path)
    parser.add_argument("--stock", type=Path, required=True)
    parser.add_argument("--patched", type=Path, help="default: that of `mtp-gguf build-server`")
    parser.add_argument("--clients", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--depths", type=words, default=["0", "auto:4", "3"])
    arguments = parser.parse_args()
    patched = patched_server(parser, arguments.patched)
    for clients in arguments.clients:
        prompts = random_prompts(clients, PROMPT_TOKENS)
        slots = ["-np", str(clients), "-c", str(clients * CONTEXT)]
        jobs = {}
        with ExitStack() as stack:
            for name, binary, more in commands(arguments, patched):
                url = stack.enter_context(
                    server(binary, arguments.model, 0, arguments.threads, *slots, *more)
                )
                jobs[name] = partial(together, url, prompts, arguments.tokens)
            found = in_rounds(jobs, arguments.rounds)
        medians = {name: median(speeds) for name, speeds in found.items()}
        told = (f"{name} {v:.1f} ({v / medians[STOCK]:.2f})" for name, v in medians.items())
        print(f"{clients} clients: {', '.join(told)} tok/s", flush=True)


if __name__ == "__main__":
    main()
