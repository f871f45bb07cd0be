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
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median

from decode import kinds_of
from measuring import heading, in_rounds, options, row, words

from mtp_gguf.native.runtime import VARIABLE

VARIANTS = {"without kernels": "0", "with kernels": ""}  # values of MTP_GGUF_KERNELS


def speeds(arguments: argparse.Namespace, choice: str) -> dict[str, float]:
    """Tokens per second by depth, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("decode.py")), str(arguments.model)]
    command += ["--depths", ",".join(arguments.depths), "--threads", str(arguments.threads)]
    command += ["--rounds", "2", "--tokens", str(arguments.tokens)]
    command += ["--prompts", ",".join(arguments.prompts)] if arguments.prompts else []
    environment = {**os.environ, VARIABLE: "stock", "MTP_GGUF_KERNELS": choice}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    return {depth: result["tok_s"] for depth, result in results.items()}


def main() -> None:
    parser = options(__doc__, {"--rounds": 3, "--threads": 2, "--tokens": 96})
    parser.add_argument("model", type=Path)
    parser.add_argument("--depths", type=words, default=["0", "1", "2", "3", "4"], help="with 0")
    parser.add_argument("--prompts", type=kinds_of, help="as for decode.py")
    arguments = parser.parse_args()
    jobs = {name: partial(speeds, arguments, choice) for name, choice in VARIANTS.items()}
    found = {
        name: {depth: median(r[depth] for r in rounds) for depth in arguments.depths}
        for name, rounds in in_rounds(jobs, arguments.rounds, warm_up=False).items()
    }
    reference = found[next(iter(VARIANTS))]["0"]
    heading(f"tok/s, {arguments.rounds} rounds", *(f"depth {d}" for d in arguments.depths))
    for name, medians in found.items():
        row(name, *(f"{tok_s:.1f} ({tok_s / reference:.2f} ×)" for tok_s in medians.values()))


if __name__ == "__main__":
    main()
