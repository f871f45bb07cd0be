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

import time
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from statistics import median

from measuring import heading, in_new_process, in_rounds, numbers, options, row, words

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


def of_variant(variant: str, *arguments: object) -> dict[int, float]:
    """As `measure`, on the libraries and with the kernels of a variant; {} if it crashes."""
    libraries, kernels = variant.split(":")
    variables = {"MTP_GGUF_LIBS": libraries, "MTP_GGUF_KERNELS": kernels}
    try:
        return in_new_process(measure, *arguments, **variables)
    except BrokenProcessPool:
        return {}


def main() -> None:
    parser = options(__doc__, {"--threads": 2, "--rounds": 3})
    parser.add_argument("model")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 8, 16, 32, 512])
    parser.add_argument("--variants", type=words, default=["fast:0", "fast:all", "stock:all"])
    arguments = parser.parse_args()
    work = (arguments.model, arguments.threads, arguments.batches)
    jobs = {variant: partial(of_variant, variant, *work) for variant in arguments.variants}
    rounds = in_rounds(jobs, arguments.rounds, warm_up=False)
    heading("tokens", *rounds)
    for size in arguments.batches:
        row(
            size,
            *(
                f"{median(r[size] for r in found):.1f}" if all(found) else "ended"
                for found in rounds.values()
            ),
        )


if __name__ == "__main__":
    main()
