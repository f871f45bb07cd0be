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
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from decode import PROMPT_TOKENS, server, together

from mtp_gguf.server.build import find_build

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
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--stock", type=Path, required=True)
    parser.add_argument("--patched", type=Path, help="default: that of `mtp-gguf build-server`")
    parser.add_argument("--clients", type=lambda t: [*map(int, t.split(","))], default=[1, 2, 4, 8])
    parser.add_argument("--depths", type=lambda t: t.split(","), default=["0", "auto:4", "3"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    built = find_build()
    patched = arguments.patched or (built.server if built else None)
    if patched is None:
        parser.error("no llama-server with our patches: `mtp-gguf build-server` builds one")
    for clients in arguments.clients:
        draw = np.random.default_rng(1)
        prompts = draw.integers(0, 20_000, (clients, PROMPT_TOKENS)).tolist()
        more = ["-np", str(clients), "-c", str(clients * CONTEXT)]
        speeds: dict[str, list[float]] = {}
        with ExitStack() as stack:
            urls = {
                name: stack.enter_context(
                    server(str(binary), str(arguments.model), 0, arguments.threads, *more, *options)
                )
                for name, binary, options in commands(arguments, patched)
            }
            for _ in range(arguments.rounds + 1):
                for name, url in urls.items():
                    speed = together(url, prompts, arguments.tokens)
                    speeds.setdefault(name, []).append(speed)
        medians = {name: statistics.median(values[1:]) for name, values in speeds.items()}
        words = (f"{name} {v:.1f} ({v / medians[STOCK]:.2f})" for name, v in medians.items())
        print(f"{clients} clients: {', '.join(words)} tok/s", flush=True)


if __name__ == "__main__":
    main()
