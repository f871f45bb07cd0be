"""llama-server's drafting: a stock one, ours, and our session on the same libraries.

    export LLAMA_CPP_LIB_PATH=$(mtp-gguf build-server --where | tail -n 1)
    python benchmarks/server.py MODEL.gguf --stock LLAMA_SERVER [--plain MODEL.gguf]
        [--depths 1,2,3] [--slots 4]

The patched server is the one beside those libraries, which the session then runs on.

Everything takes turns within one run, so that a slow minute hits all of it; medians of the rounds.
MODEL has a FastMTP list in the layout `ids`, which the stock server ignores; --plain names the same
model without one. With several slots, as many clients ask at once, and the speed is that of all of
them together. Meant for files of benchmarks/dial_model.py, whose acceptance is known.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from decode import one_round, server, server_round

from mtp_gguf.native import MTPLlama

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT_TOKENS = 64
CONTEXT = 1024  # positions of each slot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--stock", type=Path, required=True)
    parser.add_argument("--plain", type=Path)
    parser.add_argument("--depths", default="1,2,3")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    depths = [int(depth) for depth in arguments.depths.split(",")]

    libraries = os.environ.get("LLAMA_CPP_LIB_PATH")
    if not libraries:
        parser.error("LLAMA_CPP_LIB_PATH: expected the folder of the patched libraries, not set")
    patched = Path(libraries) / "llama-server"

    prompts = np.random.default_rng(1).integers(0, 20_000, (arguments.slots, PROMPT_TOKENS))
    prompt = prompts[0].tolist()
    kinds = {
        "stock": (arguments.stock, arguments.model),
        "patched": (patched, arguments.model),
    }
    if arguments.plain:
        kinds["stock, no list"] = (arguments.stock, arguments.plain)
        kinds["patched, no list"] = (patched, arguments.plain)

    def alone(url: str) -> float:
        return server_round(url, prompt, arguments.tokens)

    def together(url: str) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(arguments.slots) as pool:
            list(pool.map(lambda p: server_round(url, p.tolist(), arguments.tokens), prompts))
        return arguments.slots * arguments.tokens / (time.perf_counter() - began)

    def measured(runs: dict[str, Callable[[], float]]) -> dict[str, float]:
        """Median speeds in tokens per second; the first round warms up."""
        speeds = [{name: run() for name, run in runs.items()} for _ in range(arguments.rounds + 1)]
        return {name: statistics.median(r[name] for r in speeds[1:]) for name in runs}

    table: dict[int, dict[str, float]] = {}
    many: dict[int, dict[str, float]] = {}
    for depth in depths:
        with ExitStack() as stack:
            runs: dict[str, Callable[[], float]] = {}
            groups: dict[str, Callable[[], float]] = {}
            for name, (binary, model) in kinds.items():
                for slots, into, ask in ((1, runs, alone), (arguments.slots, groups, together)):
                    more = ["-np", str(slots), "-c", str(slots * CONTEXT)]
                    url = stack.enter_context(
                        server(str(binary), str(model), depth, arguments.threads, *more)
                    )
                    into[name] = lambda url=url, ask=ask: ask(url)
            llm = stack.enter_context(
                closing(
                    MTPLlama(
                        str(arguments.model),
                        depth=depth,
                        n_ctx=CONTEXT,
                        n_threads=arguments.threads,
                        n_threads_batch=arguments.threads,
                    )
                )
            )
            runs["session"] = lambda llm=llm: one_round(llm, prompt, arguments.tokens)["tok_s"]
            table[depth] = measured(runs)
            many[depth] = measured(groups)

    def best(speeds: dict[int, dict[str, float]], name: str) -> float:
        return max(row[name] for row in speeds.values())

    for title, speeds in (("one slot", table), (f"{arguments.slots} slots", many)):
        for depth, row in speeds.items():
            words = ", ".join(f"{name} {speed:.1f}" for name, speed in row.items())
            print(f"{title}, depth {depth}: {words} tok/s")
        for name in kinds:
            if name.startswith("patched"):
                other = name.replace("patched", "stock")
                ratio = best(speeds, name) / best(speeds, other)
                print(f"{title}: {name} {ratio:.2f} x {other}, each at its best depth")
    for depth, row in table.items():
        print(f"depth {depth}: patched {row['patched'] / row['session']:.2f} x session")
    print(json.dumps({"one_slot": table, "slots": arguments.slots, "together": many}))


if __name__ == "__main__":
    main()
