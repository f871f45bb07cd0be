"""`--spec-draft-n-max auto` (patches/): the text stays, the depth follows what drafts are worth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.depth_file import VARIABLE
from support.models import Dial, Files
from support.real_server import (
    PROMPTS,
    STEPS,
    TEXTS,
    Server,
    at_once,
    certain,
    check_beginnings,
    drafts_of,
    refusal,
    tokens_of,
)

pytestmark = pytest.mark.server

AUTO = ("--spec-draft-n-max", "auto")
MOST = 4  # that auto drafts
LONG = 400  # tokens, enough to find out
WARM = 100  # of its cycles, in which it finds out


def chosen(log: str) -> dict[int, list[int]]:
    """Of each slot the drafts that were offered in its cycles, from a log at high verbosity."""
    out: dict[int, list[int]] = {}
    for seq, offered in re.findall(r"seq_id (\d+), chosen depth \d+, offered (\d+)", log):
        out.setdefault(int(seq), []).append(int(offered))
    return out


def offered_to(
    server: Server, model: Path, *passed: object, tokens: int = LONG
) -> tuple[list[int], list[dict[str, Any]]]:
    """The drafts offered in each cycle of one slot, and the answers to a prompt."""
    with server.running(model, *passed, options=AUTO, verbose=True) as client:
        results = at_once(client, PROMPTS[2:3], 1, n_predict=tokens)
    (offered,) = chosen(client.log()).values()
    return offered, results


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layout", "more"),
    [("plain", ("--spec-draft-p-min", 0.5)), ("table", ()), ("ids", ("--spec-draft-n-min", 2))],
)
def test_the_text_is_that_of_no_drafting(
    layout: str, more: Sequence[object], server: Server, files: Files
) -> None:
    asked = (files(layout, "demo"), TEXTS)
    want = tokens_of(server.answers(*asked, options=["--no-draft"], n_predict=80))
    results = server.answers(*asked, *more, options=AUTO, n_predict=80)
    assert tokens_of(results) == want
    offered, accepted = drafts_of(results)
    assert 0 < accepted <= offered


def test_four_slots_choose_for_themselves(server: Server, files: Files) -> None:
    model = files("ids", "demo")
    plain = server.answers(model, TEXTS, options=["--no-draft"], n_probs=2)
    with server.running(model, "--parallel", 4, options=AUTO, verbose=True) as client:
        results = at_once(client, TEXTS * 3, 4)
    check_beginnings([certain(result) for result in plain] * 3, results)
    slots = chosen(client.log())
    assert set(slots) == {0, 1, 2, 3}
    assert all(max(offered) > 0 for offered in slots.values())


def test_a_head_that_is_never_right_is_left_alone(server: Server, dial: Dial) -> None:
    model = dial(hit=0.0)
    want = server.answers(model, PROMPTS[2:3], options=["--no-draft"], n_predict=LONG)
    offered, results = offered_to(server, model)
    assert tokens_of(results) == tokens_of(want)
    assert len(offered) > LONG - 10  # no token came of a draft
    later = offered[WARM:]
    assert later.count(0) > 0.9 * len(later)


def test_a_head_that_is_always_right_drafts_deep(server: Server, dial: Dial) -> None:
    """The policy measures what drafts cost, so a busy machine gets three tries."""
    model = dial("tiny-24", hit=1.0)
    want = server.answers(model, PROMPTS[2:3], options=["--no-draft"], n_predict=LONG)
    depths = []
    for _ in range(3):
        offered, results = offered_to(server, model)
        assert tokens_of(results) == tokens_of(want)
        assert max(offered) <= MOST
        later = offered[len(offered) // 2 : -1]  # at its end a text has no room
        depths.append(sum(later) / len(later))
        if depths[-1] > 2:
            assert drafts_of(results) == (sum(offered), sum(offered))
            return
    pytest.fail(f"mean depths {depths}, expected more than 2 in one of them")


def test_a_maximum_depth_can_be_given(server: Server, dial: Dial) -> None:
    passed = ("--spec-draft-n-max", "auto:2")
    offered, _ = offered_to(server, dial(hit=1.0), *passed, tokens=100)
    assert max(offered) == 2


@pytest.mark.parametrize(
    "options",
    [
        ("--spec-type", "draft-mtp", STEPS),
        ("--spec-type", "draft-mtp", "-ctkd", "q8_0"),
        ("--spec-type", "ngram-simple"),
    ],
)
def test_without_drafts_in_one_graph_there_is_a_sentence(
    options: Sequence[str], server: Server, files: Files
) -> None:
    said = refusal(server.program, "-m", files("plain"), *options, *AUTO)
    assert "--spec-draft-n-max auto: takes --spec-type draft-mtp with drafts in one graph" in said
    assert "give a number" in said


@pytest.mark.parametrize("value", ["auto:0", "auto:", "auto:x", "automatic", "-1"])
def test_other_words_are_refused(value: str, server: Server, files: Files) -> None:
    said = refusal(server.program, "-m", files("plain"), "--spec-draft-n-max", value)
    assert "--spec-draft-n-max" in said


def test_a_server_goes_on_as_the_last_one_ended(
    server: Server, dial: Dial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It remembers what it has learned, in a file that `serve` chooses."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = dial("tiny", hit=0.0)
    drafts, texts = [], []
    for depth in ("auto", "auto", "2"):
        with server.running(model, options=("--depth", depth)) as client:
            result = client.complete([5, 6, 7, 8], n_predict=120)
        texts.append(result["tokens"])
        drafts.append(result["timings"].get("draft_n", 0))
    assert texts[0] == texts[1] == texts[2]
    assert drafts[1] <= 2 < drafts[0]
    files = list((tmp_path / "mtp-gguf" / "depth").iterdir())
    assert [file.suffix for file in files] == [".depth"]  # a fixed depth learns nothing
