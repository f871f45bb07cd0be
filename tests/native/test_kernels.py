"""Which kernels of the loaded ggml-cpu give a row different bits in batches of different sizes.

native/libraries/exact.py lists them in three constants, which are compared with the kernels
themselves.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME, TensorType
from mtp_gguf.native.libraries.exact import (
    MAX_ROWS,
    SGEMM_TYPES,
    SPLIT_CACHE_TYPES,
    has_product_kernels,
)
from mtp_gguf.native.runtime import runtime
from support.kernels.ggml_calls import F16, F32, Ggml

pytestmark = [
    pytest.mark.stock,
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="exact refuses other machines"
    ),
]

# Whole numbers, and what no weights have: activations alone.
NOT_WEIGHTS = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}
WEIGHTS = sorted(set(BY_NAME) - NOT_WEIGHTS)
LENGTH, ROWS = 768, 48  # divisible by what every kernel asks for
SIZES = (1, 2, 3, 6, MAX_ROWS, MAX_ROWS + 1, 17)


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    """The ggml that llama_cpp has loaded."""
    return Ggml(runtime.folder)


def attention(
    ggml: Ggml, kind: TensorType, keys: np.ndarray, values: np.ndarray, q: np.ndarray
) -> np.ndarray:
    """Flash attention of q [heads, n, dim], row i over all but the last n - 1 - i cached cells.

    keys, values: bytes of [heads, cells, dim]. Gives [n, heads, dim].
    """
    heads, n, dim = q.shape
    cells = keys.nbytes // heads // kind.row_bytes(dim)
    mask = np.zeros((n, cells), np.float16)
    for row in range(n):
        mask[row, cells - (n - 1 - row) :] = -np.inf
    cache = (kind.id, (dim, cells, heads))
    inputs = [(F32, (dim, n, heads), q), (*cache, keys), (*cache, values), (F16, (cells, n), mask)]

    def build(context: object, tensors: list[object]) -> object:
        return ggml.base.ggml_flash_attn_ext(context, *tensors, dim**-0.5, 0.0, 0.0)

    return ggml.run(2, build, inputs).reshape(n, heads, dim)


def weights(kind: TensorType, rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Rows of any type, finite: bytes below 64 keep every scale's exponent small."""
    rng = np.random.default_rng(seed)
    if kind.is_quantized:
        return rng.integers(0, 64, rows * kind.row_bytes(length), np.uint8)
    values = rng.standard_normal((rows, length), np.float32)
    if kind.name == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16 if kind.name == "F16" else np.float32)


def alike(run: Callable[[int], np.ndarray], sizes: tuple[int, ...]) -> bool:
    """Whether the first rows of batches of these sizes are the same bits."""
    largest = run(max(sizes))
    assert np.isfinite(largest).all()
    assert np.abs(largest).max() > 0
    return all(np.array_equal(run(n), largest[:n]) for n in sizes)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", WEIGHTS)
def test_products(ggml: Ggml, name: str, threads: int) -> None:
    kind = BY_NAME[name]
    w = weights(kind, ROWS, LENGTH)
    x = np.random.default_rng(1).standard_normal((max(SIZES), LENGTH), np.float32)

    def run(n: int) -> np.ndarray:
        return ggml.product(kind.id, w, ROWS, x[:n].copy(), threads)

    least = 2 if name in SGEMM_TYPES else 1
    assert alike(run, tuple(n for n in SIZES if least <= n <= MAX_ROWS))


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0", "Q4_K", "IQ4_NL"])
def test_products_of_experts(ggml: Ggml, name: str) -> None:
    """Few rows of an expert take no kernel of their own, so that a router alone is of sgemm's."""
    kind, experts = BY_NAME[name], 4
    w = weights(kind, experts * ROWS, LENGTH).reshape(-1).view(np.uint8)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((MAX_ROWS, LENGTH), np.float32)
    chosen = np.argsort(rng.random((MAX_ROWS, experts)), 1)[:, :2].astype(np.int32)

    def run(n: int) -> np.ndarray:
        return ggml.expert_product(kind.id, w, ROWS, x[:n].copy(), chosen[:n].copy(), 2)

    assert alike(run, tuple(range(1, MAX_ROWS + 1)))


@pytest.mark.parametrize("cells", [256, 512, 1024])
@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0", "Q4_0"])
def test_flash_attention(ggml: Ggml, name: str, cells: int) -> None:
    kind, heads, dim = BY_NAME[name], 3, 64
    keys, values = (weights(kind, heads * cells, dim, seed) for seed in (3, 4))
    q = np.random.default_rng(5).standard_normal((heads, MAX_ROWS, dim), np.float32)

    def run(n: int) -> np.ndarray:
        # The last n of the rows, whose masks are those of a batch of MAX_ROWS.
        rows = np.ascontiguousarray(q[:, MAX_ROWS - n :])
        return attention(ggml, kind, keys, values, rows)[::-1]

    least = 2 if name in SPLIT_CACHE_TYPES else 1
    assert alike(run, tuple(range(least, MAX_ROWS + 1)))


@pytest.mark.skipif(has_product_kernels(), reason="our kernels need no list")
def test_the_list_is_no_longer_than_it_must_be(ggml: Ggml) -> None:
    """What exact avoids does happen: otherwise these tests could not fail."""
    x = np.random.default_rng(1).standard_normal((MAX_ROWS + 1, LENGTH), np.float32)
    for name, sizes in (("F32", (1, 2)), ("F16", (1, 2)), ("Q4_K", (MAX_ROWS, MAX_ROWS + 1))):
        kind = BY_NAME[name]
        w = weights(kind, ROWS, LENGTH)
        products = {n: ggml.product(kind.id, w, ROWS, x[:n].copy(), 1) for n in sizes}
        assert not alike(products.__getitem__, sizes), name
    kind = BY_NAME["F16"]
    keys, values = (weights(kind, 2 * 1024, 64, seed) for seed in (3, 4))
    q = np.random.default_rng(5).standard_normal((2, 2, 64), np.float32)
    assert not np.array_equal(
        attention(ggml, kind, keys, values, q[:, 1:].copy())[-1],
        attention(ggml, kind, keys, values, q)[-1],
    )
