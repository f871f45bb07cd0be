"""The state of depth auto in checkpoints: restored, the choices go on; damaged, it is refused."""

from __future__ import annotations

import struct
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest

from mtp_gguf.gguf_tools.profile import AUTO
from mtp_gguf.native import NativeError
from mtp_gguf.native.checkpoint import Checkpoint, CheckpointKind
from mtp_gguf.native.depth import DepthChooser, Outcome
from mtp_gguf.native.errors import ModelRefusedError
from support.native_trunk import opened_session

MOST = 4
# Offsets of fields, native/src/depth/depth_state.cpp.
VERSION, FLAGS, RATE, PROBES, TRIALS, BUCKETS, SEGMENTS = 0, 4, 8, 16, 24, 32, 128
SEGMENT = 8 * 33  # a weight, and two numbers for each of 16 positions
PROMPT = list(range(5, 25))


def cycles(choosers: list[DepthChooser], rng: np.random.Generator, n: int, chance: float) -> Any:
    """Run n cycles of all choosers with the same outcomes; the depths, and what was kept."""
    chosen = []
    for _ in range(n):
        depths = {chooser.plan(MOST) for chooser in choosers}
        assert len(depths) == 1
        depth = depths.pop()
        probabilities = rng.uniform(0.2, 1, depth).tolist()
        kept = {chooser.keep(probabilities) for chooser in choosers}
        assert len(kept) == 1
        verified = kept.pop()
        right = rng.random(depth) < chance
        accepted = int(np.argmin([*right[:verified], False]))
        unverified = verified < depth and accepted == verified
        outcome = Outcome(
            probabilities,
            verified,
            accepted,
            float(right[verified]) if unverified else None,
            *(float(ms) for ms in rng.normal([2.0 * depth, 10 + verified, 3], 0.2).clip(0.1)),
        )
        for chooser in choosers:
            chooser.report(outcome)
        chosen.append((depth, verified))
    return chosen


@pytest.mark.parametrize("chance", [0.1, 0.6, 0.95])
def test_a_restored_chooser_chooses_the_same(chance: float) -> None:
    rng = np.random.default_rng(1)
    with closing(DepthChooser(MOST)) as one, closing(DepthChooser(MOST)) as other:
        cycles([one], rng, 200, chance)
        state = one.state()
        other.set_state(state)
        assert other.state() == state
        went = cycles([one, other], rng, 300, chance)
        assert other.state() == one.state()
        assert len(state) < 128 << 10
        with closing(DepthChooser(MOST)) as fresh:  # which has to learn it
            rng = np.random.default_rng(2)
            assert cycles([fresh], rng, 300, chance) != went


def test_costs_that_were_measured_here_are_kept() -> None:
    rng = np.random.default_rng(1)
    with closing(DepthChooser(MOST)) as one, closing(DepthChooser(MOST)) as other:
        cycles([one], rng, 100, 0.9)
        other.set_costs([10.0, 10.1, 10.2, 10.3, 10.4], [0.1] * MOST)  # not measured
        other.set_state(one.state())
        assert other.state() == one.state()
    with closing(DepthChooser(MOST)) as one, closing(DepthChooser(MOST)) as other:
        cycles([one], rng, 100, 0.9)
        for _ in range(9):
            other.report_batch(3, 7.0)
        other.set_state(one.state())
        again = other.state()
        assert again != one.state()
        acceptance = slice(RATE, SEGMENTS + SEGMENT)
        assert again[acceptance] == one.state()[acceptance]


def put(state: bytes, offset: int, value: float, form: str = "<d") -> bytes:
    copy = bytearray(state)
    struct.pack_into(form, copy, offset, value)
    return bytes(copy)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("offset", "value", "form", "text"),
    [
        (VERSION, 2, "<I", "version: expected 1 to 1, found 2"),
        (FLAGS, 16, "<I", "flags: expected 0 to 15, found 16"),
        (RATE, NAN, "<d", "rate of a trial: expected 0 to 1e.300, found .*nan"),
        (PROBES, -1, "<d", "debt of probes: expected 0 to 32, found -1"),
        (TRIALS, INF, "<d", "debt of trials: expected 0 to 32, found inf"),
        (BUCKETS, -0.5, "<d", "right drafts: expected"),
        (BUCKETS + 8, NAN, "<d", "wrong drafts: expected"),
        (SEGMENTS, 0, "<I", "segments: expected 1 to 12, found 0"),
        (SEGMENTS, 2**32 - 1, "<I", "segments: expected 1 to 12, found 4294967295"),
        (SEGMENTS + 4, 0.99, "<d", "weights of segments: expected a sum of 1"),
        (SEGMENTS + 4, NAN, "<d", "weight of a segment: expected"),
        (SEGMENTS + 12, -1, "<d", "accepted drafts: expected"),
        (SEGMENTS + 12 + 128, -1, "<d", "drafts: expected"),
    ],
)
def test_a_forged_state_is_refused(offset: int, value: float, form: str, text: str) -> None:
    rng = np.random.default_rng(3)
    with closing(DepthChooser(MOST)) as one, closing(DepthChooser(MOST)) as other:
        cycles([one], rng, 60, 0.7)
        cycles([other], rng, 5, 0.7)
        before = other.state()
        with pytest.raises(ModelRefusedError, match=f"the state of a depth chooser: .*{text}"):
            other.set_state(put(one.state(), offset, value, form))
        assert other.state() == before


