"""The kernels give the bytes of ggml_quantize_chunk."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME, F16, TensorType
from mtp_gguf.quantize import quantizer
from support.quantize.cases import (
    CASES,
    KINDS,
    SOURCES,
    demo_matrices,
    has_kernel,
    reference,
    rows_of,
    weights_of,
)
from support.quantize.compare import difference

VALUES = 1_000_000
SLOW_VALUES = 100_000_000
ALL_KINDS = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


@ALL_KINDS
@WEIGHTED
def test_a_kernel_is_used(kind: TensorType, weighted: bool) -> None:
    """Without this the comparisons below could compare ggml with itself."""
    best = os.environ.get("MTP_QUANTIZE_TARGET") or quantizer.targets()[0]
    assert best != "ggml"
    found = quantizer.kernel(kind, weighted).split(":")[0]
    assert found == (best if has_kernel(kind, weighted) else "ggml")


@ALL_KINDS
@WEIGHTED
@pytest.mark.parametrize("source", SOURCES)
def test_every_case(kind: TensorType, weighted: bool, source: str) -> None:
    length = kind.block_length * 4
    weights = weights_of(length) if weighted else None
    rows = VALUES // len(CASES) // len(SOURCES) // length
    for case in CASES:
        assert difference(kind, rows_of(case, source, (rows, length)), weights) is None, case


@pytest.mark.sample(5)
@ALL_KINDS
@WEIGHTED
@pytest.mark.parametrize("height", [64, pytest.param(None, marks=pytest.mark.slow)])
def test_real_weights(kind: TensorType, weighted: bool, height: int | None) -> None:
    """The demo model's matrices: the first rows of each, or all."""
    matrices = demo_matrices()
    assert len(matrices) > 30
    for name, rows in matrices.items():
        weights = weights_of(rows.shape[1]) if weighted else None
        assert difference(kind, rows[:height], weights) is None, name


@pytest.mark.sample(6)
@ALL_KINDS
@WEIGHTED
@pytest.mark.parametrize(
    "lengths", [range(1, 21), pytest.param(range(21, 161), marks=pytest.mark.slow)], ids=str
)
def test_row_lengths(kind: TensorType, weighted: bool, lengths: range) -> None:
    """Every number of blocks in a row, and numbers of rows that leave lanes empty."""
    for blocks in lengths:
        length = blocks * kind.block_length
        weights = weights_of(length, seed=blocks) if weighted else None
        for count in (1, 2, 17):
            rows = rows_of("mixture", "BF16", (count, length), seed=blocks)
            assert difference(kind, rows, weights) is None, (blocks, count)


@ALL_KINDS
@WEIGHTED
def test_odd_weights(kind: TensorType, weighted: bool) -> None:
    """Weights no imatrix should hold: all zero, one column, negative, huge, infinite, NaN."""
    length = kind.block_length * 2
    rows = rows_of("pieces", "F32", (64, length))
    one = np.zeros(length, np.float32)
    one[5] = 1
    for weights in (
        np.zeros(length, np.float32),
        one,
        -weights_of(length),
        np.minimum(weights_of(length), 1) * np.float32(3e38),
        np.full(length, 1e-42, np.float32),
        np.where(one == 0, weights_of(length), np.float32(np.inf)),
        np.where(one == 0, weights_of(length), np.float32(np.nan)),
    ):
        assert difference(kind, rows, weights if weighted else None) is None


@ALL_KINDS
def test_threads(kind: TensorType) -> None:
    """Calls from several threads do not disturb one another."""
    rows = [rows_of("mixture", "BF16", (64, 1024), seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda r: quantizer.quantize_rows(kind, r)[0], rows))
    for got, source in zip(results, rows, strict=True):
        assert np.array_equal(got, reference(kind, source))


def test_f16() -> None:
    """Every 16-bit pattern, many 32-bit ones, and rows that end within a vector."""
    assert quantizer.kernel(F16, False) == quantizer.kernel(BY_NAME["Q8_0"], False)
    patterns = np.arange(2**16, dtype=np.uint16).reshape(1, -1)
    assert difference(F16, patterns.view(SOURCES["BF16"]), None) is None
    assert difference(F16, patterns.view(SOURCES["F16"]), None) is None
    rng = np.random.default_rng(0)
    for length in (1, 2, 31, 33, 1_000_003):
        wide = rng.integers(0, 2**32, (1, length), np.uint32).view(np.float32)
        assert difference(F16, wide, None) is None
        for largest in (70_000, 2.0**-13):
            wide = rng.uniform(-largest, largest, (1, length)).astype(np.float32)
            assert difference(F16, wide, None) is None


@pytest.mark.parametrize("name", ["Q5_0", "MXFP4", "IQ3_S", "BF16"])
@pytest.mark.parametrize("source", SOURCES)
def test_types_without_a_kernel(name: str, source: str) -> None:
    kind = BY_NAME[name]
    assert quantizer.kernel(kind, False) == "ggml"
    assert difference(kind, rows_of("mixture", source, (40, 512)), None) is None


@pytest.mark.slow
def test_f16_of_every_float() -> None:
    """All 2^32 of them, NaN with every payload included."""
    step = 1 << 24
    for start in range(0, 1 << 32, step):
        patterns = np.arange(start, start + step, dtype=np.uint64).astype(np.uint32)
        rows = patterns.view(np.float32).reshape(1 << 12, -1)
        assert difference(F16, rows, None) is None, hex(start)


@pytest.mark.slow
@ALL_KINDS
@WEIGHTED
@pytest.mark.parametrize("source", SOURCES)
def test_long(kind: TensorType, weighted: bool, source: str) -> None:
    """10^8 values for each kernel, most of them like weights."""
    length, count, done, seed = 2048, 512, 0, 1
    while done < SLOW_VALUES:
        weights = weights_of(length, seed) if weighted else None
        for case in (
            "normal",
            "mixture",
            "mixture",
            "pieces",
            "groups",
            "every size",
            "nearly equal",
        ):
            rows = rows_of(case, source, (count, length), seed)
            assert difference(kind, rows, weights) is None, (case, source, seed)
            done += rows.size
        seed += 1
