"""Measure batches of tokens with and without our kernels, on bundled and unpatched libraries.

    python benchmarks/kernel_batches.py MODEL.gguf [--threads 2] [--rounds 3]
        [--batches 1,4,8,16,32,512] [--variants fast:0,fast:all,stock:all]

A variant is the libraries (fast: bundled, stock: llama-cpp-python's own) and whether the kernels
are plugged in (0: not, so that ggml's own code runs, on CPUs with AMX that for its tiles). Each
variant is a process of its own; they alternate in each round. A batch follows 8 tokens; the table
shows medians of the rounds, each the best of 5, in milliseconds. "ended" stands for a variant that
crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median

from mtp_gguf.native.runtime import llama_cpp

CONTEXT = 8  # tokens before the batches
TOKENS = 16  # that one measurement decodes at least


def measure(model: str, threads: int, batches: list[int]) -> dict[int, float]:
    """Milliseconds of a batch by its tokens."""
    llm = llama_cpp.Llama(
        model,
        n_ctx=CONTEXT + max(*batches, 2 * TOKENS),
        n_batch=max(batches),
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        verbose=False,
    )
    found = {}
    for size in batches:
        times = []
        for _ in range(5):
            llm.reset()
            llm.eval([5] * CONTEXT)
            repeats = max(1, TOKENS // size)
            began = time.perf_counter()
            for _ in range(repeats):
                llm.eval([7] * size)
            times.append((time.perf_counter() - began) / repeats * 1e3)
        found[size] = min(times)
    return found


def in_new_process(variant: str, arguments: argparse.Namespace) -> dict[str, float]:
    """As `measure`, on the libraries and with the kernels of a variant; {} if it crashes."""
    libraries, kernels = variant.split(":")
    command = [sys.executable, __file__, arguments.model, "--measure"]
    command += ["--threads", str(arguments.threads), "--batches", arguments.batches]
    environment = {**os.environ, "MTP_GGUF_LIBS": libraries, "MTP_GGUF_KERNELS": kernels}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    found: dict[str, float] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", default="1,4,8,16,32,512")
    parser.add_argument("--variants", default="fast:0,fast:all,stock:all")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    batches = [int(size) for size in arguments.batches.split(",")]
    if arguments.measure:
        print(json.dumps(measure(arguments.model, arguments.threads, batches)))
        return
    variants = arguments.variants.split(",")
    rounds: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for _ in range(arguments.rounds):
        for variant in variants:
            rounds[variant].append(in_new_process(variant, arguments))
    print(f"| tokens | {' | '.join(variants)} |\n| --- |{' --- |' * len(variants)}")
    for size in map(str, batches):
        cells = [
            f"{median(r[size] for r in rounds[v]):.1f}" if all(rounds[v]) else "ended"
            for v in variants
        ]
        print(f"| {size} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
