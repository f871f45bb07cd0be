"""Sessions and llama-server's slots have one driver: the drafts of each cycle are the same.

The server's log has the drafts of each cycle; a session then verifies the same text in the same
steps. Measured times may decide how many drafts a cycle has, so the session is asked for as many.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from typing import Any

import pytest

from mtp_gguf.native.session import Session
from support.models import Files
from support.native_trunk import know_costs, opened_session
from support.real_server import DEPTH, PROMPTS, Server, drafts_of

pytestmark = pytest.mark.server

LOOKUP = 14  # tokens that llama-server drafts from the text at most
LONG = 64
MADE = 512  # tokens of a draft vocabulary that is made at load, whose end follows the text
FIXED = ("--spec-draft-n-max", DEPTH)
HEAD_TYPE = "--spec-draft-head-type"
SAID = re.compile(
    r"seq_id (\d+), (?:draft candidate +0, pos +\d+: +(\d+)|chosen depth \d+, offered (\d+))"
)
Cycles = list[list[int]]


def cycles_in(log: str) -> dict[int, Cycles]:
    """The drafts that were offered in each cycle, by slot."""
    found: dict[int, Cycles] = {}
    drafts: dict[int, list[int]] = {}
    for slot, token, offered in SAID.findall(log):
        if token:
            drafts.setdefault(int(slot), []).append(int(token))
        else:
            found.setdefault(int(slot), []).append(drafts.pop(int(slot), [])[: int(offered)])
    return found


def verify(
    session: Session, prompt: Sequence[int], tokens: Sequence[int], cycles: Cycles, *, text: bool
) -> tuple[int, int]:
    """Verify a text in the server's cycles: the drafts that were offered and those accepted.

    text: the drafts come from the text, and the session offers as many as it finds.
    """
    session.decode(prompt[session.length() :])
    assert session.argmax() == tokens[0]
    at = accepted = 0
    for drafts in cycles:
        if text:
            know_costs(session, LOOKUP, 0.01)  # then it offers all that it finds
        found = session.begin(tokens[at], 0 if text else len(drafts))
        assert found[: len(drafts)] == drafts, at
        assert text or len(found) == len(drafts)
        follow = list(zip(drafts, tokens[at + 1 :], strict=False))
        right = len([*takewhile(lambda pair: pair[0] == pair[1], follow)])
        for row in range(right + 1):
            session.row(row)
        session.end(right)
        at, accepted = at + right + 1, accepted + right
    assert at >= len(tokens) - 2  # for the last tokens there is no room for drafts
    return sum(map(len, cycles)), accepted


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("spec", "options", "passed"),
    [
        ("dense-3v", FIXED, ()),
        ("demo", FIXED, ()),
        ("demo", FIXED, ("--spec-draft-n-max", f"auto:{DEPTH}")),
        ("demo", FIXED, ("--spec-draft-p-min", 0.5)),
        ("demo", ("--no-draft", "--lookup"), ()),
        ("demo", FIXED, ("--spec-draft-n-vocab", MADE)),
        ("demo", FIXED, (HEAD_TYPE, "Q2_K")),  # drafts otherwise than the stored head
    ],
)
def test_a_slot_drafts_as_a_session(
    spec: str, options: Sequence[object], passed: Sequence[object], server: Server, files: Files
) -> None:
    """Over two requests, of which the second goes on with the first one's text."""
    model, text = files("plain", spec), "--lookup" in options
    requests: list[tuple[list[int], dict[str, Any]]] = []
    how = {"options": options, "verbose": True}
    with server.running(model, "--parallel", 1, *passed, **how) as client:
        prompt = [*PROMPTS[2], *PROMPTS[2][:40]]
        for more in ([700, 3], []):
            requests.append((prompt, client.complete(prompt, n_predict=LONG)))
            prompt = [*prompt, *requests[-1][1]["tokens"], *more]
    parts = client.log().split("launch_slot_")
    said = [part for part in parts if SAID.search(part)]
    made = MADE if MADE in passed else 0
    if made:
        assert f"drafts over {MADE} of 4096 tokens" in parts[0]
        assert "the model has no draft vocabulary" in parts[0]
        assert f"the last {MADE * 5 // 8} of them follow the text" in parts[0]
    lookup = LOOKUP if text else 0
    mtp_type = "Q2_K" if HEAD_TYPE in passed else None
    opened = opened_session(
        model, "snapshot", DEPTH, 512, lookup=lookup, fastmtp_size=made, mtp_type=mtp_type
    )
    with opened as (session, _):
        for (prompt, result), part in zip(requests, said, strict=True):
            cycles = cycles_in(part)[0]
            found = verify(session, prompt, result["tokens"], cycles, text=text)
            assert found[0] > LONG / 8 or passed  # measured times, or probabilities, decide
            assert found == drafts_of([result])


def test_slots_that_share_batches_draft_as_sessions(server: Server, files: Files) -> None:
    model, slots = files("plain", "demo"), 4
    with (
        server.running(model, "--parallel", slots, options=FIXED, verbose=True) as client,
        ThreadPoolExecutor(slots) as pool,
    ):
        prompts = [[i + 5, *PROMPTS[2]] for i in range(slots)]
        asked = [
            pool.submit(partial(client.complete, n_predict=LONG, id_slot=slot), prompt)
            for slot, prompt in enumerate(prompts)
        ]
        results = [request.result() for request in asked]
    cycles = cycles_in(client.log())
    assert max(map(int, re.findall(r"drafting for (\d+) seq", client.log()))) > 1
    for slot, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        with opened_session(model, "snapshot", DEPTH, 512) as (session, _):
            found = verify(session, prompt, result["tokens"], cycles[slot], text=False)
        assert found == drafts_of([result])
