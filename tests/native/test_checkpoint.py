"""Checkpoints and copies: decoding continues identically; misfits are rejected by name."""

from __future__ import annotations

import itertools
import struct
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from mtp_gguf.native import Checkpoint, CheckpointKind, Session
from mtp_gguf.native.errors import ContextFullError, ModelRefusedError, NativeError
from mtp_gguf.native.head import Head
from mtp_gguf.native.runtime import llama_cpp
from support import places
from support.generation import random_tokens
from support.models import Dial, Models
from support.native_trunk import MODES, Trunk, opened_session
from support.tiny_llama import write_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KINDS = [CheckpointKind.DEVICE, CheckpointKind.HOST, CheckpointKind.WHOLE]
PROMPT = random_tokens(20, 2)
DEPTH = 4
SAME_BATCHES = 1e-6  # between logits after the same batches; kernels are the same, so are the bits


def go_on(session: Session, token: int, n: int, seq: int = 0) -> tuple[list[int], list[int]]:
    """Return the tokens after `token`, and how many of them each cycle generated."""
    tokens, counts = [token], []
    while len(tokens) < n:
        new = session.step(tokens[-1], DEPTH, seq)
        tokens += new
        counts.append(len(new))
    return tokens, counts


@contextmanager
def prompted(path: Path, mode: str = "snapshot", **options: Any) -> Iterator[tuple[Session, Trunk]]:
    """A session that has read the prompt."""
    with opened_session(path, mode, DEPTH, **options) as (session, trunk):
        session.decode(PROMPT)
        yield session, trunk


def saved_bytes(session: Session, kind: CheckpointKind = CheckpointKind.WHOLE) -> bytes:
    with session.save(kind) as saved:
        return saved.to_bytes()


def restore_bytes(session: Session, data: bytes) -> None:
    with Checkpoint.from_bytes(data) as saved:
        session.restore(saved)


@places.everywhere
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_decoding_after_a_restore_repeats_the_original(
    dial: Dial, mode: str, kind: CheckpointKind
) -> None:
    """The tokens and the acceptance are the same from the first cycle on."""
    with prompted(dial("tiny"), mode) as (session, trunk):
        start, _ = go_on(session, session.argmax(), 9)
        with session.save(kind) as saved:
            length = session.length()
            assert (saved.kind, saved.length) == (kind, length)
            want = go_on(session, start[-1], 20)
            session.decode([want[0][-1]])
            logits = trunk.logits()
            # The device keeps one copy; in this mode the cycles above have written theirs over it.
            if kind is CheckpointKind.DEVICE and mode == "checkpoint":
                before = session.length()
                with pytest.raises(NativeError, match="device copy of sequence 0 is gone"):
                    session.restore(saved)
                assert session.length() == before
                return
            # The CPU replays the log of a device's state while saving, with other roundings.
            moved = 1e-5 if places.current().gpu_layers else 0.0
            for _ in range(2):
                session.restore(saved)
                assert session.length() == length
                assert go_on(session, start[-1], 20) == want
                session.decode([want[0][-1]])
                assert np.allclose(trunk.logits(), logits, rtol=0, atol=moved)


@places.everywhere
@pytest.mark.parametrize("kind", KINDS)
def test_right_after_a_prompt_and_after_a_rejection(dial: Dial, kind: CheckpointKind) -> None:
    for hit in (1.0, 0.0):
        with prompted(dial("tiny", hit=hit)) as (session, _):
            token = session.argmax()
            if hit == 0.0:
                token = session.step(token)[-1]  # four drafts are not rolled back yet
            with session.save(kind) as saved:
                want = go_on(session, token, 12)
                session.restore(saved)
                assert go_on(session, token, 12) == want


@places.everywhere
def test_bytes_outlive_the_session(dial: Dial) -> None:
    path = dial("tiny")
    with prompted(path) as (session, _):
        start, _ = go_on(session, session.argmax(), 9)
        data = saved_bytes(session)
        want = go_on(session, start[-1], 20)
    for mode in MODES:
        with (
            opened_session(path, mode, DEPTH, n_seq_max=2) as (session, _),
            Checkpoint.from_bytes(data) as saved,
        ):
            assert saved.kind is CheckpointKind.WHOLE
            session.decode(PROMPT[::-1], 1)
            session.restore(saved, 1)
            assert go_on(session, start[-1], 20, 1) == want
            assert session.length(0) == 0
    # Without a head the trunk comes back; and what was saved so comes back with one.
    with opened_session(path, "two-phase", 0) as (session, _):
        restore_bytes(session, data)
        token = session.step(start[-1], 0)[0]
        assert token == want[0][1]
        headless = saved_bytes(session)
    with opened_session(path, "snapshot", DEPTH) as (session, _):
        restore_bytes(session, headless)
        assert go_on(session, token, 19)[0] == want[0][1:20]


