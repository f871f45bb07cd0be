"""Compute in several threads at once, each with a thread pool of its own, and in a forked child.

    cd tests; python -m support.kernels.threads FOLDER LIBRARY

Prints as JSON how many results differ from those of a single thread, and the child's exit code.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .ggml_calls import TYPES, Floats, Ggml
from .sweep import columns, weights

ROUNDS = 5
TOGETHER = 70  # more than the 64 pools that compute at the same time


def products(ggml: Ggml, name: str, threads: int) -> list[Floats]:
    """Matrices and experts of one type, whose threads share work and wait for each other, and the
    sum of a token's experts, over which patched libraries wait in the middle.
    """
    n, rows = 512, 148
    ids = np.array([[1, 0], [1, 3], [1, 0]], np.int32)
    encoded = ggml.encode(TYPES[name], weights(name, n, rows * 4))
    x = columns(n)[:3]
    rng = np.random.default_rng(12)
    outputs = rng.standard_normal((3, 8, n), np.float32)
    factors = rng.standard_normal((3, 8), np.float32)
    return [
        ggml.product(TYPES[name], encoded[: len(encoded) // 4], rows, x, threads),
        ggml.expert_product(TYPES[name], encoded, rows, x, ids, threads),
        ggml.weighted_sum(outputs, factors, threads, apart=False, in_place=True),
    ]


def main() -> None:
    folder, library = map(Path, sys.argv[1:])
    names = ("Q4_K", "Q8_0", "F16", "Q6_K")
    first = Ggml(folder, library)
    alone = {name: products(first, name, 1) for name in names}

    def work(i: int) -> int:
        ggml = Ggml(folder)
        wrong = 0
        for _ in range(ROUNDS):
            name = names[i % len(names)]
            found = products(ggml, name, 1 + i % 3)
            wrong += sum(
                a.tobytes() != b.tobytes() for a, b in zip(found, alone[name], strict=True)
            )
        return wrong

    with ThreadPoolExecutor(TOGETHER) as pool:
        wrong = sum(pool.map(work, range(TOGETHER)))
    if not (child := os.fork()):
        # One thread: those of OpenMP are the parent's.
        found = products(Ggml(folder), "Q4_K", 1)
        same = all(a.tobytes() == b.tobytes() for a, b in zip(found, alone["Q4_K"], strict=True))
        os._exit(0 if same else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    computed = [first.plugged.computed(name) for name in ("MUL_MAT", "MUL_MAT_ID")]
    print(json.dumps({"wrong": wrong, "child": code, "computed": computed}))


if __name__ == "__main__":
    main()
