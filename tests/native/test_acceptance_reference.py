"""The measured acceptance is that of the checkpoint's weights, computed in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.heads.acceptance import POSITIONS
from mtp_gguf.native.checks.acceptance import measure_acceptance, places_of
from mtp_gguf.native.llama.mtp_llama import MTPLlama
from support.models import DEMO, Models
from support.reference_model import ReferenceModel

NEAR_TIES = 2  # chains that may be decided otherwise in F32


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def counted(path: Path, model: ReferenceModel) -> tuple[list[int], float]:
    """(accepted greedy drafts by position, expected rate of first drafts at temperature 1)."""
    with MTPLlama(str(path), n_ctx=64) as llm:
        passages = list(places_of(llm))
    chain, accepted = 0, [0] * POSITIONS
    overlaps = []
    for prompt, places in passages:
        tokens = prompt + places
        logits, hidden = model.trunk(tokens)
        for end in range(len(prompt) + 1, len(tokens) + 1):
            sampled = chain % 2 == 1
            chain += 1
            drafts, drafted_from = model.draft(tokens[:end], hidden, 1 if sampled else POSITIONS)
            if sampled:
                both = softmax(logits[end - 1]), softmax(drafted_from[0])
                overlaps.append(float(np.minimum(*both).sum()))
                continue
            if drafts[0] != logits[end - 1].argmax():
                continue
            verified = model.trunk(tokens[:end] + drafts)[0][end - 1 :].argmax(axis=1)
            right = [draft == token for draft, token in zip(drafts, verified, strict=False)]
            for position in range(POSITIONS):
                accepted[position] += all(right[: position + 1])
    return accepted, float(np.mean(overlaps))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [DEMO, "dense-tied"], ids=["trained", "random"])
def test_equals_the_reference(checkpoint: Path | str, models: Models) -> None:
    path = models.gguf(checkpoint)
    found = measure_acceptance(path, seconds=600)
    greedy, sampled = counted(path, ReferenceModel(models.checkpoint(checkpoint)))
    print(f"greedy {found.greedy.accepted} here, {greedy} in the reference")
    print(f"temperature 1: {found.sampled.rates[0]:.3f} here, {sampled:.3f} in the reference")
    for mine, theirs in zip(found.greedy.accepted, greedy, strict=True):
        assert abs(mine - theirs) <= NEAR_TIES
    low, high = found.sampled.interval(0)
    slack = (high - low) / 2  # other kernels round otherwise, and draw other drafts
    assert low - slack < sampled < high + slack
