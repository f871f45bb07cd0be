"""Drafts from the text do not change the tokens; used if they promise more than the head."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from llama_cpp.llama_grammar import LlamaGrammar

from mtp_gguf.gguf_tools.profile import FROM_TEXT
from mtp_gguf.native import MTPLlama
from mtp_gguf.native.checkpoint import CheckpointKind
from mtp_gguf.native.errors import NativeError
from mtp_gguf.native.head import Head
from mtp_gguf.native.replay import replays
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Depth, Rollback, Session
from support.chi_square import far_off, two_samples
from support.commands import invoke
from support.models import Models
from support.native_trunk import Trunk

LOOKUP = 12


def opened(
    stack: ExitStack,
    path: Path,
    *,
    depth: int = 3,
    lookup: int = LOOKUP,
    mode: Rollback = Rollback.SNAPSHOT,
    head: bool = True,
) -> Session:
    """A session that looks up, with a head unless told otherwise."""
    snapshots = max(depth, lookup) if mode is Rollback.SNAPSHOT else 0
    trunk = stack.enter_context(closing(Trunk(path, snapshots, n_seq_max=2)))
    n_ctx = llama_cpp.llama_n_ctx_seq(trunk.context)
    drafter = None
    if head:
        drafter = stack.enter_context(Head(path, n_ctx=n_ctx, n_threads=1, n_seq_max=2))
    return stack.enter_context(
        Session(
            trunk.context,
            drafter,
            max_depth=depth if head else 0,
            rollback=mode,
            max_lookup=lookup,
        )
    )


def copied_prompt(dial: Any) -> list[int]:
    """A text of the synthetic model, then its beginning again, so that the answer copies it."""
    cycle = dial.successors("tiny")
    text = [7]
    while len(text) < 60:
        text.append(cycle[text[-1]])
    return [*text, *text[:6]]


def generate(session: Session, n: int, depth: Depth = None, seq: int = 0) -> list[int]:
    tokens = [session.argmax()]
    while len(tokens) < n:
        tokens += session.step(tokens[-1], depth, seq)
    return tokens[:n]


@pytest.mark.parametrize("depth", [0, 2, "auto"])
@pytest.mark.parametrize("mode", list(Rollback))
def test_greedy_text_is_the_same(dial: Any, mode: Rollback, depth: Depth) -> None:
    cycle, prompt = dial.successors("tiny"), copied_prompt(dial)
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"), mode=mode)
        session.decode(prompt)
        tokens = generate(session, 80, depth)
        stats = session.stats()
    assert [cycle[t] for t in tokens[:-1]] == tokens[1:]
    assert stats.text_cycles > 0
    assert 0 < stats.text_accepted <= stats.text_drafted
    assert stats.tokens == stats.cycles + sum(stats.accepted) + stats.text_accepted


def test_without_a_head(dial: Any) -> None:
    """A copy is drafted from the text, as many tokens at a time as pay off."""
    cycle, prompt = dial.successors("tiny"), copied_prompt(dial)
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"), head=False)
        session.decode(prompt)
        session.set_costs([10.0 + i for i in range(13)], [])  # as on a machine with fast batches
        tokens = generate(session, 50)
        stats = session.stats()
    assert [cycle[t] for t in tokens[:-1]] == tokens[1:]
    assert stats.drafted == ()
    assert stats.text_accepted > 25
    assert stats.tokens == stats.cycles + stats.text_accepted


def test_novel_text_is_left_to_the_head(dial: Any) -> None:
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"))
        session.decode([7])
        generate(session, 60, 3)  # a walk that meets no token twice
        stats = session.stats()
    assert stats.text_cycles == 0
    assert sum(stats.accepted) > 0


def test_removed_tokens_are_not_drafted(dial: Any) -> None:
    """After a removal the index holds what the sequence holds."""
    prompt = copied_prompt(dial)
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"), mode=Rollback.CHECKPOINT)
        session.decode(prompt)
        session.remove(0)
        session.decode(prompt[:30])
        assert session.begin(prompt[30], 0) == []
        session.end(0)


def test_copies_keep_and_checkpoints_drop_the_text(dial: Any) -> None:
    prompt = copied_prompt(dial)
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"))
        session.decode(prompt)
        token = session.argmax()
        session.copy(0, 1)
        saved = stack.enter_context(session.save(CheckpointKind.WHOLE))
        expected = session.begin(token, 0)
        session.end(0)
        assert len(expected) > 1
        copied = session.begin(token, 0, seq=1)
        session.end(0)
        assert copied == expected
        session.restore(saved)  # from elsewhere: its tokens are not known
        assert session.begin(token, 0) == []
        session.end(0)


@pytest.mark.parametrize("draws", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_sampling_by_rejection_keeps_the_distribution(dial: Any, draws: int) -> None:
    """A draft from the text is accepted with its probability, and replaced by the residual.

    pytest -m slow tests/native/test_lookup.py compares 20,000 draws.
    """
    prompt = copied_prompt(dial)
    path = dial("tiny", gain=0.15)
    sides = []
    for lookup in (0, 4):
        with ExitStack() as stack:
            session = opened(stack, path, depth=0, lookup=lookup, head=False)
            session.set_sampling(1.0, top_k=6, seed=5 + lookup)
            for _ in range(50):  # as if learned long ago: drafts are free
                session.set_costs([10.0] * 5, [])
            seen: Counter[tuple[int, ...]] = Counter()
            for _ in range(draws):
                session.remove(0)
                session.decode(prompt)
                text = [session.sample()]
                while len(text) < 3:
                    session.set_costs([10.0] * 5, [])
                    text += session.step_sampled(text[-1], 0)
                seen[tuple(text[:3])] += 1
            stats = session.stats()
            sides.append(seen)
    assert stats.text_drafted > draws
    assert 0.1 < stats.text_accepted / stats.text_drafted < 0.9
    for part in (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 3)):
        counts: list[Counter[Any]] = [Counter(), Counter()]
        for side, of_part in zip(sides, counts, strict=True):
            for tokens, count in side.items():
                of_part[tokens[part]] += count
        statistic, freedom = two_samples(*counts)
        assert freedom > 1
        assert not far_off(statistic, freedom), (part, statistic, freedom)


@pytest.mark.parametrize("lookup", [-1, 17])
def test_wrong_sizes_are_refused(dial: Any, lookup: int) -> None:
    with ExitStack() as stack, pytest.raises(NativeError, match="max_lookup: expected 0 to 16"):
        opened(stack, dial("tiny"), lookup=lookup)


def test_snapshots_must_hold_the_drafts(dial: Any) -> None:
    with (
        closing(Trunk(dial("tiny"), 3)) as trunk,
        pytest.raises(NativeError, match="n_rs_seq of 12 or more, found 3"),
    ):
        Session(trunk.context, None, max_depth=0, max_lookup=LOOKUP)


@pytest.mark.parametrize("with_head", [True, False])
def test_mtp_llama_looks_up(dial: Any, tmp_path: Path, with_head: bool) -> None:
    """The same text with and without lookup, also for a file that has no head."""
    path = dial("tiny")
    if not with_head:
        assert invoke("strip", path, "-o", tmp_path / "trunk.gguf").exit_code == 0
        path = tmp_path / "trunk.gguf"
    prompt = copied_prompt(dial)
    texts: list[list[int]] = []
    stats = []
    for lookup in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a file without a head is said to have none
            llm = MTPLlama(str(path), n_ctx=256, n_threads=1, lookup=lookup, profile=False)
        with closing(llm):
            stream = llm.generate(prompt, temp=0.0)
            origins = []
            texts.append([])
            for token in islice(stream, 60):
                texts[-1].append(token)
                origins.append(llm.token_origin)
            stream.close()
            stats.append(llm.mtp_stats)
    assert texts[0] == texts[1]
    assert stats[0].text_cycles == 0
    assert stats[1].text_accepted > 0
    assert 0 < origins.count(FROM_TEXT) <= stats[1].text_accepted  # the last cycle may be cut off


# As llama_cpp.Llama's own completions take them.
REPEATED = "red green blue grey " * 12  # the demo model goes on with the repetition
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "chain": {"temperature": 0.6, "top_k": 20},
    "penalties": {"temperature": 0.6, "repeat_penalty": 1.02, "frequency_penalty": 0.02},
    "grammar": {"temperature": 0.6, "grammar": "root ::= [a-z ]*"},
}


@pytest.mark.parametrize("quant", ["Q4_K_M", pytest.param("F16", marks=pytest.mark.slow)])
def test_completions_are_those_of_no_drafting(models: Models, quant: str) -> None:
    """With a sampler's chain, penalties and a grammar, seed by seed; also with exact.

    pytest -m slow tests/native/test_lookup.py also runs F16 weights.
    """
    path = models.gguf("demo", quant, "F16")
    settings: list[dict[str, Any]] = [
        {"depth": 0, "lookup": False},
        {"lookup": True, "rejection": False},
        {"lookup": True, "rejection": False, "exact": True},
    ]
    texts = []
    for setting in settings:
        with closing(
            MTPLlama(str(path), n_ctx=256, n_threads=1, profile=False, flash_attn=True, **setting)
        ) as llm:
            for how, options in COMPLETIONS.items():
                for seed in range(2):
                    for _ in range(50):  # as if learned long ago: drafts are nearly free
                        llm.session.set_costs([10.0 + i / 10 for i in range(15)], [10.0] * 4)
                    given = dict(options)
                    if "grammar" in given:
                        given["grammar"] = LlamaGrammar.from_string(given["grammar"], verbose=False)
                    done: Any = llm.create_completion(REPEATED, max_tokens=24, seed=seed, **given)
                    texts.append((how, seed, done["choices"][0]["text"]))
            assert (llm.mtp_stats.text_accepted > 10) is bool(setting["lookup"])
    n = len(texts) // len(settings)
    assert [texts[i : i + n] for i in range(n, len(texts), n)] == [texts[:n]] * (len(settings) - 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, True),
        ({"depth": "auto", "exact": True}, True),
        ({"lookup": False}, False),
        ({"depth": 2}, False),  # its draws must not depend on measured times
        ({"depth": 0}, False),
        ({"rollback": "checkpoint"}, False),  # each cycle would copy the state
        ({"depth": 2, "lookup": True}, True),
    ],
    ids=str,
)
def test_on_by_default_where_depth_is_automatic_and_rollback_needs_no_snapshots(
    dial: Any, arguments: dict[str, Any], expected: bool
) -> None:
    expected = expected and (replays("qwen35", 0) or "lookup" in arguments)
    prompt = copied_prompt(dial)
    with closing(
        MTPLlama(str(dial("tiny")), n_ctx=256, n_threads=1, profile=False, **arguments)
    ) as llm:
        for _ in range(50):  # as if learned long ago: drafts from the text are nearly free
            llm.session.set_costs([10.0 + i / 10 for i in range(15)], [10.0] * 4)
        list(islice(llm.generate(prompt, temp=0.0), 60))
        assert (llm.mtp_stats.text_accepted > 0) is expected