@places.everywhere
@pytest.mark.parametrize("lookup", [0, 3])
def test_an_earlier_checkpoint_in_another_session(dial: Dial, lookup: int) -> None:
    """Restored after the whole text, it continues as in the session that made it."""
    path = dial("tiny")
    with prompted(path, lookup=lookup) as (session, _):
        start, _ = go_on(session, session.argmax(), 9)
        with session.save(CheckpointKind.HOST) as saved:
            earlier, length = saved.to_bytes(), saved.length
            go_on(session, start[-1], 20)
            data = saved_bytes(session)
            session.restore(saved)
            want = go_on(session, start[-1], 20)
    assert any(count > 1 for count in want[1])
    for mode in MODES:
        with (
            opened_session(path, mode, DEPTH, n_seq_max=2, lookup=lookup) as (session, _),
            Checkpoint.from_bytes(data) as later,
            Checkpoint.from_bytes(earlier) as saved,
        ):
            assert (saved.kind, saved.length) == (CheckpointKind.HOST, length)
            session.decode(PROMPT)
            session.restore(later, 1)
            assert not session.can_restore(saved, 1)
            with pytest.raises(NativeError, match="have been removed"):
                session.restore(saved, 1)
            with pytest.raises(NativeError, match=f"at most the 20 tokens .*, found {length}"):
                session.attach(saved, 0)
            session.attach(saved, 1)
            with pytest.raises(NativeError, match="expected one in host memory that was read"):
                session.attach(saved, 1)
            assert session.can_restore(saved, 1)
            assert not session.can_restore(saved, 0)
            for _ in range(2):
                session.restore(saved, 1)
                assert session.length(1) == length
                assert go_on(session, start[-1], 20, 1) == want
            session.remove(0, 1)
            assert not session.can_restore(saved, 1)
    # Without a head, or without one when it was saved, the text goes on all the same.
    with opened_session(path, "two-phase", 0) as (session, _):
        with Checkpoint.from_bytes(data) as later, Checkpoint.from_bytes(earlier) as saved:
            session.restore(later)
            session.attach(saved)
            session.restore(saved)
        headless = saved_bytes(session, CheckpointKind.HOST)
        assert [session.step(token, 0)[0] for token in want[0][:8]] == want[0][1:9]
        data = saved_bytes(session)
    with (
        opened_session(path, "snapshot", DEPTH, lookup=lookup) as (session, _),
        Checkpoint.from_bytes(data) as later,
        Checkpoint.from_bytes(headless) as saved,
    ):
        session.restore(later)
        session.attach(saved)
        session.restore(saved)
        assert go_on(session, start[-1], 8)[0][:8] == want[0][:8]


@places.there
def test_checkpoints_move_between_devices(dial: Dial, place: places.Place) -> None:
    """The text goes on, and so does the acceptance, which needs the head's rows."""
    path, cycle = dial("tiny"), dial.successors("tiny")
    for here, there in itertools.permutations((place, places.CPU)):
        with places.use(here), opened_session(path, "snapshot", DEPTH) as (session, _):
            session.decode(PROMPT)
            start, _ = go_on(session, session.argmax(), 9)
            data = saved_bytes(session)
            want = go_on(session, start[-1], 20)
        assert [cycle[t] for t in want[0][:-1]] == want[0][1:]
        with places.use(there), opened_session(path, "snapshot", DEPTH) as (session, _):
            restore_bytes(session, data)
            assert go_on(session, start[-1], 20) == want


