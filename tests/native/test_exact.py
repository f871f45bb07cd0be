"""exact=True: the same bits at every depth, or a refusal that names what prevents them."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mtp_gguf.native import MTPLlama, NativeError
from mtp_gguf.native.exact import variant_tensors

# Flash attention splits the cache over threads from 512 cached positions on; the contexts of these
# tests pass that.
PROMPT = [int(t) for t in np.random.PCG64(4).random_raw(530) % np.uint64(700)]
TOKENS = 40


def run(path: Path, depth: int, **options: Any) -> tuple[list[int], np.ndarray, float]:
    """Greedy tokens, the logits after every position, tokens per cycle."""
    given = {"n_ctx": 768, "n_threads": 1, "n_threads_batch": 1, "logits_all": True, **options}
    with closing(MTPLlama(str(path), depth=depth, **given)) as llm:
        stream = llm.generate(PROMPT, temp=0.0)
        tokens = list(itertools.islice(stream, TOKENS))
        stream.close()
        return tokens, llm.scores[: llm.n_tokens].copy(), llm.mtp_stats.tokens_per_cycle


@pytest.mark.parametrize("rollback", ["snapshot", "checkpoint", "two-phase", "host"])
@pytest.mark.parametrize("shape", ["tiny", "tiny-3v"])
def test_every_bit_of_the_logits_is_the_plain_one(dial, shape: str, rollback: str) -> None:
    path = dial(shape)
    tokens, logits, _ = run(path, 0, exact=True, rollback=rollback)
    for depth in (1, 3, 8):
        got, got_logits, per_cycle = run(path, depth, exact=True, rollback=rollback)
        assert got == tokens, depth
        assert np.array_equal(got_logits, logits), depth
        assert per_cycle > 1.5


def test_random_weights_full_of_near_ties(models) -> None:
    path = models.gguf("dense-tied", "Q4_K_M", "F16")
    tokens, logits, _ = run(path, 0, exact=True)
    for depth in (2, 5):
        got, got_logits, _ = run(path, depth, exact=True)
        assert got == tokens
        assert np.array_equal(got_logits, logits)


def test_these_tests_can_fail(dial) -> None:
    """Without exact, several tokens and one differ in their last bits."""
    logits = run(dial("tiny"), 0)[1]
    assert not np.array_equal(run(dial("tiny"), 3)[1], logits)


@pytest.mark.parametrize("quant", ["Q8_0", "F16", "BF16"])
def test_types_that_cannot_are_named_and_two_phase_can(dial, quant: str) -> None:
    path = dial("tiny", quant=quant)
    with pytest.raises(
        NativeError, match=rf"exact: .*found output.weight {quant}, blk.* more, .*two-phase"
    ):
        run(path, 3, exact=True)
    tokens, logits, _ = run(path, 0, exact=True, rollback="two-phase")
    got, got_logits, _ = run(path, 4, exact=True, rollback="two-phase")
    assert got == tokens
    assert np.array_equal(got_logits, logits)


def test_the_router_of_a_moe_is_named(dial) -> None:
    with pytest.raises(NativeError, match=r"exact: .*ffn_gate_inp.weight F32"):
        run(dial("tiny-moe"), 1, exact=True)


def test_k_quants_pass(dial) -> None:
    assert variant_tensors(dial("tiny")) == []


def test_other_options_are_refused_by_name(dial) -> None:
    for options, text in (
        ({"type_k": llama_cpp.GGML_TYPE_F16}, "exact: expected type_k=8, found 1"),
        ({"flash_attn": False}, "exact: expected flash_attn=True, found False"),
        ({"n_gpu_layers": 1}, "exact: expected n_gpu_layers=0"),
    ):
        with pytest.raises(NativeError, match=text):
            run(dial("tiny"), 1, exact=True, **options)
