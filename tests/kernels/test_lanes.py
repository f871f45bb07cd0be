"""Our small-batch kernels in ggml-cpu: a token's result is independent of the rest of the batch."""

from __future__ import annotations

import platform
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.quantize.ggml import dequantize as decode
from support.kernels.ggml_calls import Floats
from support.kernels.results import (
    GOLDEN,
    MAX_NMSE,
    Arrays,
    Sweep,
    cases,
    check_strided_rows,
    differing,
)
from support.kernels.sweep import (
    CACHES,
    LENGTHS,
    LONG_ROW,
    PAIRS,
    QUERIES,
    SUPER_BLOCKS,
    columns,
    delta_rows,
    queries,
)

pytestmark = [
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "aarch64"), reason="kernels for x86-64 and ARM"
    ),
]

X86 = platform.machine() == "x86_64"
LOWER = "avx2" if X86 else "dotprod"  # the lesser of the two instruction sets
ALL = "" if X86 else "all"  # with NEON, Q8_0 and F16 have kernels where they are asked for


@pytest.fixture(
    params=[ALL, pytest.param(f"{ALL},{LOWER}".strip(","), marks=pytest.mark.thorough)],
    ids=["best", LOWER],
)
def found(request: pytest.FixtureRequest, sweep: Sweep, has_kernels: bool) -> Arrays:
    """The sweep with the best kernels of this CPU, and with the lesser ones."""
    if not has_kernels:
        pytest.skip("this CPU has no AVX2, or no dot products")
    results = sweep(request.param)
    assert results["lanes"]
    return results


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["product", "many", "experts", "attention", "recurrence"])
def test_a_column_is_the_same_in_every_batch_and_for_any_threads(found: Arrays, kind: str) -> None:
    assert len(list(cases(found, kind))) > 20
    assert differing(found, kind) == []


def as_kept(values: Floats, cache: str) -> npt.NDArray[np.float64]:
    """What a cache of this type makes of keys or values."""
    kind = GGMLQuantizationType[cache]
    return dequantize(quantize(values, kind), kind).reshape(values.shape).astype(np.float64)


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "lanes", ["", *(pytest.param(other, marks=pytest.mark.thorough) for other in ("avx2", "0"))]
)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("length", LENGTHS)
def test_attention_is_that_of_float64(sweep: Sweep, lanes: str, cache: str, length: int) -> None:
    q, k, v, masks = queries(length)
    keys, values = (np.repeat(as_kept(x, cache), 2, axis=0) for x in (k, v))
    for name, mask in masks.items():
        scores = np.einsum("hqd,hkd->hqk", q, keys) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) * np.exp(mask)
        total = weights.sum(axis=-1, keepdims=True)
        weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
        exact = np.einsum("hqk,hkd->qhd", weights, values)
        off = sweep(lanes)[f"attention/{cache} {name} {length}/3/{QUERIES}"] - exact
        assert np.square(off).sum() <= MAX_NMSE * np.square(exact).sum(), name


def test_strided_rows_equal_those_of_the_whole_matrix(found: Arrays) -> None:
    check_strided_rows(found)


def test_errors_are_within_the_budget_of_ggml(found: Arrays) -> None:
    for key in [key for key in found if key.startswith("weights/")]:
        name, shape = key.removeprefix("weights/").split()
        n, rows = map(int, shape.split("x"))
        weights = decode(BY_NAME[name], found[key].tobytes()).reshape(rows, n)
        x, w = columns(n).astype(np.float64), weights.astype(np.float64)
        off = found[f"product/{name} {shape}/1/1"] - x @ w.T
        # of products with random columns of this size: one row's own may be near zero
        power = (x**2).sum(axis=1) * (w**2).sum() / n
        error, zero = (off**2).sum(axis=1), power == 0
        assert (error[zero] == 0).all(), key
        # on average: of a matrix of one row, each column is a single product
        assert (error[~zero] / power[~zero]).mean() <= MAX_NMSE, key


@pytest.mark.thorough
def test_quants_have_the_same_bits_on_every_instruction_set(sweep: Sweep) -> None:
    best, lower = sweep(""), sweep(LOWER)
    if best["lanes"] == lower["lanes"]:
        pytest.skip("this CPU has one set of kernels")
    keys = [key for key in best if key.startswith(("product/", "many/", "experts/"))]
    keys = [key for key in keys if key.split("/")[1].split()[0] in best["exact"]]
    assert len(keys) > 100
    assert [key for key in keys if best[key].tobytes() != lower[key].tobytes()] == []


@pytest.mark.parametrize("name", SUPER_BLOCKS)
def test_quants_of_256_have_the_same_bits_on_every_cpu(found: Arrays, name: str) -> None:
    assert sha256(found[f"golden/{name}"].tobytes()).hexdigest() == GOLDEN[name]


@pytest.mark.parametrize("name", PAIRS)
def test_quants_of_64_have_the_same_bits_on_every_x86(found: Arrays, name: str) -> None:
    if not X86:
        pytest.skip("NEON has no kernels for them")
    assert sha256(found[f"golden/{name}"].tobytes()).hexdigest() == GOLDEN[name]


