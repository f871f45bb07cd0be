"""A full context changes nothing, whether each sequence has its own positions or all share them."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native.checkpoint import CheckpointKind
from mtp_gguf.native.errors import ContextFullError, NativeError
from mtp_gguf.native.head import Head
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Rollback, Session
from support.generation import random_tokens
from support.native_trunk import MODES, Trunk, decode_rows, opened_session

KINDS = [False, True]
NAMES = ["streams", "unified"]
N_CTX = 256
FULL = "the context of 256 positions is full"
TEXT = random_tokens(N_CTX, 8)


@pytest.mark.parametrize("unified", KINDS, ids=NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_does_not_fit_changes_nothing(dial: Any, mode: str, unified: bool) -> None:
    """It would be decoded in pieces, of which the first ones fit; the head forgets nothing."""
    path, others = dial.models.gguf("dense-tied"), 150 if unified else 0
    drafts = []
    for too_much in (False, True):
        with opened_session(path, mode, 3, N_CTX, 2, unified) as (session, _):
            if others:
                session.decode(TEXT[:others], 0)
            session.decode(TEXT[:20], 1)
            if too_much:
                text = f"{FULL}: {237 - others} tokens after 20"
                text += " and 150 of other sequences" if unified else "$"
                with pytest.raises(ContextFullError, match=text):
                    session.decode(TEXT[: 237 - others], 1)
                assert (session.length(0), session.length(1)) == (others, 20)
            drafts.append(session.begin(7, 3, 1))
            session.end(0)
            session.decode(TEXT[: 235 - others], 1)  # to the last position
            with pytest.raises(ContextFullError, match=FULL):
                session.decode([1], 1)
            assert session.length(1) == N_CTX - others
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == 3


@pytest.mark.parametrize("unified", KINDS, ids=NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_a_cycle_that_does_not_fit_changes_nothing(dial: Any, mode: str, unified: bool) -> None:
    """Drafts end where the free positions end; the head loses nothing to a cycle without room."""
    path = dial.models.gguf("dense-tied")
    with opened_session(path, mode, 3, N_CTX, 2, unified) as (session, _):
        session.decode(TEXT[:100], 0)
        session.decode(TEXT[:152], 1)
        others = 100 if unified else 0
        while (room := N_CTX - others - session.length(1)) > 0:
            drafts = session.begin(5, 3, 1)
            assert len(drafts) == min(3, room - 1)
            session.end(0)
        length = session.length(1)
        for _ in range(2):
            with pytest.raises(ContextFullError, match=FULL):
                session.begin(7, 3, 1)
            with pytest.raises(ContextFullError, match=FULL):
                session.step(7, 3, 1)
            with pytest.raises(NativeError, match="no cycle is open"):
                session.row(0)
            assert session.length(1) == length
        if not unified:
            return
        session.remove(0, 0)
        found = session.begin(7, 3, 1)
    with opened_session(path, mode, 3, N_CTX, 2, unified) as (session, _):
        session.decode(TEXT[:152], 1)
        while session.length(1) < length:
            session.begin(5, 3, 1)
            session.end(0)
        assert session.begin(7, 3, 1) == found
        assert len(found) == 3


def test_copies_share_their_positions(dial: Any) -> None:
    path = dial("tiny")
    with opened_session(path, "snapshot", 3, N_CTX, 3, unified=True) as (session, _):
        session.decode(TEXT[:200], 0)
        for target in (1, 2):
            session.copy(0, target)
        for seq in (0, 1, 2):  # 200 + 3 * 18 positions
            session.decode(TEXT[:18], seq)
        session.decode(TEXT[:2], 1)
        with pytest.raises(ContextFullError, match="1 tokens after 218 and 38 of other sequences"):
            session.decode([1], 0)
        session.remove(0, 0)
        session.decode(TEXT[:18], 2)
        with pytest.raises(ContextFullError, match="1 tokens after 220 and 36 of other sequences"):
            session.decode([1], 1)


@pytest.mark.parametrize("unified", KINDS, ids=NAMES)
def test_a_checkpoint_that_does_not_fit_changes_nothing(dial: Any, unified: bool) -> None:
    path, cycle = dial("tiny"), dial.successors("tiny")
    with opened_session(path, "snapshot", 3, N_CTX, 2, unified) as (session, _):
        session.decode(TEXT[:120], 0)
        saved = session.save(CheckpointKind.WHOLE, 0)
        session.decode(TEXT[:30], 0)
        session.decode(TEXT[:20], 1)
        if unified:
            with pytest.raises(ContextFullError, match="expected at most 106 tokens"):
                session.restore(saved, 1)
        token = session.step(TEXT[20], 3, 1)[-1]
        assert session.length(1) >= 21
        assert session.step(token, 3, 1)[0] == cycle[token]
        session.restore(saved, 0)
        if unified:
            session.remove(0, 1)
        session.restore(saved, 1)
        assert (session.length(0), session.length(1)) == (120, 120)


def test_cells_taken_by_another_sequence_are_reported(dial: Any) -> None:
    """Another sequence was filled without the session: it says so, and says what to do."""
    with opened_session(dial("tiny"), "snapshot", 3, N_CTX, 2, unified=True) as (session, trunk):
        session.decode(TEXT[:100], 0)
        session.decode(TEXT[:50], 1)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(trunk.context), 1, -1, -1)
        rows = [(1, i, token) for i, token in enumerate(TEXT[:60])]
        assert decode_rows(trunk.context, rows) == 0
        assert session.length(1) == 50
        with pytest.raises(NativeError, match="counts 42: expected mtp_session_sync") as caught:
            session.decode(TEXT[:106], 0)
        assert not isinstance(caught.value, ContextFullError)
        assert session.length(0) == 0
        session.sync(1)
        assert session.length(1) == 60
        session.decode(TEXT[:196], 0)
        with pytest.raises(ContextFullError, match=FULL):
            session.decode([1], 0)


def walk(session: Session, seed: int, steps: int) -> dict[str, int]:
    """Random operations on three sequences; what was decoded of each is kept here, too."""
    draw = random.Random(seed)
    texts: list[list[int]] = [[], [], []]
    saved: list[tuple[Any, list[int]]] = []
    count = {"full": 0, "cycles": 0, "drafts": 0, "copies": 0, "restored": 0}
    for _ in range(steps):
        seq = draw.randrange(3)
        text = texts[seq]
        try:
            match draw.choice(["decode", "cycle", "cycle", "cycle", "cut", "copy", "restore"]):
                case "decode":
                    new = [draw.randrange(900) for _ in range(draw.randint(1, 120))]
                    session.decode(new, seq)
                    texts[seq] = text + new
                case "cycle" if text:
                    token = draw.randrange(900)
                    drafts = session.begin(token, draw.randint(0, 4), seq)
                    accepted = draw.randint(0, len(drafts))
                    for row in range(accepted + 1):
                        session.row(row)
                    session.end(accepted)
                    texts[seq] = [*text, token, *drafts[:accepted]]
                    count["cycles"] += 1
                    count["drafts"] += len(drafts)
                case "cut" if draw.random() < 0.3:
                    session.remove(0, seq)
                    texts[seq] = []
                case "copy":
                    target = draw.randrange(3)
                    session.copy(seq, target)
                    texts[target] = text
                    count["copies"] += 1
                case "restore" if text:
                    if not saved or draw.random() < 0.5:
                        saved.append((session.save(CheckpointKind.WHOLE, seq), text))
                    else:
                        checkpoint, then = draw.choice(saved)
                        session.restore(checkpoint, seq)
                        texts[seq] = then
                        count["restored"] += 1
        except ContextFullError:
            count["full"] += 1
        assert [session.length(i) for i in range(3)] == [len(each) for each in texts]
    return count


@pytest.mark.parametrize("min_rows", [1, 2])
@pytest.mark.parametrize("mode", ["snapshot", "host"])
def test_random_use_of_a_shared_context(dial: Any, mode: str, min_rows: int) -> None:
    """Never an error but that of a full context, at which nothing changes."""
    path: Path = dial.models.gguf("dense-tied")
    with (
        closing(Trunk(path, 4, N_CTX, 3, unified=True)) as trunk,
        Head(path, n_ctx=N_CTX, n_seq_max=3, n_threads=1) as head,
        Session(
            trunk.context, head, max_depth=4, rollback=Rollback.parse(mode), min_rows=min_rows
        ) as session,
    ):
        count = walk(session, 3 + min_rows, 500)
    assert min(count.values()) >= 5
