"""Drafts from the text over a random walk of a session, against a naive reference."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from mtp_gguf.native.head import Head
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Rollback, Session
from support.lookup_walk import SEQUENCES, Walk
from support.native_trunk import Trunk

DEPTH, LOOKUP = 2, 12


@pytest.mark.parametrize(
    ("steps", "seeds"), [(700, 1), pytest.param(5_000, 5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("mode", [Rollback.SNAPSHOT, Rollback.HOST])
def test_drafts_are_those_of_the_reference(
    dial: Any, mode: Rollback, steps: int, seeds: int
) -> None:
    """Prompts, also empty ones, cycles, rollbacks, copies and checkpoints, up to full contexts.

    pytest -m slow tests/native/test_lookup_walk.py runs 25,000 steps in each mode.
    """
    path = dial("tiny")
    snapshots = LOOKUP if mode is Rollback.SNAPSHOT else 0
    for seed in range(seeds):
        with closing(Trunk(path, snapshots, n_ctx=256, n_seq_max=SEQUENCES)) as trunk:
            n_ctx = llama_cpp.llama_n_ctx_seq(trunk.context)
            with (
                Head(path, n_ctx=n_ctx, n_threads=1, n_seq_max=SEQUENCES) as head,
                Session(
                    trunk.context, head, max_depth=DEPTH, rollback=mode, max_lookup=LOOKUP
                ) as session,
            ):
                walk = Walk(session, n_ctx, seed, DEPTH)
                walk.run(steps)
        counts = walk.counts
        assert counts["drafted"] > steps
        events = ("full", "empty", "removed", "emptied", "copied", "HOST", "WHOLE")
        assert min(counts[event] for event in events) > 0, counts
