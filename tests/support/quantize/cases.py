"""Rows for comparing quantizers, and the reference results of ggml_quantize_chunk."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.safetensors import open_safetensors
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME, TensorType
from mtp_gguf.native.runtime import loaded_library
from mtp_gguf.quantize import quantizer

Q5_K = BY_NAME["Q5_K"]
X86_64 = ("x86_64", "AMD64")
KINDS = [
    BY_NAME[name]
    for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")
]
"""The block formats that have kernels; F16 has one too."""


def has_kernel(kind: TensorType, weighted: bool) -> bool:
    """Whether a kernel is to be expected.

    With importance, ggml's Q4_0 weighs a block by its whole row, which no kernel does. Other
    processors than x86-64 have fused products and sums, and a ggml that uses them is left alone.
    """
    fused = platform.machine() not in X86_64 and quantizer.kernel(Q5_K, False).startswith("ggml: ")
    if kind.name == "Q4_0" and weighted:
        return False
    return kind.name in ("Q8_0", "F16") or (kind in KINDS and not fused)


SOURCES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
Rows = NDArray[Any]
Weights = NDArray[np.float32]


@cache
def _ggml() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(loaded_library("ggml-base")))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p] * 2,
        *[ctypes.c_int64] * 3,
        ctypes.c_void_p,
    ]
    return lib


def reference(kind: TensorType, rows: Rows, weights: Weights | None = None) -> NDArray[np.uint8]:
    """What ggml makes of the rows, which NumPy widens to F32 here."""
    values = np.ascontiguousarray(rows.astype(np.float32))
    count, length = values.shape
    out = np.empty((count, kind.row_bytes(length)), np.uint8)
    importance = None if weights is None else weights.ctypes.data
    written = _ggml().ggml_quantize_chunk(
        kind.id, values.ctypes.data, out.ctypes.data, 0, count, length, importance
    )
    assert written == out.nbytes
    return out


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    return rng.standard_normal(shape, np.float32)


def _mixture(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Like trained weights: heavy tails, rows and columns of different size."""
    values = rng.standard_t(4, shape) * np.exp(rng.normal(-4, 1, (shape[0], 1)))
    return np.asarray(values * np.exp(rng.normal(0, 0.3, (1, shape[1]))), np.float32)


def _pieces(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Each 16 values of a kind of their own: size, offset, sign, sparsity, number of levels."""
    pieces = rng.standard_normal((shape[0] * shape[1] // 16, 16))
    count = (len(pieces), 1)
    pieces = pieces * 10.0 ** rng.integers(-9, 4, count) + rng.normal(0, 1, count)
    pieces = np.where(rng.random(count) < 0.2, np.abs(pieces), pieces)
    pieces = np.where(rng.random(count) < 0.2, np.round(pieces), pieces)
    pieces = pieces * (rng.random(pieces.shape) < rng.random(count) + 0.4)
    return np.asarray(pieces.reshape(shape), np.float32)


def _groups(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Each 16 values of another size, so that the levels of the scales themselves are searched."""
    groups = rng.standard_normal((shape[0] * shape[1] // 16, 16))
    sizes = np.exp(rng.normal(-4, 3, (len(groups), 1)))
    return np.asarray((groups * sizes).reshape(shape), np.float32)


def _near_ties(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Integers and halves, where every comparison and rounding is a tie."""
    return np.asarray(rng.integers(-40, 41, shape) / 2, np.float32)


def _outlier(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    values = _normal(rng, shape) * np.float32(0.01)
    values[:, rng.integers(shape[1])] = 300
    values[::3, 0] = -60000
    return values


def _nearly_equal(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Values that differ in the last bits only: differences cancel, scales lose their meaning."""
    middle = np.asarray(rng.normal(0, 1, (shape[0], 1)), np.float32)
    steps = rng.integers(0, 3, shape).astype(np.int32)
    return np.ascontiguousarray(np.broadcast_to(middle, shape).view(np.int32) + steps).view(
        np.float32
    )


def _denormal(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    return _normal(rng, shape) * np.float32(2.0**-133)


def _tiny_to_huge(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Any finite bit pattern."""
    patterns = rng.integers(0, 2**32, shape, np.uint32)
    values = patterns.view(np.float32)
    return np.where(np.isfinite(values), values, np.float32(0))


def _every_size(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Normal values, each row (thus block) of a size between the smallest and the largest float."""
    exponents = rng.uniform(-149, 127, (shape[0], 1))
    return np.asarray(np.clip(_normal(rng, shape), -3, 3) / 3 * 2.0**exponents, np.float32)


def _both_ends(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    """The largest float and the most negative one, now and then with an ordinary value between."""
    largest = np.finfo(np.float32).max
    values = np.where(rng.random(shape) < 0.5, largest, -largest)
    return np.asarray(np.where(rng.random(shape) < 0.1, _normal(rng, shape), values), np.float32)


def _constant(value: float) -> Callable[[np.random.Generator, tuple[int, int]], Any]:
    return lambda rng, shape: np.full(shape, value, np.float32)


CASES: dict[str, Callable[[np.random.Generator, tuple[int, int]], Any]] = {
    "normal": _normal,
    "mixture": _mixture,
    "pieces": _pieces,
    "groups": _groups,
    "near ties": _near_ties,
    "outlier": _outlier,
    "nearly equal": _nearly_equal,
    "denormal": _denormal,
    "tiny to huge": _tiny_to_huge,
    "every size": _every_size,
    "zeros": _constant(0),
    "negative zeros": _constant(-0.0),
    "ones": _constant(1),
    "minus": _constant(-0.37),
    "largest": _constant(3.4028234663852886e38),
    "most negative": _constant(-3.4028234663852886e38),
    "both ends": _both_ends,
    "smallest": _constant(-(2.0**-149)),
}


def rows_of(case: str, source: str, shape: tuple[int, int], seed: int = 0) -> Rows:
    """The rows of a case in a source type; what overflows there is clipped to its largest value."""
    values = CASES[case](np.random.default_rng([seed, *case.encode()]), shape)
    dtype = SOURCES[source]
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return np.ascontiguousarray(np.clip(values, -largest, largest).astype(dtype))


def demo_matrices() -> dict[str, Rows]:
    """The demo model's matrices, as they were trained."""
    path = Path(__file__).parents[3] / "gguf_tools" / "demo_model" / "model.safetensors"
    file = open_safetensors(path)
    found = {}
    for name, tensor in file.tensors.items():
        if tensor.dtype == "BF16" and len(tensor.shape) == 2:
            data = file.source.read(tensor.offset, tensor.nbytes)
            found[name] = np.frombuffer(data, SOURCES["BF16"]).reshape(tensor.shape)
    file.source.close()
    return found


def weights_of(length: int, seed: int = 0) -> Weights:
    """Importance weights over many magnitudes, of columns and groups of columns, some of them 0."""
    rng = np.random.default_rng([seed, length])
    groups = np.repeat(np.exp(rng.normal(0, 3, -(-length // 32))), 32)[:length]
    weights = groups * np.exp(rng.normal(0, 1, length)) * (rng.random(length) > 0.1)
    weights[: length // 8] = 0 if seed % 2 else 1
    return np.asarray(weights, np.float32)
