"""Single ops of the ggml that llama_cpp has loaded, on its CPU backend, from NumPy arrays.

Matrices are [rows, row length], as ggml keeps them; weights come as the bytes of their rows.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME, F16, F32, TensorType
from mtp_gguf.native.runtime import llama_cpp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_SLACK = 16 << 20  # work buffer and the context's own books


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


@cache
def _function(library: str, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    folder = getattr(llama_cpp.llama_cpp, "_base_path", Path(llama_cpp.__file__).parent / "lib")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    lib = ctypes.CDLL(str(Path(folder) / f"lib{library}.{suffix}"))
    function: Any = getattr(lib, name)
    function.restype, function.argtypes = result, arguments
    return function


def _ggml(name: str, *arguments: Any) -> Any:
    """Call a function that takes pointers and floats and gives a pointer."""
    kinds = (ctypes.c_float if isinstance(a, float) else ctypes.c_void_p for a in arguments)
    return _function("ggml-base", f"ggml_{name}", ctypes.c_void_p, *kinds)(*arguments)


class Graph:
    """A ggml context that holds its tensors, and what is computed in it."""

    def __init__(self, context: int) -> None:
        self.context = context

    def tensor(self, kind: TensorType, shape: tuple[int, ...], data: NDArray[Any]) -> Any:
        """A tensor of `shape`, in NumPy's order, with these bytes."""
        sizes = (ctypes.c_int64 * len(shape))(*reversed(shape))
        new = _function(
            "ggml-base", "ggml_new_tensor", *[ctypes.c_void_p] * 2, ctypes.c_int, ctypes.c_int,
            ctypes.POINTER(ctypes.c_int64),
        )  # fmt: skip
        tensor = new(self.context, kind.id, len(shape), sizes)
        assert data.nbytes == math.prod(shape[:-1]) * kind.row_bytes(shape[-1])
        ctypes.memmove(_ggml("get_data", tensor), data.ctypes.data, data.nbytes)
        return tensor

    def compute(self, op: str, *arguments: Any, size: int, threads: int) -> NDArray[np.float32]:
        """The `size` values of an op, flat."""
        out = _ggml(op, self.context, *arguments)
        graph = _ggml("new_graph", self.context)
        _ggml("build_forward_expand", graph, out)
        run = _function(
            "ggml-cpu", "ggml_graph_compute_with_ctx", ctypes.c_int, *[ctypes.c_void_p] * 2,
            ctypes.c_int,
        )  # fmt: skip
        assert run(self.context, graph, threads) == 0
        raw = ctypes.string_at(_ggml("get_data", out), size * 4)
        return np.frombuffer(raw, np.float32).copy()


@contextmanager
def _graph(*data: NDArray[Any]) -> Iterator[Graph]:
    size = 2 * sum(array.nbytes for array in data) + _SLACK
    init = _function("ggml-base", "ggml_init", ctypes.c_void_p, _InitParams)
    context = init(_InitParams(size, None, False))
    try:
        yield Graph(context)
    finally:
        _ggml("free", context)


def product(
    kind: TensorType, weights: NDArray[Any], x: NDArray[np.float32], *, threads: int
) -> NDArray[np.float32]:
    """x [n, k] times weights of m rows of k: [n, m]."""
    n, k = x.shape
    m = weights.nbytes // kind.row_bytes(k)
    with _graph(weights, x, np.empty((n, m))) as graph:
        w, rows = graph.tensor(kind, (m, k), weights), graph.tensor(F32, (n, k), x)
        return graph.compute("mul_mat", w, rows, size=n * m, threads=threads).reshape(n, m)


def expert_product(
    kind: TensorType,
    weights: NDArray[Any],
    x: NDArray[np.float32],
    chosen: NDArray[np.int32],
    experts: int,
    *,
    threads: int,
) -> NDArray[np.float32]:
    """x [n, k] times the matrices of the experts chosen [n, used]: [n, used, m]."""
    (n, k), used = x.shape, chosen.shape[1]
    m = weights.nbytes // kind.row_bytes(k) // experts
    with _graph(weights, x, np.empty((n, used, m))) as graph:
        w = graph.tensor(kind, (experts, m, k), weights)
        rows = graph.tensor(F32, (n, 1, k), x)
        ids = graph.tensor(BY_NAME["I32"], chosen.shape, chosen)
        out = graph.compute("mul_mat_id", w, rows, ids, size=n * used * m, threads=threads)
        return out.reshape(n, used, m)


def attention(
    kind: TensorType,
    keys: NDArray[Any],
    values: NDArray[Any],
    q: NDArray[np.float32],
    *,
    threads: int,
) -> NDArray[np.float32]:
    """Flash attention of q [heads, n, dim], row i over all but the last n - 1 - i cached cells.

    keys, values: bytes of [heads, cells, dim]. Gives [n, heads, dim].
    """
    heads, n, dim = q.shape
    cells = keys.nbytes // heads // kind.row_bytes(dim)
    mask = np.zeros((n, cells), np.float16)
    for row in range(n):
        mask[row, cells - (n - 1 - row) :] = -np.inf
    with _graph(keys, values, q, mask) as graph:
        out = graph.compute(
            "flash_attn_ext",
            graph.tensor(F32, q.shape, q),
            graph.tensor(kind, (heads, cells, dim), keys),
            graph.tensor(kind, (heads, cells, dim), values),
            graph.tensor(F16, mask.shape, mask),
            dim**-0.5,
            0.0,
            0.0,
            size=q.size,
            threads=threads,
        )
        return out.reshape(n, heads, dim)
