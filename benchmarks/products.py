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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from measuring import heading, in_rounds, numbers, options, row, words

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


def kernel_options(description: str, defaults: Mapping[str, float]) -> argparse.ArgumentParser:
    """A parser with the options of `both_ways`, besides those of `options`."""
    parser = options(description, defaults)
    parser.add_argument("--kernels", type=Path, default=libraries()[1])
    parser.add_argument("--measure", choices=["ggml", "kernels"], help=argparse.SUPPRESS)
    return parser


def both_ways(
    arguments: argparse.Namespace, measured: Callable[[Ggml], Sequence[float]]
) -> tuple[list[float], list[float]]:
    """The medians of what is measured by ggml alone and with the kernels, each in a process.

    Such a process prints what it has measured, and ends.
    """
    if arguments.measure:
        with_kernels = arguments.kernels if arguments.measure == "kernels" else None
        print(json.dumps(measured(Ggml(libraries()[0], with_kernels))))
        raise SystemExit

    def once(way: str) -> list[float]:
        command = [sys.executable, *sys.argv, "--measure", way]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found: list[float] = json.loads(done.stdout)
        return found

    jobs = {way: partial(once, way) for way in ("ggml", "kernels")}
    rounds = in_rounds(jobs, arguments.rounds, warm_up=False)
    ggml, ours = ([median(t) for t in zip(*found, strict=True)] for found in rounds.values())
    return ggml, ours


def main() -> None:
    parser = kernel_options(__doc__, {"--rows": 24576, "--threads": 1, "--rounds": 3})
    parser.add_argument("--types", type=words, default=["Q4_K", "Q8_0", "IQ3_S"])
    parser.add_argument("--columns", type=numbers, default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    cases = [(name, n) for name in arguments.types for n in arguments.columns]

    def measured(ggml: Ggml) -> list[float]:
        return [measure(ggml, name, arguments.rows, n, arguments.threads) for name, n in cases]

    pairs = zip(cases, *both_ways(arguments, measured), strict=True)
    heading("type, columns", "ggml", "kernels", "kernels / ggml")
    for (name, n), ggml_ms, ours in pairs:
        row(f"{name}, {n}", f"{ggml_ms:.2f}", f"{ours:.2f}", f"{ours / ggml_ms:.2f}")


if __name__ == "__main__":
    main()
