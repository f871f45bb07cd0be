"""Measure drafting on llama-cpp-python's own libraries, without and with our kernels plugged in.

    python benchmarks/stock_drafting.py MODEL.gguf [--depths 0,1,2,3,4] [--rounds 3] [--threads 2]
        [--prompts KINDS]

Each round runs `decode.py` in a process without and in one with the kernels. The table shows median
tokens per second by depth, and their ratios to no drafting without the kernels, which is what
llama.cpp does by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from decode import kinds_of

from mtp_gguf.native.runtime import VARIABLE

VARIANTS = {"without kernels": "0", "with kernels": ""}  # values of MTP_GGUF_KERNELS


def speeds(arguments: argparse.Namespace, choice: str) -> dict[str, float]:
    """Tokens per second by depth, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("decode.py")), str(arguments.model)]
    command += ["--depths", arguments.depths, "--threads", str(arguments.threads)]
    command += ["--rounds", "2", "--tokens", str(arguments.tokens)]
    command += ["--prompts", ",".join(arguments.prompts)] if arguments.prompts else []
    environment = {**os.environ, VARIABLE: "stock", "MTP_GGUF_KERNELS": choice}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    return {depth: result["tok_s"] for depth, result in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--depths", default="0,1,2,3,4", help="with 0, the reference")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=kinds_of, help="as for decode.py")
    arguments = parser.parse_args()
    depths = arguments.depths.split(",")
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.rounds):
        for name, choice in VARIANTS.items():
            for depth, speed in speeds(arguments, choice).items():
                found.setdefault((name, depth), []).append(speed)
    median = {key: statistics.median(values) for key, values in found.items()}
    reference = median[next(iter(VARIANTS)), "0"]
    print(f"| tok/s, {arguments.rounds} rounds |", *(f"depth {depth} |" for depth in depths))
    print("|" + " --- |" * (1 + len(depths)))
    for name in VARIANTS:
        cells = [f"{median[name, d]:.1f} ({median[name, d] / reference:.2f} ×)" for d in depths]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
