"""Sampling with drafts: the distribution is the trunk's, by equality and by rejection."""

from __future__ import annotations

from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.tensor_types import F32
from mtp_gguf.native import NativeError
from mtp_gguf.native.head import Head
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Session
from support import places
from support.checkpoints import SPECS
from support.chi_square import far_off, one_sample, two_samples
from support.commands import invoke
from support.generation import load, take
from support.gguf_files import Rewrite
from support.llama_samplers import Chain
from support.models import Dial, Models
from support.native_trunk import Trunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

PROMPT = [3, 1, 4, 1, 5]

# The trunk gives the next token of the cycle about half of the time, and the head agrees with that
# seven times in ten: drafts are accepted, rejected and replaced, and each would show if it were
# done wrong.
GAIN = 0.15

CHAINS = {
    "temperature": Chain(1.0, top_k=6),
    "cooler": Chain(0.7, top_k=12),
    "top-p": Chain(1.0, top_k=20, top_p=0.6),
    "min-p": Chain(0.7, min_p=0.14),
}
# On a device the largest logits are searched for these, too; for the last two they are too few.
ALONE = {
    "top-p alone": Chain(0.5, top_p=0.3),
    "most of top-p": Chain(1.0, top_p=0.9),
    "a low min-p": Chain(2.0, min_p=0.001),
}
# Values beyond a filter's range, and a chain that means the same.
OFF, LIKELIEST = Chain(1.0), Chain(1.0, top_k=1)
BEYOND = {
    "top-p 1.5": (Chain(1.0, top_p=1.5), OFF),
    "min-p -0.5": (Chain(1.0, min_p=-0.5), OFF),
    "top-p 0": (Chain(1.0, top_p=0.0), LIKELIEST),
    "top-p -0.5": (Chain(1.0, top_p=-0.5), LIKELIEST),
    "min-p 1.5": (Chain(1.0, min_p=1.5), LIKELIEST),
    "temperature 0 as a float": (Chain(1e-46), LIKELIEST),
    "temperature -0.5": (Chain(-0.5), LIKELIEST),
}

DEPTH = 2


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[tuple[Session, Trunk]]:
    with closing(Trunk(path, DEPTH)) as trunk:
        n_ctx = llama_cpp.llama_n_ctx_seq(trunk.context)
        with (
            Head(path, device=places.current().head, n_ctx=n_ctx, n_threads=1, **options) as head,
            Session(trunk.context, head, max_depth=DEPTH) as session,
        ):
            yield session, trunk


def sampled(session: Session, n: int) -> list[int]:
    """The next n tokens."""
    text = [session.sample()]
    while len(text) < n:
        text += session.step_sampled(text[-1])
    return text[:n]


def histogram(
    session: Session,
    draws: int,
    first: Callable[[], int],
    step: Callable[[int], list[int]],
    prompt: Sequence[int] = PROMPT,
) -> Counter[tuple[int, ...]]:
    """How often each three tokens came after the prompt."""
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(draws):
        session.remove(0)
        session.decode(prompt)
        text = [first()]
        while len(text) < 3:
            text += step(text[-1])
        seen[tuple(text[:3])] += 1
    return seen


def compare(
    dial: Any, chain: Chain, draws: int, prompt: Sequence[int] = PROMPT, **options: int
) -> None:
    """Draw three tokens often, with drafts and with llama.cpp's own chain, and compare."""
    with opened(dial("tiny", gain=GAIN), **options) as (session, trunk):
        smpl = chain.build(7)
        plain = histogram(
            session,
            draws,
            lambda: llama_cpp.llama_sampler_sample(smpl, trunk.context, -1),
            lambda token: session.step(token, 0, sampler=smpl),
            prompt,
        )
        llama_cpp.llama_sampler_free(smpl)
        session.set_sampling(**chain.options(), seed=11)
        session.reset_stats()
        drafted = histogram(session, draws, session.sample, session.step_sampled, prompt)
        assert 0.1 < session.stats().acceptance[0] < 0.9
    for part in (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 3)):
        sides = []
        for side in (plain, drafted):
            counts: Counter[Any] = Counter()
            for text, count in side.items():
                counts[text[part]] += count
            sides.append(counts)
        statistic, freedom = two_samples(*sides)
        assert freedom > 1
        assert not far_off(statistic, freedom), (part, statistic, freedom)


