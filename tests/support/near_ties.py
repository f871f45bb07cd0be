"""Greedy texts of a model, and whether two differ only where two candidates were nearly tied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from support.generation import load, random_tokens, take

if TYPE_CHECKING:
    from numpy.typing import NDArray

# How far half of a text's logits may be off, in standard deviations of a row's. One row and several
# round differently, and where an activation is quantized a last bit can become a step, which random
# weights carry on for a while: single rows were seen to move by 0.77, most by 0.02 or less. A state
# that is off by one token moves half of the rows by 0.08 (demo), 0.12 to 0.5 (random weights) and
# more; only the synthetic models, whose layers add little, do not show it here. Over a Q4_K_M
# base half of a long text's rows moved by up to 0.105, too close to that: only exact rows tell.
ROUNDING = 0.05
AMPLIFIED = float("inf")  # for such a base

# The lead of the plain choice where texts may part, in the same unit: seen up to 0.093 with random
# weights in Q4_K_M, 0.008 elsewhere.
NEAR_TIE = 0.15


@dataclass(frozen=True)
class Text:
    """Greedy tokens after a prompt, and the logits that chose them [n, vocabulary] or None."""

    tokens: list[int]
    logits: NDArray[np.float32] | None


@dataclass(frozen=True)
class Work:
    """Lengths of the prompts, and how many tokens follow each."""

    prompts: tuple[int, ...]
    tokens: int
    n_ctx: int


def prompt_of(length: int, seed: int) -> list[int]:
    return random_tokens(length, [seed, length])


def generate(
    path: Path, work: Work, *, depth: int | Literal["auto"], logits: bool, **options: Any
) -> tuple[list[Text], tuple[float, ...]]:
    """The text after each prompt, and the shares of drafts accepted."""
    texts = []
    with load(path, depth=depth, n_ctx=work.n_ctx, logits_all=logits, **options) as llm:
        for i, length in enumerate(work.prompts):
            llm.reset()
            tokens = take(llm, work.tokens, prompt_of(length, i))
            scores = llm.scores[length - 1 : length + work.tokens - 1].copy() if logits else None
            texts.append(Text(tokens, scores))
        return texts, llm.mtp_stats.acceptance


def compare(
    wanted: Sequence[Text], texts: Sequence[Text], rounding: float = ROUNDING
) -> tuple[float, list[float]]:
    """The farthest that a logit moved, and the lead of the wanted choice where a text parts.

    Both in standard deviations of a row's logits; half of a text's rows may move by `rounding`, and
    texts may part at a lead below NEAR_TIE.
    """
    farthest, leads = 0.0, []
    for want, got in zip(wanted, texts, strict=True):
        same = next(
            (i for i, (a, b) in enumerate(zip(want.tokens, got.tokens, strict=True)) if a != b),
            None,
        )
        assert want.logits is not None
        assert got.logits is not None
        # Up to there both read the same tokens; at the tie itself, too.
        until = len(want.tokens) if same is None else same + 1
        deviation = want.logits[:until].std(1)
        moved = np.abs(want.logits[:until] - got.logits[:until]).max(1) / deviation
        assert np.median(moved) < rounding
        farthest = max(farthest, float(moved.max()))
        if same is not None:
            row = want.logits[same]
            lead = row[want.tokens[same]] - row[got.tokens[same]]
            leads.append(float(lead / deviation[same]))
    assert all(0 <= lead < NEAR_TIE for lead in leads)
    return farthest, leads
