"""Trunk and head together: every rollback mode yields the tokens and state of plain decoding."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from mtp_gguf.native.errors import ContextFullError, NativeError
from mtp_gguf.native.head import Head
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Rollback, Session
from support import places
from support.generation import random_tokens
from support.models import Dial, Models
from support.native_trunk import MODES, Trunk, opened_session

PROMPT = random_tokens(20, 2)

# Logits of the tiny synthetic models have a standard deviation of 1.2 and a maximum of 15. One
# token and several go through different kernels; measured: 0.01. A state that is off by one token
# shows as 0.1 or more.
STATE_TOLERANCE = 0.04


def plain_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """Logits after `tokens`, decoded one by one after the prompt in a fresh context."""
    with closing(Trunk(path, 0)) as trunk, Session(trunk.context, None, max_depth=0) as session:
        session.decode(PROMPT)
        for token in tokens[len(PROMPT) :]:
            session.decode([token])
        return trunk.logits()


def check_state(session: Session, trunk: Trunk, path: Path, text: list[int]) -> None:
    """Sequence 0, whose last token is still to be decoded, is as plain decoding leaves it."""
    session.decode(text[-1:])
    assert np.abs(trunk.logits() - plain_logits(path, text)).max() < STATE_TOLERANCE


def generate(session: Session, depth: int, n: int, seq: int = 0) -> list[int]:
    tokens = [session.argmax()]
    while len(tokens) < n:
        tokens += session.step(tokens[-1], depth, seq)
    return tokens


@pytest.mark.sample(14)
@places.in_all_places
@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        (shape, mode)
        for shape in ("tiny", "tiny-3v", "tiny-moe", "tiny-next")
        for mode in MODES
        if (shape, mode) != ("tiny-next", "snapshot")  # llama.cpp has none for qwen3next
    ],
)
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_text_and_state_equal_plain_decoding(dial: Dial, shape: str, depth: int, mode: str) -> None:
    path = dial(shape)
    with opened_session(path, mode, depth) as (session, trunk):
        session.decode(PROMPT)
        tokens = generate(session, depth, 40)
        stats = session.stats()
        session.decode([tokens[-1]])
        got = trunk.logits()
        length = session.length()
    cycle = dial.successors(shape)
    assert tokens[0] == cycle[PROMPT[-1]]
    assert [cycle[t] for t in tokens[:-1]] == tokens[1:]
    # The dial: the head fails after flagged tokens and nowhere else.
    assert 0 < stats.acceptance[0] < 1
    assert stats.tokens == sum(stats.accepted) + stats.cycles == len(tokens) - 1
    assert length == len(PROMPT) + len(tokens)
    assert np.abs(got - plain_logits(path, PROMPT + tokens)).max() < STATE_TOLERANCE


@places.everywhere
@pytest.mark.parametrize("mode", MODES)
def test_acceptance_matches_the_synthetic_model(dial: Dial, mode: str) -> None:
    """Full, partial and no rejection in sequence, exactly at the flagged tokens."""
    missed, cycle = dial.missed("tiny"), dial.successors("tiny")
    with opened_session(dial("tiny"), mode, 4) as (session, _):
        session.decode(PROMPT)
        token = session.argmax()
        seen = set()
        for _ in range(30):
            want, at = 0, token
            while want < 4 and not missed[at]:
                want, at = want + 1, cycle[at]
            new = session.step(token)
            assert len(new) == want + 1
            seen.add(want)
            token = new[-1]
    assert {0, 4} < seen


@pytest.mark.sample(2)
@places.everywhere
@pytest.mark.parametrize("mode", MODES)
def test_drafts_come_from_the_right_tokens_and_hidden_states(models: Models, mode: str) -> None:
    """On random weights, against the reference on the whole text, however many are accepted.

    Drafts are accepted here because the test says so, which no sampler of these weights would.
    """
    reference = models.reference("dense-tied")
    with opened_session(models.gguf("dense-tied"), mode, 4) as (session, _):
        session.decode(PROMPT[:12])
        session.decode(PROMPT[12:])
        text, token = list(PROMPT), 7
        for accepted in (0, 4, 1, 3, 0, 2):
            drafts = session.begin(token)
            text.append(token)
            hidden = reference.trunk(text[:-1])[1]
            want, logits = reference.draft(text, hidden, 4, follow=drafts, zero_row=False)
            for draft, best, row in zip(drafts, want, logits, strict=True):
                assert draft == best or row[best] - row[draft] < STATE_TOLERANCE
            for row in range(accepted + 1):
                session.row(row)
            session.end(accepted)
            text += drafts[:accepted]
            token = (drafts[accepted] + 1 if accepted < 4 else 5) % 900
        session.remove(len(text) - (1 if mode == "snapshot" else 0))


@places.everywhere
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("unified", [False, True], ids=["streams", "unified"])
@pytest.mark.parametrize("mode", MODES)
def test_sequences_do_not_mix(dial: Dial, mode: str, unified: bool, at_once: bool) -> None:
    """llama.cpp's rollback is pending until the next decode, which may be another sequence's.

    at_once: rolled back after the cycle, and not on the next decode.
    """
    path, cycle = dial("tiny", hit=0.3), dial.successors("tiny")
    with opened_session(path, mode, 3, n_seq_max=3, unified=unified) as (session, trunk):
        texts = []
        for seq in range(3):
            session.decode(PROMPT[seq:], seq)
            texts.append([session.argmax()])
        for turn in range(12):
            for seq, text in enumerate(texts):
                text.extend(session.step(text[-1], 3, seq))
                if at_once:
                    session.remove(session.length(seq), seq)
            if turn == 6:
                session.copy(0, 2)
                texts[2] = list(texts[0])
        for text in texts:
            assert [cycle[t] for t in text[:-1]] == text[1:]
        check_state(session, trunk, path, PROMPT + texts[0])


@places.everywhere
@pytest.mark.parametrize("mode", MODES)
def test_depth_can_change_from_cycle_to_cycle(dial: Dial, mode: str) -> None:
    path, cycle = dial("tiny"), dial.successors("tiny")
    with opened_session(path, mode, 5) as (session, trunk):
        session.decode(PROMPT)
        tokens = [session.argmax()]
        for depth in [0, 3, 0, 0, 5, 1, 0, 2, 4] * 2:
            tokens += session.step(tokens[-1], depth)
        assert [cycle[t] for t in tokens[:-1]] == tokens[1:]
        check_state(session, trunk, path, PROMPT + tokens)


@places.everywhere
def test_the_context_can_be_filled_to_its_end(dial: Dial) -> None:
    for mode in MODES:
        with opened_session(dial("tiny"), mode, 6) as (session, trunk):
            n_ctx = llama_cpp.llama_n_ctx_seq(trunk.context)
            session.decode(PROMPT)
            tokens = [session.argmax()]
            while session.length() < n_ctx:
                tokens += session.step(tokens[-1])
            assert session.length() == n_ctx == len(PROMPT) + len(tokens) - 1
            with pytest.raises(ContextFullError, match=f"the context of {n_ctx} positions is full"):
                session.step(tokens[-1])
            with pytest.raises(ContextFullError, match="positions is full: 1 tokens after"):
                session.decode([1])
            assert session.length() == n_ctx


# --------------------------------------------------------------------- removing tokens


@places.everywhere
def test_impossible_rollbacks_are_rejected_and_change_nothing(dial: Dial) -> None:
    path = dial("tiny")
    with opened_session(path, "snapshot", 3) as (session, trunk):
        session.decode(PROMPT)
        for first, text in (
            (-1, "p0: expected 0 to 20, found -1"),
            (21, "p0: expected 0 to 20, found 21"),
            (16, "p0: expected 17 or more, found 16: .* can roll back only 3 of the 4"),
        ):
            with pytest.raises(NativeError, match=text):
                session.remove(first)
            assert session.length() == 20
        session.remove(17)
        assert session.length() == 17
        # A rollback is single-use: it uses up the older snapshots.
        with pytest.raises(NativeError, match="p0: expected 17 or more, found 16"):
            session.remove(16)
        session.decode(PROMPT[17:])
        again = trunk.logits()
        # After decoding one token, removing it would restore a snapshot of an older decode.
        session.decode([5])
        with pytest.raises(NativeError, match="p0: expected 21 or more, found 20"):
            session.remove(20)
        session.remove(0)
        assert session.length() == 0
        session.decode(PROMPT)
        assert np.abs(trunk.logits() - again).max() < STATE_TOLERANCE


@places.everywhere
@pytest.mark.parametrize("mode", ["snapshot", "checkpoint", "host"])
def test_accepted_tokens_can_be_rolled_back_with_the_rejected_ones(dial: Dial, mode: str) -> None:
    """This happens when a reader stops in the middle of a cycle's tokens."""
    path = dial("tiny", hit=1.0)
    for kept in (1, 2, 4):
        with opened_session(path, mode, 4) as (session, trunk):
            session.decode(PROMPT)
            token = session.argmax()
            new = session.step(token)
            assert len(new) == 5
            session.remove(len(PROMPT) + kept)
            tokens = [token, *new][:kept]
            other = (tokens[-1] + 1) % 700  # go on with something else
            more = session.step(other)
            session.decode([more[-1]])
            got = trunk.logits()
        want = plain_logits(path, [*PROMPT, *tokens, other, *more])
        assert np.abs(got - want).max() < STATE_TOLERANCE


