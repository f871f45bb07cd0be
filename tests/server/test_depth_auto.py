"""`--spec-draft-n-max auto` (patches/): the text stays, the depth follows what drafts are worth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.models import Files
from support.real_server import (
    PROMPTS,
    STEPS,
    TEXTS,
    answers,
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


def chosen(log: Path) -> dict[int, list[int]]:
    """Of each slot the drafts that were offered in its cycles, from a log at high verbosity."""
    out: dict[int, list[int]] = {}
    said = log.read_text("utf-8", "replace")  # it quotes tokens, and those are bytes
    found = re.findall(r"seq_id (\d+), chosen depth \d+, offered (\d+)", said)
    for seq, offered in found:
        out.setdefault(int(seq), []).append(int(offered))
    return out


def verbose(log: Path) -> Sequence[object]:
    return ("--log-file", log, "--verbosity", 10)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layout", "more"),
    [("plain", ("--spec-draft-p-min", 0.5)), ("table", ()), ("ids", ("--spec-draft-n-min", 2))],
)
def test_the_text_is_that_of_no_drafting(
    layout: str, more: Sequence[object], patched_server: Path, files: Files, free_port: int
) -> None:
    asked = (patched_server, files(layout, "demo"), free_port, TEXTS)
    want = tokens_of(answers(*asked, options=["--no-draft"], n_predict=80))
    results = answers(*asked, *more, options=AUTO, n_predict=80)
    assert tokens_of(results) == want
    offered, accepted = drafts_of(results)
    assert 0 < accepted <= offered


def test_four_slots_choose_for_themselves(
    patched_server: Path, files: Files, tmp_path: Path, free_port: int
) -> None:
    model, log = files("ids", "demo"), tmp_path / "log"
    asked = (patched_server, model, free_port)
    plain = answers(*asked, TEXTS, options=["--no-draft"], n_probs=2)
    results = answers(*asked, TEXTS * 3, *verbose(log), options=AUTO, slots=4)
    check_beginnings([certain(result) for result in plain] * 3, results)
    slots = chosen(log)
    assert set(slots) == {0, 1, 2, 3}
    assert all(max(offered) > 0 for offered in slots.values())


def test_a_head_that_is_never_right_is_left_alone(
    patched_server: Path, dial: Any, tmp_path: Path, free_port: int
) -> None:
    log = tmp_path / "log"
    asked = (patched_server, dial(hit=0.0), free_port, PROMPTS[2:3])
    want = answers(*asked, options=["--no-draft"], n_predict=LONG)
    results = answers(*asked, *verbose(log), options=AUTO, n_predict=LONG)
    assert tokens_of(results) == tokens_of(want)
    (offered,) = chosen(log).values()
    assert len(offered) > LONG - 10  # no token came of a draft
    later = offered[WARM:]
    assert later.count(0) > 0.9 * len(later)


def test_a_head_that_is_always_right_drafts_deep(
    patched_server: Path, dial: Any, tmp_path: Path, free_port: int
) -> None:
    """The policy measures what drafts cost, so a busy machine gets three tries."""
    asked = (patched_server, dial("tiny-24", hit=1.0), free_port, PROMPTS[2:3])
    want = answers(*asked, options=["--no-draft"], n_predict=LONG)
    depths = []
    for attempt in range(3):
        log = tmp_path / f"log{attempt}"
        results = answers(*asked, *verbose(log), options=AUTO, n_predict=LONG)
        assert tokens_of(results) == tokens_of(want)
        (offered,) = chosen(log).values()
        assert max(offered) <= MOST
        later = offered[len(offered) // 2 : -1]  # at its end a text has no room
        depths.append(sum(later) / len(later))
        if depths[-1] > 2:
            assert drafts_of(results) == (sum(offered), sum(offered))
            return
    pytest.fail(f"mean depths {depths}, expected more than 2 in one of them")


def test_a_maximum_depth_can_be_given(
    patched_server: Path, dial: Any, tmp_path: Path, free_port: int
) -> None:
    log = tmp_path / "log"
    passed = (*verbose(log), "--spec-draft-n-max", "auto:2")
    asked = (patched_server, dial(hit=1.0), free_port, PROMPTS[2:3])
    answers(*asked, *passed, options=AUTO, n_predict=100)
    (offered,) = chosen(log).values()
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
    options: Sequence[str], patched_server: Path, files: Files
) -> None:
    said = refusal(patched_server, "-m", files("plain"), *options, *AUTO)
    assert "--spec-draft-n-max auto: takes --spec-type draft-mtp with drafts in one graph" in said
    assert "give a number" in said


@pytest.mark.parametrize("value", ["auto:0", "auto:", "auto:x", "automatic", "-1"])
def test_other_words_are_refused(value: str, patched_server: Path, files: Files) -> None:
    said = refusal(patched_server, "-m", files("plain"), "--spec-draft-n-max", value)
    assert "--spec-draft-n-max" in said