@places.everywhere
def test_head_checkpoint(dial: Dial) -> None:
    """If the caller saves the trunk's state itself, acceptance continues as before."""
    with prompted(dial("tiny")) as (session, trunk):
        start, _ = go_on(session, session.argmax(), 9)
        with session.save(CheckpointKind.HEAD) as saved:
            state = trunk.state()
            want = go_on(session, start[-1], 20)
            with pytest.raises(NativeError, match=r"a trunk that holds its \d+ tokens, found"):
                session.restore(saved)
            trunk.set_state(state)
            session.restore(saved)
            assert go_on(session, start[-1], 20) == want


@places.everywhere
@pytest.mark.parametrize("mode", MODES)
def test_copies_of_sequences_are_independent(dial: Dial, mode: str) -> None:
    with prompted(dial("tiny"), mode, n_seq_max=3) as (session, trunk):
        start, _ = go_on(session, session.argmax(), 9)
        session.decode(PROMPT[:5], 2)
        session.copy(0, 2)  # with drafts that are not rolled back yet, onto a sequence in use
        session.copy(0, 0)
        assert session.length(2) == session.length(0)
        assert session.length(1) == 0
        with pytest.raises(NativeError, match="can roll back only 0 of"):
            session.remove(session.length(2) - 1, 2)
        want = go_on(session, start[-1], 20)
        other = (start[-1] + 1) % 700
        went_on = go_on(session, other, 12)
        assert go_on(session, start[-1], 20, 2) == want
        session.remove(0, 0)
        session.copy(2, 1)
        session.remove(0, 2)
        session.decode([want[0][-1]], 1)
        got = trunk.logits()
        session.decode(PROMPT)
        session.decode([*start[:-1], *want[0]])
    assert went_on[0][0] == other
    assert np.abs(got - trunk_logits(dial("tiny"), [*PROMPT, *start[:-1], *want[0]])).max() < 0.04


@places.everywhere
def test_a_copy_is_complete_immediately(dial: Dial) -> None:
    """It can be saved, or restored into, before anything else is decoded."""
    with prompted(dial("tiny"), "two-phase", n_seq_max=3) as (session, trunk):
        session.decode([*PROMPT[:3], PROMPT[0]], 1)
        other = session.save(seq=1)
        session.copy(0, 2)
        copied = session.save(seq=2)
        session.copy(0, 2)
        session.restore(other, 2)
        session.decode([7], 2)
        restored = trunk.logits()
        session.decode([7], 1)
        assert np.abs(restored - trunk.logits()).max() < SAME_BATCHES
        session.restore(copied, 1)
        session.decode([7], 1)
        got = trunk.logits()
        session.decode([7], 0)
        assert np.abs(got - trunk.logits()).max() < SAME_BATCHES


def trunk_logits(path: Path, tokens: list[int]) -> np.ndarray:
    with closing(Trunk(path, 0)) as trunk, Session(trunk.context, None, max_depth=0) as session:
        session.decode(tokens)
        return trunk.logits()


@places.everywhere
def test_a_checkpoint_can_be_restored_into_a_copy_of_its_sequence(dial: Dial) -> None:
    with prompted(dial("tiny"), n_seq_max=2) as (session, _):
        token = session.argmax()
        with session.save(CheckpointKind.HOST) as saved:
            want = go_on(session, token, 12)
            session.copy(0, 1)
            session.remove(0, 0)
            session.restore(saved, 1)
            assert go_on(session, token, 12, 1) == want
            with pytest.raises(NativeError, match="expected its 20 tokens in the sequence"):
                session.restore(saved, 0)


@places.everywhere
@pytest.mark.parametrize("kind", KINDS[:2])
def test_checkpoints_of_removed_tokens_are_rejected(dial: Dial, kind: CheckpointKind) -> None:
    with prompted(dial("tiny")) as (session, _), session.save(kind) as saved:
        session.remove(19)
        session.decode(PROMPT[19:])  # the very same token, and not the one of then
        for _ in range(2):
            with pytest.raises(NativeError, match=r"its 20 tokens .* have been removed"):
                session.restore(saved)
            assert session.length() == 20
            session.remove(0)
            session.decode(PROMPT)


