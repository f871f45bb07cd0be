"""Measure products of one matrix with a few columns, by ggml alone and with our kernels.

    python benchmarks/products.py [--types Q4_K,Q8_0,IQ3_S] [--rows 24576] [--threads 1]
        [--columns 1,2,4,8] [--rounds 3] [--kernels FILE]

The matrix has rows of 2,048 weights, in a plain buffer, so ggml does not repack it. ggml is that of
llama-cpp-python; FILE is the library of kernels (default: the installed one), to compare versions.
Both are processes of their own and alternate in each round; the table shows medians of the rounds,
each the best of 25, in milliseconds, and the time with the kernels relative to ggml's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.kernels.ggml_calls import F32, TYPES, Ggml
from support.kernels.sweep import encoded_weights

LENGTH = 2048  # of a row
REPEATS = 25


def measure(ggml: Ggml, name: str, rows: int, columns: int, threads: int) -> float:
    """Milliseconds of a product, the best of REPEATS."""
    base = ggml.base
    weights = encoded_weights(ggml, name, LENGTH, rows)
    x = np.random.default_rng(1).standard_normal((columns, LENGTH), np.float32)
    context = ggml.context()
    w = base.ggml_new_tensor_4d(context, TYPES[name], LENGTH, rows, 1, 1)
    y = base.ggml_new_tensor_4d(context, F32, LENGTH, columns, 1, 1)
    graph = base.ggml_new_graph(context)
    base.ggml_build_forward_expand(graph, base.ggml_mul_mat(context, w, y))
    return best_seconds(ggml, context, graph, [(w, weights), (y, x)], threads, REPEATS) * 1e3


def best_seconds(
    ggml: Ggml,
    context: Any,
    graph: Any,
    contents: Sequence[tuple[Any, npt.NDArray[Any]]],
    threads: int,
    repeats: int,
) -> float:
    """Compute a graph several times and free its context; seconds of the fastest time.

    contents: tensors and what they hold.
    """
    base = ggml.base
    buffer = base.ggml_backend_alloc_ctx_tensors(context, ggml.backend)
    for tensor, data in contents:
        base.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
    ggml.cpu.ggml_backend_cpu_set_n_threads(ggml.backend, threads)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        base.ggml_backend_graph_compute(ggml.backend, graph)
        best = min(best, time.perf_counter() - began)
    base.ggml_backend_buffer_free(buffer)
    base.ggml_free(context)
    return best


def libraries() -> tuple[Path, Path]:
    """The folder of llama-cpp-python's ggml, and our installed kernels. Nothing is loaded."""
    folders = []
    for package in ("llama_cpp", "mtp_gguf"):
        spec = find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        folders.append([Path(folder) for folder in spec.submodule_search_locations])
    stock, ours = folders
    found = [file for folder in ours for file in folder.glob("native/lib/libmtp_kernels.*")]
    return stock[0] / "lib", found[0]


def main() -> None:
    stock, installed = libraries()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--types", default="Q4_K,Q8_0,IQ3_S")
    parser.add_argument("--rows", type=int, default=24576)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--columns", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", type=Path, default=installed)
    parser.add_argument("--measure", choices=["ggml", "kernels"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    columns = [int(n) for n in arguments.columns.split(",")]
    types = arguments.types.split(",")
    if arguments.measure:
        ggml = Ggml(stock, arguments.kernels if arguments.measure == "kernels" else None)
        for name in types:
            times = [measure(ggml, name, arguments.rows, n, arguments.threads) for n in columns]
            print(json.dumps(times))
        return
    found: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for way in ("ggml", "kernels"):
            command = [sys.executable, __file__, *sys.argv[1:], "--measure", way]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            for name, line in zip(types, done.stdout.splitlines(), strict=True):
                found[way, name].append(json.loads(line))
    print("| type, columns | ggml | kernels | kernels / ggml |\n| --- | --- | --- | --- |")
    for name in types:
        for i, n in enumerate(columns):
            ggml_ms, ours = (median(r[i] for r in found[w, name]) for w in ("ggml", "kernels"))
            print(f"| {name}, {n} | {ggml_ms:.2f} | {ours:.2f} | {ours / ggml_ms:.2f} |")


if __name__ == "__main__":
    main()
