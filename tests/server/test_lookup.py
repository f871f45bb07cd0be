"""`--spec-type lookup` (patches/): drafts from a slot's own text, with a head and without one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.models import Files
from support.real_server import certain, counts, running

pytestmark = pytest.mark.server

WORDS = ("one two three four", "red green blue grey", "north east south west", "am are is was")
TEXTS = [f"{words} " * 12 for words in WORDS]  # the demo model goes on with the repetition


@pytest.mark.parametrize("options", [(), ("--depth", 2), ("--no-draft",)])
def test_the_text_is_that_of_no_drafting(
    options: tuple[Any, ...], patched_server: Path, files: Files, free_port: int
) -> None:
    """With depth auto, a fixed depth, and without a head; and drafts are accepted."""
    model = files("plain", "demo")
    with running(patched_server, model, free_port, options=["--no-draft"]) as client:
        want = [client.complete(text, n_predict=60)["tokens"] for text in TEXTS]
    with running(patched_server, model, free_port, options=["--lookup", *options]) as client:
        results = [client.complete(text, n_predict=60) for text in TEXTS]
    assert [result["tokens"] for result in results] == want
    drafting = [counts(result) for result in results if "draft_n" in result["timings"]]
    offered, accepted = (sum(column) for column in zip(*drafting, strict=True))
    assert 30 < accepted <= offered


# Each is llama-server's own sampler chain; drafts are accepted if they equal what it samples.
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repeat_penalty": 1.02, "top_k": 20},
    "grammar": {"grammar": "root ::= [a-z ]*"},
}


@pytest.mark.parametrize("how", SAMPLING)
def test_sampled_texts_are_those_of_no_drafting(
    how: str, patched_server: Path, files: Files, free_port: int
) -> None:
    """Seed by seed, so the distribution is the same, too."""
    model = files("plain", "demo")
    both: list[list[list[int]]] = []
    offered = accepted = 0
    for options in (["--no-draft"], ["--lookup"], ["--lookup", "--no-draft"]):
        texts = []
        with running(patched_server, model, free_port, options=options) as client:
            for seed in range(12):
                sampled = {"temperature": 0.6, "seed": seed, "n_predict": 60, **SAMPLING[how]}
                result = client.complete(TEXTS[seed % len(TEXTS)], **sampled)
                texts.append(result["tokens"])
                if "draft_n" in result["timings"]:
                    one = counts(result)
                    offered, accepted = offered + one[0], accepted + one[1]
        both.append(texts)
    assert both[0] == both[1] == both[2]
    assert 10 < accepted < offered


def test_four_slots_at_once(patched_server: Path, files: Files, free_port: int) -> None:
    """Each goes on with its own text."""
    model = files("plain", "demo")
    with running(patched_server, model, free_port, options=["--no-draft"]) as client:
        want = [certain(client.complete(text, n_probs=2)) for text in TEXTS]
    options = ["--lookup", "--no-draft", "--parallel", 4]
    with (
        running(patched_server, model, free_port, options=options) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        for _ in range(3):  # the slots change places, and prompts come from the cache
            results = list(pool.map(client.complete, TEXTS))
            for tokens, result in zip(want, results, strict=True):
                assert result["tokens"][: len(tokens)] == tokens


def test_no_slot_sees_the_text_of_another(
    patched_server: Path, files: Files, free_port: int
) -> None:
    """The end of one slot's text, in another slot: it has no earlier occurrence there."""
    model = files("plain", "demo")
    options = ["--lookup", "--no-draft", "--parallel", 4]
    with running(patched_server, model, free_port, options=options) as client:
        assert client.complete(TEXTS[0], n_predict=24, id_slot=0)["timings"]["draft_n"] > 0
        prompt = list(range(300, 306))
        follows = client.complete(prompt, n_predict=1, id_slot=0)["tokens"][0]
        assert follows not in prompt
        client.complete([*prompt, follows, 400, 401, 402], n_predict=1, id_slot=0)
        for slot in (1, 2, 3, 0):  # the first slot has forgotten what it held
            other = client.complete(prompt, n_predict=2, id_slot=slot)
            assert other["tokens"][0] == follows  # which 400 followed in the first slot
            assert "draft_n" not in other["timings"]


def test_a_file_without_a_head(patched_server: Path, files: Files, free_port: int) -> None:
    """Its recurrent state is rolled back, although nothing asks for that but the text."""
    with running(
        patched_server, files("base", "demo"), free_port, options=["--no-draft"]
    ) as client:
        want = client.complete(TEXTS[0], n_predict=60)["tokens"]
    with running(
        patched_server, files("base", "demo"), free_port, options=["--no-draft", "--lookup"]
    ) as client:
        result = client.complete(TEXTS[0], n_predict=60)
    assert result["tokens"] == want
    assert result["timings"]["draft_n_accepted"] > 10