def test_checkpoints_of_other_models_and_sizes_are_rejected(dial: Dial, models: Models) -> None:
    with prompted(dial("tiny")) as (session, _):
        data, head = saved_bytes(session), saved_bytes(session, CheckpointKind.HEAD)
        with pytest.raises(NativeError, match="found one that cannot leave its session"):
            saved_bytes(session, CheckpointKind.DEVICE)
        with (
            session.save(CheckpointKind.HOST) as saved,
            opened_session(dial("tiny"), "snapshot", DEPTH) as (other, _),
            pytest.raises(NativeError, match="have been removed"),
        ):
            other.restore(saved)
    for path in (dial("tiny", quant="Q8_0"), dial("tiny-3v"), models.gguf("dense-tied")):
        with opened_session(path, "snapshot", DEPTH) as (session, _):
            session.decode(PROMPT[:6])
            for given in (data, head):
                with pytest.raises(NativeError, match=r"expected one of this model \(\w{16}\), f"):
                    restore_bytes(session, given)
            assert session.length() == 6
    with opened_session(dial("tiny"), "snapshot", DEPTH, n_ctx=512) as (session, _):
        session.decode(PROMPT * 14)
        long = saved_bytes(session)
    with (
        opened_session(dial("tiny"), "snapshot", DEPTH) as (session, _),
        pytest.raises(ContextFullError, match=r"expected at most 256 tokens, .* found 280"),
    ):
        restore_bytes(session, long)


# Offsets of the header's fields, native/src/sequence_state.cpp.
LENGTH, TOKEN, FIRST, HIDDEN, ROWS, TRUNK, TEXT, LAYOUT = 24, 32, 40, 48, 56, 64, 72, 80
STATE_OF_DEPTH, RING, END = 88, 96, 104


@pytest.fixture(scope="module")
def whole(dial: Dial) -> bytes:
    with prompted(dial("tiny")) as (session, _):
        return saved_bytes(session)


def trunk_start(data: bytes) -> int:
    return END + sum(struct.unpack_from("<2q", data, HIDDEN))


def changed(offset: int, value: int, form: str = "<q") -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        copy = bytearray(data)
        struct.pack_into(
            form, copy, offset if offset >= 0 else trunk_start(data) - 1 - offset, value
        )
        return bytes(copy)

    return change


def with_ring(ring: bytes) -> Callable[[bytes], bytes]:
    """Adds tokens that follow the text."""
    return lambda data: changed(RING, len(ring))(data) + ring


