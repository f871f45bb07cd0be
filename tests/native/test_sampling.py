"""Sampling with drafts: the distribution is the trunk's, by equality and by rejection."""

from __future__ import annotations

from collections import Counter
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest
from native_trunk import Trunk

from mtp_gguf.native import MTPLlama, NativeError
from mtp_gguf.native.head import Head
from mtp_gguf.native.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROMPT = [3, 1, 4, 1, 5]

# The trunk gives the next token of the cycle about half of the time, and the head agrees with that
# seven times in ten: drafts are accepted, rejected and replaced, and each would show if it were
# done wrong.
GAIN = 0.15

# (temperature, top_k, top_p, min_p)
CHAINS = {
    "temperature": (1.0, 6, 1.0, 0.0),
    "cooler": (0.7, 12, 1.0, 0.0),
    "top-p": (1.0, 20, 0.6, 0.0),
    "min-p": (0.7, 0, 1.0, 0.14),
}
DEPTH = 2


@contextmanager
def opened(path: Path) -> Iterator[tuple[Session, Trunk]]:
    with closing(Trunk(path, DEPTH)) as trunk:
        n_ctx = llama_cpp.llama_n_ctx_seq(trunk.context)
        with (
            Head(path, n_ctx=n_ctx, n_threads=1) as head,
            Session(trunk.context, head, max_depth=DEPTH) as session,
        ):
            yield session, trunk


def llama_chain(chain: tuple[float, int, float, float], seed: int) -> Any:
    """The same chain of llama.cpp's own samplers."""
    temperature, top_k, top_p, min_p = chain
    smpl = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for sampler in (
        llama_cpp.llama_sampler_init_top_k(top_k),
        llama_cpp.llama_sampler_init_top_p(top_p, 1),
        llama_cpp.llama_sampler_init_min_p(min_p, 1),
        llama_cpp.llama_sampler_init_temp(temperature),
        llama_cpp.llama_sampler_init_dist(seed),
    ):
        llama_cpp.llama_sampler_chain_add(smpl, sampler)
    return smpl


def two_sample_chi_square(a: Counter[Any], b: Counter[Any]) -> tuple[float, int]:
    """The statistic of two samples of equal size and its degrees of freedom; rare cells pooled."""
    common = [cell for cell in a | b if a[cell] + b[cell] >= 20]
    cells = [(a[cell], b[cell]) for cell in common]
    cells.append(
        (sum(a.values()) - sum(x for x, _ in cells), sum(b.values()) - sum(y for _, y in cells))
    )
    cells = [(x, y) for x, y in cells if x + y]
    return sum((x - y) ** 2 / (x + y) for x, y in cells), len(cells) - 1


def far_off(statistic: float, freedom: int) -> bool:
    """Beyond five standard deviations of the chi-square distribution."""
    return statistic > freedom + 5 * (2 * freedom) ** 0.5


def histogram(
    session: Session, draws: int, first: Callable[[], int], step: Callable[[int], list[int]]
) -> Counter[tuple[int, ...]]:
    """How often each three tokens came after the prompt."""
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws):
        session.remove(0)
        session.decode(PROMPT)
        text = [first()]
        while len(text) < 3:
            text += step(text[-1])
        seen[tuple(text[:3])] += 1
    return seen


