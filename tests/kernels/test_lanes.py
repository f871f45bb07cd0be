"""Our kernels in ggml-cpu: what a token yields depends on nothing that is computed beside it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from kernels.conftest import Arrays, Sweep
from kernels.sweep import SUPER_BLOCKS, columns, delta_rows

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels for x86-64 alone"),
]

MAX_NMSE = 5e-4  # max_nmse_err of MUL_MAT in ggml's tests/test-backend-ops.cpp
SMALL = 15  # columns up to which all types keep their bits


def cases(found: Arrays, kind: str) -> Iterator[tuple[str, int, str]]:
    """Name, number of columns and key of every result of a kind."""
    for key in found:
        first, *rest = key.split("/")
        if first == kind and kind != "weights":
            name, _, batch = rest
            yield name, int(batch), key


def differing(found: Arrays, kind: str) -> list[str]:
    """The results whose columns are not, bit for bit, those that were computed alone."""
    wrong = []
    for name, batch, key in cases(found, kind):
        alone = found[f"{kind}/{name}/1/1"][: len(found[key])]
        exact = batch <= SMALL or kind == "recurrence" or name.split()[0] in SUPER_BLOCKS
        if exact and found[key].tobytes() != alone.tobytes():
            wrong.append(key)
    return wrong


@pytest.fixture(params=["", "avx2"], ids=["best", "avx2"])
def found(request: pytest.FixtureRequest, sweep: Sweep, has_kernels: bool) -> Arrays:
    """The sweep with the best kernels of this CPU, and with AVX2's."""
    if not has_kernels:
        pytest.skip("this CPU has no AVX2")
    results = sweep(request.param)
    assert results["lanes"]
    return results


@pytest.mark.parametrize("kind", ["product", "experts", "attention", "recurrence"])
def test_a_column_is_the_same_in_every_batch_and_for_any_threads(found: Arrays, kind: str) -> None:
    assert len(list(cases(found, kind))) > 20
    assert differing(found, kind) == []


def test_rows_that_lie_apart_are_those_of_the_whole_matrix(found: Arrays) -> None:
    keys = [key for _, _, key in cases(found, "apart")]
    assert len(keys) > 40
    for key in keys:
        whole = found[key.replace("apart/", "product/").rsplit("/", 2)[0] + "/1/1"]
        n, half = found[key].shape
        assert found[key].tobytes() == whole[:n, : 2 * half : 2].tobytes(), key


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q8_0", "F32", "F16", "BF16"])
def test_errors_are_within_the_budget_of_ggml(found: Arrays, name: str) -> None:
    for key in [key for key in found if key.startswith(f"weights/{name} ")]:
        shape = key.split()[1]
        n, rows = map(int, shape.split("x"))
        weights = dequantize(found[key], GGMLQuantizationType[name]).reshape(rows, n)
        x, w = columns(n).astype(np.float64), weights.astype(np.float64)
        off = found[f"product/{name} {shape}/1/1"] - x @ w.T
        # of products with random columns of this size: one row's own may be near zero
        power = (x**2).sum(axis=1) * (w**2).sum() / n
        assert ((off**2).sum(axis=1) <= MAX_NMSE * power).all(), key


def test_quants_of_256_have_the_same_bits_on_every_instruction_set(sweep: Sweep) -> None:
    best, avx2 = sweep(""), sweep("avx2")
    if best["lanes"] == avx2["lanes"]:
        pytest.skip("this CPU has one set of kernels")
    keys = [key for key in best if key.startswith(("product/", "experts/"))]
    keys = [key for key in keys if key.split("/")[1].startswith(SUPER_BLOCKS)]
    assert len(keys) > 100
    assert [key for key in keys if best[key].tobytes() != avx2[key].tobytes()] == []


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
        assert (found[key][::2].reshape(-1) == np.arange(n * 1001)).all(), key
        assert (found[key][1::2] == 1).all(), key


def test_activations_are_quantized_to_the_bytes_of_the_reference(sweep: Sweep) -> None:
    found = sweep("")
    ours, reference = found["q8_K"], found["q8_K reference"]
    assert (ours[0] == 0).all()  # of a zero block the reference leaves the sums as they were
    assert ours.tobytes() == reference.tobytes()


def test_the_backend_names_its_kernels(sweep: Sweep) -> None:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    expected = "AVX512_VNNI" if "avx512_vnni" in flags else "AVX2" if "avx2" in flags else ""
    assert sweep("")["lanes"] == expected