@places.everywhere
def test_position_zero(dial: Dial) -> None:
    """A prompt of one token, and a sequence that is emptied and used again."""
    path, cycle = dial("tiny"), dial.successors("tiny")
    for mode in MODES:
        with opened_session(path, mode, 3) as (session, _):
            for _ in range(2):
                session.decode(PROMPT[:1])
                tokens = generate(session, 3, 12)
                assert tokens[0] == cycle[PROMPT[0]]
                assert [cycle[t] for t in tokens[:-1]] == tokens[1:]
                session.remove(0)
                assert session.length() == 0


# ---------------------------------------------------------------------------- arguments


def test_cycle_calls_must_be_in_order(dial: Dial) -> None:
    with opened_session(dial("tiny"), "two-phase", 3) as (session, _):
        session.decode(PROMPT)
        with pytest.raises(NativeError, match="no cycle is open"):
            session.row(0)
        with pytest.raises(NativeError, match="no cycle is open"):
            session.end(0)
        drafts = session.begin(session.argmax())
        for call in (
            lambda: session.begin(1),
            lambda: session.decode([1]),
            lambda: session.remove(1),
        ):
            with pytest.raises(NativeError, match="a cycle is open"):
                call()
        with pytest.raises(NativeError, match="row: expected 0 to 3, found 4"):
            session.row(4)
        with pytest.raises(NativeError, match="expected rows in order, 0 to 1, found 2"):
            session.row(2)
        session.row(0)
        with pytest.raises(NativeError, match="n_accepted: expected 0 to 0, found 1"):
            session.end(1)
        session.row(1)
        session.end(1)
        assert session.length() == len(PROMPT) + 2
        assert len(drafts) == 3
        session.begin(session.argmax())
        session.remove(0)  # what somebody left open goes with the rest
        assert session.length() == 0
        session.decode(PROMPT)
        assert session.begin(session.argmax()) == drafts


