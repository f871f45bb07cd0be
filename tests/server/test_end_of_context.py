"""A full context ends an answer at the same token and for the same reason, drafting or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.models import Dial
from support.real_server import STEPS, Server, post

pytestmark = pytest.mark.server

CONTEXT = 256
LENGTHS = range(CONTEXT - 40, CONTEXT)  # of prompts
SIZE = ("--ctx-size", CONTEXT, "--parallel", 1)


def endings(port: int, cycle: dict[int, int]) -> tuple[list[Any], int]:
    """For each prompt the tokens and the end of its answer; the number of accepted drafts."""
    text = [next(iter(cycle))]
    while len(text) < 2 * CONTEXT:
        text.append(cycle[text[-1]])
    found, accepted = [], 0
    for length in LENGTHS:
        start = length - LENGTHS[0]  # so that the context ends at other tokens, drafted or missed
        body = {
            "prompt": text[start : start + length],
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
        }
        _, result = post(port, "/completion", body)
        found.append([result[key] for key in ("tokens", "stop_type", "truncated")])
        accepted += result["timings"].get("draft_n_accepted", 0)
    return found, accepted


@pytest.fixture(scope="module")
def expected(server: Server, dial: Dial) -> list[Any]:
    """How answers end without drafting: one token is generated that no position is left for."""
    with server.running(dial("tiny"), *SIZE, options=["--no-draft"]) as client:
        found, _ = endings(client.port, dial.successors("tiny"))
    for length, (tokens, stop, truncated) in zip(LENGTHS, found, strict=True):
        assert (len(tokens), stop, truncated) == (CONTEXT - length, "limit", True)
    return found


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("sessions", [False, True], ids=["", "sessions"])
@pytest.mark.parametrize("depth", [*range(1, 9), "steps"])
def test_drafts_do_not_end_it_earlier(
    depth: int | str,
    sessions: bool,
    expected: list[Any],
    server: Server,
    dial: Dial,
    tmp_path: Path,
) -> None:
    options = ["--depth", 3 if depth == "steps" else depth]
    passed = [*SIZE, *([STEPS] if depth == "steps" else [])]
    passed += ["--session-dir", tmp_path] if sessions else []
    with server.running(dial("tiny"), *passed, options=options) as client:
        found, accepted = endings(client.port, dial.successors("tiny"))
    assert accepted > 0
    assert found == expected