def compare(dial: Any, chain: tuple[float, int, float, float], draws: int) -> None:
    """Draw three tokens often, with drafts and with llama.cpp's own chain, and compare."""
    temperature, top_k, top_p, min_p = chain
    with opened(dial("tiny", gain=GAIN)) as (session, trunk):
        smpl = llama_chain(chain, 7)
        plain = histogram(
            session,
            draws,
            lambda: llama_cpp.llama_sampler_sample(smpl, trunk.context, -1),
            lambda token: session.step(token, 0, sampler=smpl),
        )
        llama_cpp.llama_sampler_free(smpl)
        session.set_sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=11)
        session.reset_stats()
        drafted = histogram(session, draws, session.sample, session.step_sampled)
        assert 0.1 < session.stats().acceptance[0] < 0.9
    for part in (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 3)):
        sides = []
        for side in (plain, drafted):
            counts: Counter[Any] = Counter()
            for text, count in side.items():
                counts[text[part]] += count
            sides.append(counts)
        statistic, freedom = two_sample_chi_square(*sides)
        assert freedom > 1
        assert not far_off(statistic, freedom), (part, statistic, freedom)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_the_distribution_is_that_of_llama_cpps_chain(dial, chain) -> None:
    compare(dial, chain, 600)


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_the_distribution_over_20000_draws(dial, chain) -> None:
    compare(dial, chain, 20_000)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_row_is_drawn_from_the_chain(dial, chain) -> None:
    """Without drafts: filters and temperature are those of llama.cpp, candidate by candidate."""
    temperature, top_k, top_p, min_p = chain
    with opened(dial("tiny", gain=GAIN)) as (session, trunk):
        session.decode(PROMPT)
        smpl = llama_chain(chain, 1)
        draws = 20_000
        session.set_sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=3)
        ours = Counter(session.sample() for _ in range(draws))
        logits = trunk.logits()
        data = (llama_cpp.llama_token_data * len(logits))()
        for i, logit in enumerate(logits):
            data[i].id, data[i].logit, data[i].p = i, logit, 0
        array = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
        llama_cpp.llama_sampler_apply(smpl, llama_cpp.byref(array))
        want = {array.data[i].id: array.data[i].p for i in range(array.size)}
        llama_cpp.llama_sampler_free(smpl)
    assert set(ours) <= set(want)
    statistic = sum((ours[t] - draws * p) ** 2 / (draws * p) for t, p in want.items())
    assert not far_off(statistic, max(1, len(want) - 1))


def test_seeds_are_reproducible(dial) -> None:
    with opened(dial("tiny")) as (session, _):
        texts = []
        for seed in (5, 5, 6):
            session.remove(0)
            session.decode(PROMPT)
            session.set_sampling(40.0, seed=seed)
            text = [session.sample()]
            while len(text) < 30:
                text += session.step_sampled(text[-1])
            texts.append(text)
        assert texts[0] == texts[1] != texts[2]


def test_whole_vocabulary_and_short_draft_vocabularies(models) -> None:
    """Tokens that the head cannot draft come as often as the trunk says."""
    path = models.gguf("dense-tied", "Q4_K_M", "F16", layout="ids")
    with opened(path) as (session, _):
        assert session.head
        short = set(session.head.draft_ids().tolist())
        counts = []
        for step in (lambda t: session.step_sampled(t, 0), session.step_sampled):
            session.set_sampling(1.0, top_k=50, seed=1)
            seen = histogram(session, 400, session.sample, step)
            counts.append(sum(t not in short for text in seen for t in text * seen[text]))
    assert counts[0] > 150
    assert abs(counts[0] - counts[1]) < 5 * (2 * counts[0]) ** 0.5


def test_arguments_are_checked(dial) -> None:
    with opened(dial("tiny")) as (session, _):
        session.decode(PROMPT)
        for call in (session.sample, lambda: session.step_sampled(1)):
            with pytest.raises(NativeError, match="no sampling is set"):
                call()
        for chain, text in (
            ({"temperature": 0.0}, "temperature: expected more than 0, found 0"),
            ({"temperature": float("nan")}, "temperature: expected more than 0"),
            ({"temperature": 1.0, "top_p": 1.5}, "top_p: expected 0 to 1, found 1.5"),
            ({"temperature": 1.0, "min_p": -0.1}, "min_p: expected 0 to 1, found -0.1"),
        ):
            with pytest.raises(NativeError, match=text):
                session.set_sampling(**chain)
        assert np.isfinite(session.length())


def test_generate_chooses_rejection_where_the_distribution_is_known(dial) -> None:
    """By equality a hot sampler seldom meets the likeliest token; by rejection drafts are drawn."""
    options = {"max_tokens": 60, "temperature": 6.0, "top_k": 40, "top_p": 1.0, "min_p": 0.0}
    path = str(dial("tiny", hit=1.0))
    shares = {}
    for rejection in (True, False):
        with closing(
            MTPLlama(path, depth=2, n_ctx=256, n_threads=1, n_threads_batch=1, rejection=rejection)
        ) as llm:
            texts = [llm.create_completion(PROMPT, seed=3, **options) for _ in range(2)]
            assert texts[0]["choices"] == texts[1]["choices"]
            shares[rejection] = llm.mtp_stats.acceptance[0]
    assert shares[True] > shares[False]
