"""Depth auto against every fixed depth, on dial models of several hit rates.

    python benchmarks/depth_auto.py --work FOLDER [--shape 0.8b] [--hits 0,0.3,0.6,0.8,0.95]

For each hit rate the models are made (and kept in FOLDER); then all depths and "auto" take turns,
each time in a session that knows nothing yet, so that what finding out costs is counted. The bars:
auto within 3 % of the best fixed depth, and at 0 % at least 0.97 x plain decoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from decode import PROMPT_TOKENS, dial_file
from dial_model import SHAPES

from mtp_gguf.native.bench.model import BenchModel, Setting
from mtp_gguf.native.bench.texts import write

MAX_DEPTH = 6


def measure(path: Path, depths: list[int | str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Median tokens per second of each depth."""
    speeds: dict[str, list[float]] = {str(depth): [] for depth in depths}
    n_ctx = PROMPT_TOKENS + arguments.tokens + 64
    with BenchModel(path, n_ctx=n_ctx, threads=arguments.threads) as model:
        usable = min(20_000, model.n_vocab * 2 // 3)  # no padding, no control tokens
        prompt = np.random.default_rng(1).integers(0, usable, PROMPT_TOKENS).tolist()
        for i in range(arguments.rounds + 1):
            for depth in [*depths[i % len(depths) :], *depths[: i % len(depths)]]:
                wanted: Any = depth
                with model.session(Setting(MAX_DEPTH)) as session:
                    did = write(model, session, prompt, arguments.tokens, wanted)
                if i:  # the first round warms up
                    speeds[str(depth)].append((len(did.tokens) - 1) / did.seconds)
    return {depth: statistics.median(values) for depth, values in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the models")
    parser.add_argument("--shape", choices=SHAPES, default="0.8b")
    parser.add_argument("--hits", default="0,0.3,0.6,0.8,0.95")
    parser.add_argument("--depths", default="0,1,2,3,4,6")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    depths: list[int | str] = [*map(int, arguments.depths.split(",")), "auto"]
    print("| hit | " + " | ".join(map(str, depths)) + " | auto / best | auto / plain |")
    print("| --- " * (len(depths) + 3) + "|")
    record = {}
    for hit in map(float, arguments.hits.split(",")):
        path = dial_file(arguments.shape, hit, arguments.work)
        found = record[hit] = measure(path, depths, arguments)
        best = max(speed for depth, speed in found.items() if depth != "auto")
        cells = [f"{speed:.1f}" for speed in found.values()]
        cells += [f"{found['auto'] / best:.3f}", f"{found['auto'] / found['0']:.3f}"]
        print(f"| {hit:.0%} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps({"shape": arguments.shape, "threads": arguments.threads, "tok_s": record}))


if __name__ == "__main__":
    main()