@pytest.mark.parametrize("name", PAIRS)
def test_every_code_and_scale_of_blocks_of_64_is_that_of_ggml(found: Arrays, name: str) -> None:
    blocks = found[f"blocks/{name}"].reshape(-1, BY_NAME[name].block_bytes)
    if name == "NVFP4":
        assert len(np.unique(blocks[:, :4])) == 256
    exact = decode(BY_NAME[name], blocks.tobytes()).reshape(len(blocks), -1).T
    for batch in found[f"units/{name}"]:
        np.testing.assert_array_equal(batch, 127 * exact)


@pytest.mark.thorough
def test_without_the_kernels_ggml_computes_as_before(sweep: Sweep) -> None:
    best, off = sweep(""), sweep("0")
    assert off["lanes"] == ""
    keys = [key for key in off if key.startswith(("product/", "experts/"))]
    for key in keys:
        error = np.square(best[key].astype(np.float64) - off[key]).sum()
        assert error <= MAX_NMSE * np.square(off[key].astype(np.float64)).sum(), key
    # other kernels they are: somewhere the rounding differs
    assert any(best[key].tobytes() != off[key].tobytes() for key in keys)


def test_snapshots_are_the_states_of_single_tokens(sweep: Sweep) -> None:
    found = sweep("")
    keys = [key for key in found if key.startswith("states/")]
    assert len(keys) > 20
    for key in keys:
        alone = found[key.replace("states/", "states alone/")]
        assert found[key].tobytes() == alone.tobytes(), key


@pytest.mark.parametrize("d", [64, 128])
def test_the_recurrence_is_that_of_float64(sweep: Sweep, d: int) -> None:
    found = sweep("")[f"recurrence/{d}/1/1"]
    rows, state = delta_rows(40, 3, d)
    state = state.astype(np.float64)  # [heads, column of v, row of k]
    for t in range(40):
        q, k, v = (rows[name][t].astype(np.float64) for name in "qkv")
        state *= np.exp(rows["g"][t])[:, None, None]
        missing = (v - np.einsum("hji,hi->hj", state, k)) * rows["beta"][t][:, None]
        state += missing[:, :, None] * k[:, None, :]
        exact = np.einsum("hji,hi->hj", state, q) / np.sqrt(d)
        assert np.square(found[t] - exact).sum() <= 1e-7 * np.square(exact).sum()  # ggml's max_nmse


def test_copies_fill_their_rows_and_no_others(sweep: Sweep) -> None:
    found = sweep("")
    for key in [key for key in found if key.startswith("copy/")]:
        n = len(found[key]) // 2
        assert (found[key][::2].reshape(-1) == np.arange(n * LONG_ROW)).all(), key
        assert (found[key][1::2] == 1).all(), key


@pytest.mark.parametrize(
    ("fused", "parts", "count"),
    [
        ("scaled", "times", 2 * 2 * 4 * 2),  # rows of numpy
        ("gated", "gated apart", 4 * 7 * 4),  # the three operations of a gated convolution
        ("weighted sum", "sum of experts", 6 * 3 * 3 * 3),  # products and sums in order
    ],
)
def test_what_is_computed_at_once_has_the_bits_of_its_parts(
    fused: str, parts: str, count: int, sweep: Sweep
) -> None:
    found = sweep("")
    cases = [key for key in found if key.startswith(f"{fused}/")]
    assert len(cases) == count
    for case in cases:
        expected = found[f"{parts}/{case.split('/')[1]}"]
        np.testing.assert_array_equal(found[case], expected, err_msg=case)


def test_the_maximum_is_the_last_of_equal_ones(sweep: Sweep) -> None:
    found = sweep("")
    cases = [key.split("/")[1] for key in found if key.startswith("likeliest/")]
    assert len(cases) == 10
    for n in cases:
        np.testing.assert_array_equal(found[f"likeliest/{n}"], found[f"last largest/{n}"], n)
        rows = found[f"rows/{n}"][:12].astype(np.float64)
        exact = np.exp(rows - 9) / np.exp(rows - 9).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(found[f"softmax/{n}"][:12], exact, rtol=1e-5, err_msg=n)


def test_activations_are_quantized_as_by_the_reference(found: Arrays) -> None:
    assert (found["q8_K"][0] == 0).all()
    assert (found["q8_K"] != 0).mean() > 0.9
    np.testing.assert_array_equal(found["q8_K"], found["q8_K reference"])


def test_the_backend_names_its_kernels(sweep: Sweep) -> None:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    names = {
        "avx512_vnni": "AVX512_VNNI",
        "avx512bw": "AVX512",
        "avx_vnni": "AVX_VNNI",
        "avx2": "AVX2",
        "i8mm": "NEON_I8MM",
        "asimddp": "NEON_DOTPROD",
    }
    assert sweep("")["lanes"] == next((names[flag] for flag in names if flag in flags), "")
