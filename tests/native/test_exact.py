"""exact=True: the same bits at every depth, or an error that names what prevents it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.native import NativeError
from mtp_gguf.native.libraries.exact import (
    Batches,
    exact_batches,
    has_product_kernels,
    sgemm_tensors,
)
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Session
from support.generation import load, random_tokens, take
from support.models import Dial, Models
from support.native_trunk import Trunk

# Flash attention splits the cache over threads from 512 cached positions on; the contexts of these
# tests pass that.
PROMPT = random_tokens(530, 4)
TOKENS = 40


def run(
    path: Path, depth: int, n: int = TOKENS, **options: Any
) -> tuple[list[int], np.ndarray, float]:
    """Greedy tokens, the logits after every position, tokens per cycle."""
    with load(path, depth=depth, **{"n_ctx": 768, "logits_all": True, **options}) as llm:
        tokens = take(llm, n, PROMPT)
        return tokens, llm.scores[: llm.n_tokens].copy(), llm.mtp_stats.tokens_per_cycle


def assert_every_bit(
    path: Path, depths: tuple[int, ...], *, least: float = 1.3, **options: Any
) -> None:
    """Check that tokens and logits of all positions at these depths equal those of depth 0.

    least: tokens per cycle.
    """
    tokens, logits, _ = run(path, 0, exact=True, **options)
    for depth in depths:
        got, got_logits, per_cycle = run(path, depth, exact=True, **options)
        assert got == tokens, depth
        assert np.array_equal(got_logits, logits), depth
        assert per_cycle > least


@pytest.mark.sample(5)
@pytest.mark.parametrize("rollback", ["snapshot", "checkpoint", "two-phase", "host"])
@pytest.mark.parametrize("shape", ["tiny", "tiny-3v", "tiny-moe"])
def test_logits_are_bit_identical_to_plain_decoding(dial: Dial, shape: str, rollback: str) -> None:
    assert_every_bit(dial(shape), (1, 8), rollback=rollback)


@pytest.mark.sample(4)
@pytest.mark.stock
@pytest.mark.parametrize("rollback", ["snapshot", "checkpoint"])
@pytest.mark.parametrize("quant", ["Q8_0", "F16", "BF16", "F32", "IQ4_NL", "Q4_0", "Q3_K_M"])
def test_bases_whose_products_change_at_two_rows(dial: Dial, quant: str, rollback: str) -> None:
    assert_every_bit(dial("tiny", quant=quant), (1, 3), rollback=rollback)


@pytest.mark.parametrize("quant", ["Q4_K_M", "F16"])
def test_threads_that_share_a_cache(dial: Dial, quant: str) -> None:
    """Only two threads and few tokens, because threads wait for each other on a busy machine."""
    cache = {"type_k": llama_cpp.GGML_TYPE_F16, "type_v": llama_cpp.GGML_TYPE_F16}
    threads = {"n_threads": 2, "n_threads_batch": 2}
    assert_every_bit(dial("tiny", quant=quant), (2,), n=8, **cache, **threads)


@pytest.mark.stock
def test_random_weights_full_of_near_ties(models: Models) -> None:
    assert_every_bit(models.gguf("dense-tied", "Q4_K_M", "F16"), (2, 5), least=0)


@pytest.mark.parametrize("quant", ["Q4_K_M", "F16"])
def test_the_context_can_be_filled_to_its_end(dial: Dial, quant: str) -> None:
    """Padding needs a position, but the last token is never decoded, so none is missing."""
    path, texts = dial("tiny", quant=quant), []
    for depth in (0, 1, 6):
        with load(path, depth=depth, exact=True) as llm:
            texts.append(take(llm, 56, PROMPT[:200]))
    assert texts[0] == texts[1] == texts[2]


def test_these_tests_can_fail(dial: Dial) -> None:
    """Without exact, batches and single tokens differ in their last bits, except in our kernels."""
    logits = run(dial("tiny"), 0)[1]
    assert np.array_equal(run(dial("tiny"), 3)[1], logits) == has_product_kernels()


@pytest.mark.stock
@pytest.mark.skipif(has_product_kernels(), reason="tests/kernels is for these libraries")
def test_options_are_chosen_by_the_trunks_tensor_types(dial: Dial) -> None:
    for name, quant, batches, cache in (
        ("tiny", "Q4_K_M", Batches(1, 7, repacked=False), "Q8_0"),
        ("tiny", "Q8_0", Batches(2, 7, repacked=False), "F16"),
        ("tiny-moe", "Q4_K_M", Batches(2, 7, repacked=False), "F16"),
    ):
        options: dict[str, Any] = {}
        assert exact_batches(dial(name, quant=quant), options, two_phase=False) == batches
        assert options == {
            "flash_attn": True,
            "op_offload": False,
            "type_k": BY_NAME[cache].id,
            "type_v": BY_NAME[cache].id,
        }
    path = dial("tiny")
    for options, rows in (
        ({"type_k": 1, "type_v": 1}, 2),  # F16
        ({"type_k": 8, "type_v": 1}, 1),
        ({"lora_path": "adapter.gguf"}, 2),
    ):
        assert exact_batches(path, options, two_phase=False).min_rows == rows
    options = {}
    assert exact_batches(path, options, two_phase=True) == Batches(max_rows=1)
    assert options == {}


def test_the_router_of_a_moe_is_an_f32_matrix(dial: Dial) -> None:
    assert sgemm_tensors(dial("tiny")) == []
    assert {f"blk.{n}.ffn_gate_inp.weight" for n in (0, 1)} <= set(sgemm_tensors(dial("tiny-moe")))


def test_incompatible_options_are_named(dial: Dial) -> None:
    for options, text in (
        ({"flash_attn": False}, "exact: expected flash_attn=True, found False"),
        ({"n_gpu_layers": 1}, "exact: expected n_gpu_layers=0"),
    ):
        with pytest.raises(NativeError, match=text):
            run(dial("tiny"), 1, exact=True, **options)


def test_the_last_row_of_a_padded_batch_is_that_of_its_last_token(models: Models) -> None:
    """Not that of the padding, which llama.cpp takes for the last one."""
    with (
        closing(Trunk(models.gguf("demo", "Q4_K_M", "F16"), 4)) as trunk,
        Session(trunk.context, None, max_depth=0, min_rows=2) as session,
    ):
        session.decode(list(range(60, 80)))
        token = session.argmax()
        for _ in range(12):
            session.begin(token, 0)
            token = session.argmax(session.row(0))
            assert session.argmax(-1) == token
            session.end(0)


def test_padding_needs_a_snapshot(dial: Dial) -> None:
    with closing(Trunk(dial("tiny"), 0)) as trunk:
        with pytest.raises(NativeError, match="min_rows: expected 0 to 2, found 3"):
            Session(trunk.context, None, max_depth=0, min_rows=3)
        with pytest.raises(NativeError, match=r"min_rows=2: .* n_rs_seq of 1 or more, found 0"):
            Session(trunk.context, None, max_depth=0, min_rows=2)
