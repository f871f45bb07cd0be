"""Depth auto in a real session: the same text, and a head that resumes after not drafting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.native import MTPLlama
from mtp_gguf.native.errors import NativeError
from mtp_gguf.native.head import Head
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Depth, Rollback, Session
from support.native_trunk import Trunk

PROMPT = [int(t) for t in np.random.PCG64(2).random_raw(20) % np.uint64(700)]


@contextmanager
def opened(path: Path, mode: str = "snapshot", depth: int = 4) -> Iterator[Session]:
    with closing(Trunk(path, depth if mode == "snapshot" else 0)) as trunk:
        n_ctx = llama_cpp.llama_n_ctx_seq(trunk.context)
        with (
            Head(path, n_ctx=n_ctx, n_threads=1) as head,
            Session(trunk.context, head, max_depth=depth, rollback=Rollback.parse(mode)) as session,
        ):
            yield session


def generate(session: Session, n: int, depth: Depth = "auto") -> list[int]:
    tokens = [session.argmax()]
    while len(tokens) < n:
        tokens += session.step(tokens[-1], depth)
    return tokens


@pytest.mark.parametrize("mode", ["snapshot", "checkpoint", "two-phase", "host"])
def test_the_text_is_that_of_plain_decoding(dial: Any, mode: str) -> None:
    cycle = dial.successors("tiny")
    with opened(dial("tiny"), mode) as session:
        session.decode(PROMPT)
        tokens = generate(session, 120)
        assert session.length() == len(PROMPT) + len(tokens) - 1
    assert [cycle[t] for t in tokens[:-1]] == tokens[1:]


def test_known_costs_decide(dial: Any) -> None:
    """Told that verification is free, it drafts; told that it is dear, it does not."""
    with opened(dial("tiny", hit=1.0)) as session:
        session.set_costs([10.0] * 5, [0.01] * 4)
        session.decode(PROMPT)
        session.step(session.argmax(), "auto")
        assert session.stats().drafted == (1, 1, 1, 1)
    with opened(dial("tiny", hit=1.0)) as session:
        session.set_costs([10.0, 1e3, 1e4, 1e5, 1e6], [1.0] * 4)
        session.decode(PROMPT)
        session.step(session.argmax(), "auto")
        assert session.stats().drafted == ()
        with pytest.raises(NativeError, match="0 or more milliseconds"):
            session.set_costs([-1.0], [])


def test_the_head_resumes_after_not_drafting(dial: Any) -> None:
    """On random weights, where a draft depends on all rows: 90 tokens without drafts, then some."""
    path = dial.models.gguf("dense-tied")
    text = [int(t) for t in np.random.PCG64(5).random_raw(90) % np.uint64(900)]
    with opened(path) as session:
        session.decode([*PROMPT, *text])
        want = session.begin(7, 4)
        session.end(0)
    for pauses in ([], [30], [10, 11, 60]):
        with opened(path) as session:
            session.decode(PROMPT)
            for i, token in enumerate(text):
                drafts = session.begin(token, 2 if i in pauses else 0)
                assert len(drafts) == (2 if i in pauses else 0)
                session.row(0)
                session.end(0)
            assert session.begin(7, 4) == want
            session.end(0)


@pytest.mark.parametrize("options", [{}, {"temp": 0.9}, {"temp": 0.9, "repeat_penalty": 1.2}])
def test_in_mtp_llama(dial: Any, options: dict[str, Any]) -> None:
    """Greedy, by rejection sampling and by equality: it runs, and greedy text is the cycle."""
    with MTPLlama(
        str(dial("tiny")), depth="auto", max_depth=3, n_ctx=256, n_threads=1, n_threads_batch=1
    ) as llm:
        stream = llm.generate(PROMPT, **{"temp": 0.0, **options})
        written = [(next(stream), llm.token_origin) for _ in range(60)]
        stream.close()
        stats = llm.mtp_stats
    assert stats.tokens >= 59
    assert max(origin for _, origin in written) <= 3
    drafted = sum(1 for _, origin in written if origin)
    assert abs(drafted - sum(stats.accepted)) <= 3  # of the last cycle some were not taken
    if not options:
        cycle = dial.successors("tiny")
        tokens = [token for token, _ in written]
        assert [cycle[t] for t in tokens[:-1]] == tokens[1:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 17}, 'depth: expected 0 to 16 or "auto", found 17'),
        ({"depth": "auto", "max_depth": 17}, "max_depth: expected 0 to 16, found 17"),
        ({"depth": "much"}, "depth: expected 0 to 16"),
    ],
)
def test_invalid_options_are_refused(dial: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(NativeError, match=message):
        MTPLlama(str(dial("tiny")), n_ctx=64, **options)


def test_each_sequence_has_a_choice_of_its_own(dial: Any) -> None:
    """Drafts of the one are always right, of the other never; costs are the same for both."""
    path = dial("tiny", hit=1.0)
    with closing(Trunk(path, 4, n_seq_max=2)) as trunk:
        n_ctx = llama_cpp.llama_n_ctx_seq(trunk.context)
        with (
            Head(path, n_ctx=n_ctx, n_seq_max=2, n_threads=1) as head,
            Session(trunk.context, head, max_depth=4) as session,
        ):
            # Measured times decide otherwise if the machine is busy; these outweigh a few of them.
            for _ in range(50):
                session.set_costs([1.0, 1.1, 1.2, 1.3, 1.4], [0.1, 0.15, 0.2, 0.25])
            drafted: list[list[int]] = [[], []]
            for seq in range(2):
                session.decode(PROMPT, seq)
            for _ in range(40):
                for seq in range(2):
                    drafts = session.begin(7, "auto", seq)
                    drafted[seq].append(len(drafts))
                    accepted = 0 if seq else len(drafts)
                    for row in range(accepted + 1):
                        session.row(row)
                    session.end(accepted)
    assert sum(drafted[0][20:]) > 30
    assert sum(drafted[1][20:]) < 10