def in_trunk(offset: int) -> int:
    """Marks an offset into the trunk's state: 0 is its first byte."""
    return -1 - offset


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: b"", "expected 104 bytes or more, found 0"),
        (lambda d: d[:103], "expected 104 bytes or more, found 103"),
        (lambda d: b"mtpstat4" + d[8:95], "expected 96 bytes or more, found 95"),
        (lambda d: b"mtpstat3" + d[8:87], "expected 88 bytes or more, found 87"),
        (lambda d: b"mtpstat1" + d[8:71], "expected 72 bytes or more, found 71"),
        (lambda d: d[:-1], r"\d+ \+ \d+ \+ \d+ \+ 0 \+ \d+ \+ 0 bytes after its header, found"),
        (changed(STATE_OF_DEPTH, -1), "bytes after its header"),
        (changed(RING, 8), "bytes after its header"),
        (with_ring(b"1234567"), "expected whole numbers, found a part of one"),
        (with_ring(struct.pack("<2i", 20, 7)), "rising positions below 20, found 7 at 20"),
        (with_ring(struct.pack("<4i", 3, 7, 3, 8)), "rising positions below 20, found 8 at 3"),
        (with_ring(struct.pack("<2i", 3, -1)), "rising positions below 20, found -1 at 3"),
        (lambda d: d + b"\0", r"bytes after its header, found"),
        (lambda d: b"GGUF" + d[4:], "expected the output of mtp_checkpoint_write"),
        (changed(LENGTH, 0), "length: expected 1 to 16777216, found 0"),
        (changed(LENGTH, -1), "length: expected 1 to 16777216, found -1"),
        (changed(LENGTH, 2**62), "length: expected 1 to 16777216, found 4611686018427387904"),
        (changed(LENGTH, 21), "position: expected 20, found only others"),
        (changed(TOKEN, -1), "token: expected 0 to 2147483647, found -1"),
        (changed(FIRST, 21), "head_first: expected 0 to 20, found 21"),
        (changed(FIRST, -1), "head_first: expected 0 to 20, found -1"),
        (changed(HIDDEN, -8), "bytes after its header"),
        (changed(ROWS, 2**63 - 1), "bytes after its header"),
        (changed(TRUNK, 0), "bytes after its header"),
        (changed(LAYOUT, 2**32 + 4), "trunk's layout: expected 0 to 3, and 0 to 2, found 4 and 1"),
        (
            changed(LAYOUT, 2**32),
            "position: expected each of 0 to 19 once, found|sequences of a cell",
        ),
        (changed(LAYOUT, 1), r"bytes: expected \d+, found \d+"),
        (changed(TEXT, 2**63 - 1), "bytes after its header"),
        (changed(TEXT, -1), "bytes after its header"),
        (changed(END, 0x7F800000, "<i"), "expected finite numbers"),
        (changed(in_trunk(8), 0, "<I"), "streams with cells: expected 1, found 0"),
        (changed(in_trunk(8), 2**32 - 1, "<I"), "streams with cells: expected 1, found|cells: exp"),
        (changed(in_trunk(12), 2**32 - 1, "<I"), "x and y: expected 0 to 19, found"),
        (changed(in_trunk(16), -1, "<i"), "position: expected each of 0 to 19 once, found -1"),
        (changed(in_trunk(16), 1, "<i"), "position: expected each of 0 to 19 once, found 1"),
        (changed(in_trunk(16), 20, "<i"), "position: expected each of 0 to 19 once, found 20"),
        (changed(in_trunk(20), 2, "<I"), "sequences of a cell: expected 1, found 2"),
        (changed(in_trunk(24), 20, "<i"), "x and y: expected 0 to 19, found 20 and 0"),
        (
            changed(in_trunk(16 + 19 * 24 + 8), 3, "<i"),
            "x and y: expected 19 to 19, found 3 and 19",
        ),
        (changed(in_trunk(16 + 20 * 24 + 4), 2**31, "<I"), "keys: expected"),
        (changed(in_trunk(16 + 20 * 24 + 12), 2**63, "<Q"), "keys: expected 9223372036854775808 x"),
    ],
)
def test_hostile_bytes(whole: bytes, change: Callable[[bytes], bytes], text: str) -> None:
    with pytest.raises(ModelRefusedError, match=f"checkpoint: .*{text}"):
        Checkpoint.from_bytes(change(whole))


def test_hostile_positions_in_one_dimension(tmp_path: Path) -> None:
    """Without pictures there is a cell for each position."""
    path = write_tiny_llama(tmp_path / "llama.gguf")
    with closing(Trunk(path, 0)) as trunk, Session(trunk.context, None) as session:
        session.decode([token % 128 for token in PROMPT])
        data = saved_bytes(session)
    for change, message in (
        (changed(in_trunk(16), 1, "<i"), "position: expected each of 0 to 19 once, found 1"),
        (
            changed(in_trunk(12), 19, "<I"),
            "position: expected 19, found only|cells: expected 20, found 19",
        ),
        (changed(LENGTH, 21), "position: expected 20, found only others"),
    ):
        with pytest.raises(ModelRefusedError, match=message):
            Checkpoint.from_bytes(change(data))


def recurrent(data: bytes) -> int:
    """Offset of the recurrent part in the trunk's state: found by its own beginning."""
    start = struct.pack("<IiI", 1, 19, 0)
    assert data.count(start, trunk_start(data)) == 1
    return data.index(start, trunk_start(data)) - trunk_start(data)


def test_hostile_bytes_of_the_recurrent_part(whole: bytes) -> None:
    at = recurrent(whole)
    for offset, value, text in (
        (at, 2, "recurrent cells: expected 1, found 2"),
        (at, 0, "recurrent cells: expected 1, found 0"),
        (at + 4, 18, "recurrent position: expected 19, found 18"),
        (at + 8, 1, "sequences of the recurrent cell: expected 0, found 1"),
    ):
        with pytest.raises(ModelRefusedError, match=text):
            Checkpoint.from_bytes(changed(in_trunk(offset), value, "<i")(whole))


@pytest.fixture(scope="module")
def host(dial: Dial) -> bytes:
    with prompted(dial("tiny"), lookup=DEPTH) as (session, _):
        return saved_bytes(session, CheckpointKind.HOST)


