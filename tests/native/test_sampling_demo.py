"""Sampling with drafts on the demo model: the next three tokens follow the trunk's distribution.

What it says is computed, not drawn: the probabilities that llama.cpp's own samplers make of the
trunk's logits, multiplied along every continuation that is likely enough to be counted. In exact
mode these logits are the same bits as those of verification, so that nothing but the drawing can
differ. Nothing here depends on what the model has learnt, but that its head is sometimes right.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mtp_gguf.native import MTPLlama
from mtp_gguf.native.runtime import llama_cpp
from support.chi_square import LEAST_EXPECTED, far_off, one_sample
from support.generation import load
from support.llama_samplers import Chain
from support.models import Models

if TYPE_CHECKING:
    from collections.abc import Iterator

# Beside the world that the demo model was trained on: its head is right less than every second
# time there, so that rejections and their residual decide what is drawn.
PROMPT = "The "
NEXT = 3
CHAINS = {
    "0.7 top-p": Chain(0.7, top_p=0.9),
    "1.0 top-p": Chain(1.0, top_p=0.9),
    "0.7 min-p": Chain(0.7, min_p=0.05),
    "1.0 min-p": Chain(1.0, min_p=0.05),
}


@pytest.fixture(scope="module")
def llm(models: Models) -> Iterator[MTPLlama]:
    path = models.gguf("demo", "Q4_K_M", "F16")
    with load(path, depth=NEXT, exact=True) as llm:
        yield llm


def continuations(
    llm: MTPLlama, chain: Chain, prompt: list[int], least: float
) -> dict[tuple[int, ...], float]:
    """The probabilities of the next three tokens, where they are at least `least`."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NEXT):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, chance in found.items():
            llm.session.remove(0)
            llm.session.decode(prompt[:-1])
            row = 0
            for token in (prompt[-1], *tokens):
                llm.session.begin(token, 0)
                row = llm.session.row(0)
                llm.session.end(0)
            pointer = llama_cpp.llama_get_logits_ith(llm.ctx, row)
            logits = np.ctypeslib.as_array(pointer, (llm.n_vocab(),))
            for token, p in chain.distribution(logits).items():
                if chance * p >= least:
                    text = (*tokens, token)
                    longer[text] = chance * p
        found = longer
    return found


def drawn(llm: MTPLlama, prompt: list[int], draws: int) -> Counter[tuple[int, ...]]:
    """How often each three tokens came; every one of them may have been a draft."""
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws):
        llm.session.remove(0)
        llm.session.decode(prompt[:-1])
        text = [prompt[-1]]
        while len(text) <= NEXT:
            text += llm.session.step_sampled(text[-1])
        seen[tuple(text[1 : NEXT + 1])] += 1
    return seen


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("0.7 min-p", 800),
        ("1.0 top-p", 800),
        *(pytest.param(name, 20_000, marks=pytest.mark.slow) for name in CHAINS),
    ],
)
def test_three_tokens_follow_the_trunks_distribution(llm: MTPLlama, name: str, draws: int) -> None:
    chain, prompt = CHAINS[name], llm.tokenize(PROMPT.encode(), add_bos=False)
    want = continuations(llm, chain, prompt, LEAST_EXPECTED / draws)
    llm.session.set_sampling(**chain.options(), seed=17)
    llm.session.reset_stats()
    seen = drawn(llm, prompt, draws)
    # Drafts must have been both taken and rejected for this to say anything.
    assert 0.05 < llm.mtp_stats.acceptance[0] < 0.7
    statistic, freedom = one_sample(seen, want)
    assert freedom > 10
    assert not far_off(statistic, freedom), (statistic, freedom)