def test_arguments_are_checked(dial: Dial, models: Models) -> None:
    path = dial("tiny")
    with opened_session(path, "snapshot", 3) as (session, trunk):
        for call, text in (
            (lambda: session.decode([-1]), r"tokens\[0\]: expected 0 to 1023"),
            (lambda: session.decode([1024]), r"tokens\[0\]: expected 0 to 1023"),
            (lambda: session.decode([3, 5000]), r"tokens\[1\]: expected 0 to 1023"),
            (lambda: session.decode([]), "n: expected 1 to"),
            (lambda: session.decode([1], 1), "seq: expected 0 to 0, found 1"),
            (lambda: session.step(1, 4), "depth: expected 0 to 3, found 4"),
            (lambda: session.step(-1), "token: expected 0 to 1023, found -1"),
        ):
            with pytest.raises(NativeError, match=text):
                call()
        assert session.length() == 0
        with (
            Head(path, n_ctx=128) as head,
            pytest.raises(NativeError, match="the head's cache: expected 1 sequences of 256"),
        ):
            Session(trunk.context, head)
        with Head(path, n_ctx=256) as head:
            with pytest.raises(NativeError, match="a context with n_rs_seq of 4 or more, found 3"):
                Session(trunk.context, head, max_depth=4)
            with pytest.raises(NativeError, match="max_depth: expected 0 to 16, found 17"):
                Session(trunk.context, head, max_depth=17)
    with pytest.raises(NativeError, match="the session is closed"):
        session.decode([1])
    with pytest.raises(NativeError, match=r"rollback: expected one of snapshot, .* found 'none'"):
        Rollback.parse("none")