def sizes(data: bytes, **fields: int) -> bytes:
    """The header with other sizes of its parts, of the same sum."""
    offsets = {"hidden": HIDDEN, "rows": ROWS, "trunk": TRUNK, "text": TEXT}
    for name, value in fields.items():
        data = changed(offsets[name], value)(data)
    return data


def test_hostile_bytes_of_an_earlier_checkpoint(dial: Dial, models: Models, host: bytes) -> None:
    hidden, rows, trunk, text = struct.unpack_from("<4q", host, HIDDEN)
    assert rows == 0
    place = trunk_start(host) + trunk  # of the text: i64 next, right, wrong
    for data, message in (
        (changed(in_trunk(8), 2, "<i")(host), "recurrent cells: expected 1, found 2"),
        (changed(in_trunk(12), 18, "<i")(host), "recurrent position: expected 19, found 18"),
        (changed(in_trunk(16), 1, "<i")(host), "sequences of the recurrent cell: expected 0"),
        (changed(LENGTH, 21)(host), "recurrent position: expected 20, found 19"),
        (sizes(host, rows=2, trunk=trunk - 2), "without rows of the head, found others"),
        (sizes(host, trunk=0, hidden=hidden + trunk), "found others|expected finite numbers"),
        (sizes(host, trunk=trunk - 4, text=text + 4), "the text: expected"),
        (changed(place, 20)(host), "expected a place among its 20 tokens or none, found 20"),
        (changed(place, -2)(host), "expected a place among its 20 tokens or none, found -2"),
        (changed(LAYOUT, 3 << 32)(host)[:-1], "bytes after its header"),
    ):
        with pytest.raises(ModelRefusedError, match=message):
            Checkpoint.from_bytes(data)
    with (
        opened_session(dial("tiny"), "snapshot", DEPTH, lookup=DEPTH) as (session, _),
        Checkpoint.from_bytes(changed(TOKEN, 1024)(host)) as token,
        Checkpoint.from_bytes(changed(place, 15)(host)) as far,
    ):
        session.skip(30)  # a picture; the text that is drafted from starts behind it
        with pytest.raises(ModelRefusedError, match="expected a place among its 0 tokens"):
            session.attach(far)
        session.remove(0)
        session.decode(PROMPT)
        with pytest.raises(ModelRefusedError, match="a token below 1024 for the head"):
            session.attach(token)
        session.attach(far)
    for path in (dial("tiny", quant="Q8_0"), dial("tiny-3v")):
        with (
            opened_session(path, "snapshot", DEPTH) as (session, _),
            Checkpoint.from_bytes(host) as saved,
        ):
            session.decode(PROMPT)
            with pytest.raises(NativeError, match="expected one of this model"):
                session.attach(saved)


def test_random_damage_to_an_earlier_checkpoint(dial: Dial, host: bytes) -> None:
    rng = np.random.default_rng(6)
    end = trunk_start(host) + 400
    attached = 0
    with opened_session(dial("tiny"), "snapshot", DEPTH, lookup=DEPTH) as (session, _):
        for _ in range(200):
            data = bytearray(host)
            for _ in range(int(rng.integers(1, 4))):
                at = int(rng.integers(0, END if rng.random() < 0.3 else end))
                data[at if rng.random() < 0.7 else -1 - at % 1000] = int(rng.integers(0, 256))
            if session.length() != len(PROMPT):
                session.remove(0)
                session.decode(PROMPT)
            try:
                with Checkpoint.from_bytes(bytes(data)) as saved:
                    session.attach(saved)
                    attached += 1
                    session.restore(saved)
            except NativeError:
                assert session.length() in (0, len(PROMPT))
                continue
            go_on(session, 1, 6)
    assert attached > 20


def test_a_state_that_llama_cpp_rejects_empties_the_sequence(dial: Dial, whole: bytes) -> None:
    """llama.cpp compares the sizes and types of layers while it is already restoring."""
    at = recurrent(whole)
    for offset in (0, 16 + 20 * 24 + 8, at + 12, at + 16, at + 20):
        with prompted(dial("tiny")) as (session, _):
            want = go_on(session, session.argmax(), 12)
            with pytest.raises(NativeError, match="could not restore the state of sequence 0"):
                restore_bytes(session, changed(in_trunk(offset), 3, "<i")(whole))
            assert session.length() == 0
            session.decode(PROMPT)
            assert go_on(session, session.argmax(), 12) == want