def test_any_damage_leaves_a_chooser_that_chooses() -> None:
    rng = np.random.default_rng(4)
    with closing(DepthChooser(MOST)) as one:
        cycles([one], rng, 80, 0.7)
        good = one.state()
        for size in range(0, len(good), 7):
            with pytest.raises(ModelRefusedError):
                one.set_state(good[:size])
        with pytest.raises(ModelRefusedError, match="expected its end, found 1 more bytes"):
            one.set_state(good + b"x")
    for _ in range(400):
        data = bytearray(good)
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        with closing(DepthChooser(MOST)) as other:
            with suppress(ModelRefusedError):
                other.set_state(bytes(data))
            for depth, kept in cycles([other], rng, 3, 0.5):
                assert 0 <= kept <= depth <= MOST
            with closing(DepthChooser(MOST)) as again:
                again.set_state(other.state())


@pytest.mark.parametrize("lookup", [0, 3])
def test_a_session_in_another_context_goes_on_as_it_was(dial: Any, lookup: int) -> None:
    """Also in the cycle that is reported only when the next one begins."""
    path = dial("tiny", hit=0.6)
    with opened_session(path, "snapshot", MOST, lookup=lookup) as (session, _):
        session.decode(PROMPT)
        token = session.argmax()
        for _ in range(30):
            token = session.step(token, AUTO)[-1]
        with session.save() as saved:
            data = saved.to_bytes()
    with opened_session(path, "snapshot", MOST, lookup=lookup) as (session, _):
        with Checkpoint.from_bytes(data, borrow=True) as saved:
            session.restore(saved)
        with session.save() as saved:
            assert saved.to_bytes() == data


def test_a_checkpoint_in_the_same_session_restores_it(dial: Any) -> None:
    with opened_session(dial("tiny", hit=0.6), "snapshot", MOST) as (session, _):
        session.decode(PROMPT)
        token = session.argmax()
        for _ in range(10):
            token = session.step(token, AUTO)[-1]
        with session.save(CheckpointKind.HOST) as here, session.save() as whole:
            before = whole.to_bytes()
            for _ in range(10):
                token = session.step(token, AUTO)[-1]
            session.restore(here)
        with session.save() as saved:
            after = saved.to_bytes()
    # the costs that were measured since then stay
    start = len(before) - struct.unpack_from("<q", before, 88)[0]
    state = 8 + 4 + 12 + 8 + 4 + 4 + 8 + 64  # the machine and the last cycle
    acceptance = slice(start, start + state + SEGMENTS)
    assert after[acceptance] == before[acceptance]


def test_damaged_states_of_the_last_cycle_are_refused(dial: Any) -> None:
    with opened_session(dial("tiny"), "snapshot", MOST) as (session, _):
        session.decode(PROMPT)
        session.step(session.argmax(), AUTO)
        with session.save() as saved:
            data = saved.to_bytes()
        start = len(data) - struct.unpack_from("<q", data, 88)[0] + 8
        for offset, value, form, text in (
            (0, 8, "<I", "flags of a cycle: expected 0 to 7, found 8"),
            (4, 17, "<i", "drafted tokens: expected 0 to 16, found 17"),
            (8, 16, "<i", "verified tokens: expected 0 to"),
            (12, 16, "<i", "accepted tokens: expected -1 to"),
            (16, NAN, "<d", "time of rolling back: expected"),
            (24, NAN, "<f", "expected probabilities from 0 to 1"),
            (28, -2, "<i", "first draft that was not verified: expected"),
            (32, -1, "<q", "end of a cycle: expected"),
            (40, NAN, "<f", "expected probabilities from 0 to 1"),
        ):
            with pytest.raises(NativeError, match=f"the state of the depth: .*{text}"):
                Checkpoint.from_bytes(put(data, start + offset, value, form))
