"""Measure an unpatched llama-bench without and with our kernels, and a patched one.

    python benchmarks/plugged_kernels.py MODEL.gguf --bench PATH [--patched PATH] [--rounds 5]
        [--threads 2] [--prompts 4,8,16,32,512] [--tokens 32]

PATH: a llama-bench that is linked with libggml-cpu. The variants alternate in each round; the table
shows the median tokens per second of the rounds, and ratios to the unpatched one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from functools import partial
from pathlib import Path
from statistics import median

from measuring import heading, in_rounds, options, row

from mtp_gguf.server import kernels

STOCK, PLUGGED_IN, PATCHED = "unpatched", "with the library", "patched"


def measure(
    arguments: argparse.Namespace, program: Path, environment: dict[str, str]
) -> dict[str, float]:
    """Tokens per second by what was measured, in one process."""
    command = [
        *(str(program), "-m", str(arguments.model), "-t", str(arguments.threads), "-fa", "1"),
        *("-p", arguments.prompts, "-n", str(arguments.tokens), "-r", "2", "-o", "jsonl"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        f"batch of {row['n_prompt']}" if row["n_prompt"] else "one token at a time": row["avg_ts"]
        for row in found
    }


def main() -> None:
    parser = options(__doc__, {"--rounds": 5, "--threads": 2, "--tokens": 32})
    parser.add_argument("model", type=Path)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--patched", type=Path)
    parser.add_argument("--prompts", default="4,8,16,32,512")
    arguments = parser.parse_args()

    plain = dict(os.environ)
    variants = {
        STOCK: (arguments.bench, plain),
        PLUGGED_IN: (arguments.bench, kernels.environment(arguments.bench, plain)),
    }
    if arguments.patched:
        variants[PATCHED] = (arguments.patched, plain)
    jobs = {name: partial(measure, arguments, *variant) for name, variant in variants.items()}
    rounds = in_rounds(jobs, arguments.rounds, warm_up=False)
    heading(f"tok/s, {arguments.rounds} rounds", *variants, "gain")
    for what in rounds[STOCK][0]:
        medians = {name: median(r[what] for r in found) for name, found in rounds.items()}
        gain = medians[PLUGGED_IN] / medians[STOCK]
        row(what, *(f"{value:.1f}" for value in medians.values()), f"{gain:.2f} ×")


if __name__ == "__main__":
    main()
