"""Measure attention over a KV cache, by ggml alone and with our kernels.

    python benchmarks/attention.py [--caches F16,Q8_0,Q4_0] [--contexts 1024,8192,32768]
        [--tokens 1,4,16] [--heads 8] [--kv-heads 2] [--size 256] [--threads 2] [--rounds 3]
        [--kernels FILE]

The last TOKENS of a context attend to all of it, in a layer with the heads of the 0.8B model. A
graph has as many layers as it takes to exceed the CPU's caches, each with keys and values of its
own, which lie in memory as llama.cpp keeps them. ggml is that of llama-cpp-python; FILE is the
library of kernels (default: the installed one). Both are processes of their own and alternate in
each round. The table shows medians of the rounds, each the best of 5: microseconds of a layer, the
time with the kernels relative to ggml's, and the share of the measured memory bandwidth at which
the kernels read keys and values.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from measuring import heading, numbers, row, words
from products import best_seconds, both_ways, kernel_options, libraries

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.kernels.ggml_calls import F16, F32, TYPES, Ggml

BEYOND_CACHES = 160 << 20  # bytes of keys and values in a graph
REPEATS = 5


def measure(
    ggml: Ggml, arguments: argparse.Namespace, cache: str, length: int, tokens: int
) -> float:
    """Microseconds of a layer, the best of REPEATS."""
    base, size, kv_heads = ggml.base, arguments.size, arguments.kv_heads
    row = base.ggml_row_size(TYPES[cache], size)
    layers = min(5, max(1, BEYOND_CACHES // (2 * row * kv_heads * length)))
    rng = np.random.default_rng(1)
    values = rng.standard_normal((kv_heads * length, size), np.float32)
    keys = ggml.encode(TYPES[cache], values)
    queries = rng.standard_normal((arguments.heads * tokens, size), np.float32)
    visible = np.arange(length) <= length - tokens + np.arange(tokens)[:, None]
    context = ggml.context()
    mask = base.ggml_new_tensor_4d(context, F16, length, tokens, 1, 1)
    graph = base.ggml_new_graph(context)
    tensors = []
    for _ in range(layers):
        q = base.ggml_new_tensor_4d(context, F32, size, tokens, arguments.heads, 1)
        kept = [
            base.ggml_new_tensor_4d(context, TYPES[cache], size * kv_heads, length, 1, 1)
            for _ in "kv"
        ]
        seen = [
            base.ggml_view_3d(context, t, size, length, kv_heads, row * kv_heads, row, 0)
            for t in kept
        ]
        base.ggml_build_forward_expand(
            graph, base.ggml_flash_attn_ext(context, q, *seen, mask, size**-0.5, 0.0, 0.0)
        )
        tensors += [(q, queries), *((t, keys) for t in kept)]
    tensors.append((mask, np.where(visible, 0, -np.inf).astype(np.float16)))
    seconds = best_seconds(ggml, context, graph, tensors, arguments.threads, REPEATS)
    return seconds / layers * 1e6


def reading(threads: int) -> float:
    """Megabytes that the threads read from memory in a second, the best of REPEATS."""
    pieces = np.array_split(np.ones(BEYOND_CACHES // 4, np.int32), 16 * threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            began = time.perf_counter()
            list(pool.map(np.max, pieces))
            best = min(best, time.perf_counter() - began)
    return BEYOND_CACHES / best / 1e6


def main() -> None:
    parser = kernel_options(
        __doc__, {"--heads": 8, "--kv-heads": 2, "--size": 256, "--threads": 2, "--rounds": 3}
    )
    parser.add_argument("--caches", type=words, default=["F16", "Q8_0", "Q4_0"])
    parser.add_argument("--contexts", type=numbers, default=[1024, 8192, 32768])
    parser.add_argument("--tokens", type=numbers, default=[1, 4, 16])
    arguments = parser.parse_args()
    cases = [*itertools.product(arguments.contexts, arguments.tokens, arguments.caches)]

    def measured(ggml: Ggml) -> list[float]:
        times = [measure(ggml, arguments, cache, n, tokens) for n, tokens, cache in cases]
        return [*times, reading(arguments.threads)]

    ggml_us, ours = both_ways(arguments, measured)
    heading(
        "context, tokens, cache", "ggml, µs", "kernels, µs", "kernels / ggml", "of the bandwidth"
    )
    base = Ggml(libraries()[0]).base
    for (n, tokens, cache), before, after in zip(cases, ggml_us, ours, strict=False):
        nbytes = 2 * n * base.ggml_row_size(TYPES[cache], arguments.size * arguments.kv_heads)
        row(
            f"{n:,}, {tokens}, {cache}",
            f"{before:,.0f}",
            f"{after:,.0f}",
            f"{after / before:.2f}",
            f"{nbytes / after / ours[-1]:.0%}",
        )


if __name__ == "__main__":
    main()