def test_random_damage_never_crashes(dial: Dial, whole: bytes) -> None:
    """A short version of the fuzz target: the session stays usable after any damage."""
    rng = np.random.default_rng(5)
    end = trunk_start(whole) + 600
    with opened_session(dial("tiny"), "snapshot", DEPTH) as (session, _):
        for _ in range(120):
            data = bytearray(
                whole[: int(rng.integers(1, len(whole)))] if rng.random() < 0.1 else whole
            )
            for _ in range(int(rng.integers(1, 4))):
                at = int(rng.integers(0, END if rng.random() < 0.3 else end)) % len(data)
                data[at] = int(rng.integers(0, 256))
            with suppress(NativeError):
                restore_bytes(session, bytes(data))
            assert session.length() in (0, len(PROMPT))
        session.remove(0)
        session.decode(PROMPT)
        want = go_on(session, session.argmax(), 12)
        restore_bytes(session, whole)
        assert go_on(session, want[0][0], 12) == want


def test_a_head_of_another_size_in_the_bytes(dial: Dial, whole: bytes) -> None:
    with opened_session(dial("tiny"), "snapshot", DEPTH) as (session, _):
        session.decode(PROMPT[:6])
        text = "bytes of rows and a token below 1024 for"
        for change in (changed(FIRST, 3), changed(TOKEN, 1024)):
            with pytest.raises(ModelRefusedError, match=text):
                restore_bytes(session, change(whole))
        assert session.length() == 6


def test_arguments_are_checked(dial: Dial) -> None:
    with opened_session(dial("tiny"), "snapshot", DEPTH) as (session, _):
        with pytest.raises(NativeError, match="sequence 0: expected tokens to save, found none"):
            session.save()
        session.decode(PROMPT)
        for call, text in (
            (lambda: session.save(seq=1), "seq: expected 0 to 0, found 1"),
            (lambda: session.save(cast(CheckpointKind, 4)), "kind: expected 0 to 3, found 4"),
            (lambda: session.copy(0, 1), "seq: expected 0 to 0, found 1"),
            (lambda: session.copy(-1, 0), "seq: expected 0 to 0, found -1"),
        ):
            with pytest.raises(NativeError, match=text):
                call()
        saved = session.save()
        session.begin(session.argmax())
        for call in (session.save, lambda: session.restore(saved), lambda: session.copy(0, 0)):
            with pytest.raises(NativeError, match="a cycle is open"):
                call()
        session.end(0)
        saved.close()
        for use in (lambda: session.restore(saved), saved.to_bytes):
            with pytest.raises(NativeError, match="the checkpoint is closed"):
                use()


@places.everywhere
def test_a_head_has_one_session_and_two_sessions_do_not_mix(dial: Dial) -> None:
    """Two contexts with two heads, interleaved; a head that is in use is rejected."""
    path = dial("tiny")
    cycle = dial.successors("tiny")
    with (
        opened_session(path, "snapshot", DEPTH) as (first, trunk),
        opened_session(path, "checkpoint", DEPTH) as (second, _),
    ):
        with pytest.raises(NativeError, match="head: expected one that no session uses"):
            Session(trunk.context, first.head, max_depth=DEPTH)
        texts = []
        for session, prompt in ((first, PROMPT), (second, PROMPT[::-1])):
            session.decode(prompt)
            texts.append([session.argmax()])
        for _ in range(12):
            for session, text in zip((first, second), texts, strict=True):
                text.extend(session.step(text[-1]))
        for text in texts:
            assert [cycle[t] for t in text[:-1]] == text[1:]
        head = first.head
        first.close()
        with Session(trunk.context, head, max_depth=DEPTH) as again:
            again.remove(0)
            again.decode(PROMPT)
            assert go_on(again, again.argmax(), 12)[0][:12] == texts[0][:12]


def test_a_closed_head_is_named(dial: Dial) -> None:
    with closing(Trunk(dial("tiny"), DEPTH)) as trunk:
        head = Head(dial("tiny"), n_ctx=llama_cpp.llama_n_ctx_seq(trunk.context), n_threads=1)
        with Session(trunk.context, head, max_depth=DEPTH) as session:
            session.decode(PROMPT)
            head.close()
            with pytest.raises(NativeError, match="the head is closed"):
                session.step(1)