@pytest.mark.sample(1)
@pytest.mark.parametrize("draws", [600, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_the_distribution_is_that_of_llama_cpps_chain(dial: Dial, chain: Chain, draws: int) -> None:
    compare(dial, chain, draws)


@pytest.mark.thorough
@pytest.mark.parametrize(("n", "size"), [(5, 40), (30, 120)])
def test_a_draft_vocabulary_that_follows_the_text_changes_no_distribution(
    dial: Dial, n: int, size: int
) -> None:
    """The likely tokens can be drafted because they are in the prompt, others once they come.

    After 32 different tokens, in the middle of what is sampled, others like them come, too.
    """
    cycle = [token for token in dial.successors("tiny") if token > 100]
    prompt = [*cycle[1 : n + 1], cycle[0]]
    compare(dial, CHAINS["temperature"], 1500, prompt, fastmtp_size=size)


@pytest.mark.sample(3)
@places.everywhere
@pytest.mark.parametrize("chain", [*CHAINS.values(), *ALONE.values()], ids=[*CHAINS, *ALONE])
def test_a_row_is_drawn_from_the_chain(dial: Dial, chain: Chain) -> None:
    """Without drafts: filters and temperature are those of llama.cpp, candidate by candidate."""
    row = 3
    with opened(dial("tiny", gain=GAIN)) as (session, trunk):
        session.decode(PROMPT, all_logits=True)
        session.set_sampling(**chain.options(), seed=3)
        ours = Counter(session.sample(row) for _ in range(20_000))
        want = chain.distribution(trunk.logits(row))
    assert set(ours) <= set(want)
    assert not far_off(*one_sample(ours, want))


@pytest.mark.parametrize(("beyond", "same"), BEYOND.values(), ids=BEYOND)
def test_a_value_beyond_its_range_means_what_it_does_in_llama_cpp(
    dial: Dial, beyond: Chain, same: Chain
) -> None:
    with opened(dial("tiny", gain=GAIN)) as (session, trunk):
        session.decode(PROMPT)
        row = trunk.logits()
        likely = [{t for t, p in c.distribution(row).items() if p > 0} for c in (beyond, same)]
        assert likely[0] == likely[1]
        texts = []
        for chain in (beyond, same):
            session.remove(0)
            session.decode(PROMPT)
            session.set_sampling(**chain.options(), seed=5)
            texts.append(sampled(session, 20))
        assert texts[0] == texts[1]


@pytest.mark.parametrize("few", [{"top_p": 0.0}, {"min_p": 1.5}, {"temperature": 1e-46}])
def test_a_completion_keeps_at_least_one_token(dial: Dial, few: dict[str, float]) -> None:
    chain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **few}
    with load(dial("tiny"), depth=2, n_ctx=64) as llm:
        texts = [
            llm.create_completion(PROMPT, max_tokens=20, **options)["choices"]
            for options in (chain, {"temperature": 0.0})
        ]
        assert texts[0] == texts[1]


def test_the_most_likely_token_of_a_vocabulary_of_any_size(models: Models) -> None:
    """991 is no multiple of what is compared at a time; the odd ones at the end count, too."""
    path = models.gguf(replace(SPECS["dense-tied"], name="odd", vocab_size=991))
    with closing(Trunk(path, 0)) as trunk, Session(trunk.context, None, max_depth=0) as session:
        found = []
        for token in range(100):
            session.decode([token])
            found.append(session.argmax())
            assert found[-1] == trunk.logits().argmax()
    assert max(found) >= 960


def test_of_equal_logits_top_k_keeps_the_first_tokens(models: Models, rewrite: Rewrite) -> None:
    """All rows of the output are equal but one, whose token is likelier."""
    path = models.gguf("dense-tied")
    rows = np.full((1024, 256), 0.01, np.float32)
    with opened_rows(rewrite, path, rows) as (session, trunk):
        session.decode([1])
        rows[900] *= 2 if trunk.logits()[0] > 0 else 0.5
    with opened_rows(rewrite, path, rows) as (session, _):
        session.decode([1])
        assert session.argmax() == 900
        session.set_sampling(100.0, top_k=4, seed=1)
        assert {session.sample() for _ in range(200)} == {0, 1, 2, 900}


@contextmanager
def opened_rows(rewrite: Rewrite, path: Path, rows: np.ndarray) -> Iterator[tuple[Session, Trunk]]:
    """A session without a head on a model with this embedding, which is its output as well."""
    tensor = ((rows.shape[1], rows.shape[0]), F32, rows.tobytes())
    copy = rewrite(path, tensors={"token_embd.weight": tensor})
    with closing(Trunk(copy, 0)) as trunk, Session(trunk.context, None, max_depth=0) as session:
        yield session, trunk


def test_seeds_are_reproducible(dial: Dial) -> None:
    with opened(dial("tiny")) as (session, _):
        texts = []
        for seed in (5, 5, 6):
            session.remove(0)
            session.decode(PROMPT)
            session.set_sampling(40.0, seed=seed)
            texts.append(sampled(session, 30))
        assert texts[0] == texts[1] != texts[2]


def test_whole_vocabulary_and_short_draft_vocabularies(models: Models) -> None:
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


def test_arguments_are_checked(dial: Dial) -> None:
    with opened(dial("tiny")) as (session, _):
        session.decode(PROMPT)
        for call in (session.sample, lambda: session.step_sampled(1)):
            with pytest.raises(NativeError, match="no sampling is set"):
                call()
        for chain, text in (
            ({"temperature": float("inf")}, "temperature: expected a number, found inf"),
            ({"temperature": float("nan")}, "temperature: expected a number, found nan"),
            ({"temperature": 1.0, "top_p": float("nan")}, "top_p: expected a number, found nan"),
            ({"temperature": 1.0, "min_p": float("nan")}, "min_p: expected a number, found nan"),
        ):
            with pytest.raises(NativeError, match=text):
                session.set_sampling(**chain)  # type: ignore[arg-type]
        assert np.isfinite(session.length())


def test_generate_chooses_rejection_where_the_distribution_is_known(dial: Dial) -> None:
    """By equality a hot sampler seldom meets the likeliest token; by rejection drafts are drawn."""
    options = {"max_tokens": 60, "temperature": 6.0, "top_k": 40, "top_p": 1.0, "min_p": 0.0}
    shares = {}
    for rejection in (True, False):
        with load(dial("tiny", hit=1.0), depth=2, rejection=rejection) as llm:
            texts = [llm.create_completion(PROMPT, seed=3, **options) for _ in range(2)]
            assert texts[0]["choices"] == texts[1]["choices"]
            shares[rejection] = llm.mtp_stats.acceptance[0]
    assert shares[True] > shares[False]


@pytest.mark.parametrize("depth", [0, 3, "auto"])
def test_seed_minus_one_is_random_as_in_llama_cpp(dial: Dial, depth: int | str) -> None:
    """By rejection, by equality, and where no seed was given; other seeds repeat their text."""
    hot = {"temperature": 6.0, "top_k": 40, "top_p": 1.0, "min_p": 0.0, "max_tokens": 30}
    with load(dial("tiny"), seed=-1, depth=depth, n_ctx=128) as llm:

        def text(**settings: Any) -> str:
            llm.reset()
            answer: Any = llm.create_completion(PROMPT, **hot, **settings)
            return str(answer["choices"][0]["text"])

        def tokens() -> tuple[int, ...]:
            chain = {"temp": 6.0, "top_k": 40, "top_p": 1.0, "min_p": 0.0}
            return tuple(take(llm, 30, PROMPT, **chain))

        assert len({tokens() for _ in range(4)}) == 4
        for settings in ({}, {"presence_penalty": 0.1}):  # the second by equality
            assert len({text(seed=-1, **settings) for _ in range(4)}) == 4
            assert len({text(seed=llama_cpp.LLAMA_DEFAULT_SEED, **settings) for _ in range(2)}) == 2
            if depth != "auto":  # whose depths are measured
                assert len({text(seed=5, **settings) for _ in range(2)}) == 1


def test_the_command_takes_a_random_seed(dial: Dial) -> None:
    words = ("generate", dial("tiny", gain=GAIN), "-p", "aha", "-n", "30", "-c", "128", "-t", "1")

    def text(seed: int) -> str:
        done = invoke(*words, "--temp", "1", "--depth", "2", "--no-profile", "--seed", seed)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    assert len({text(-1) for _ in range(3)}) == 3
    for seed in (0, 7):
        assert text(seed) == text(seed)
