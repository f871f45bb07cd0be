"""The acceptance that a file states is what all of our programs count.

While they generate, only with a synthetic model, whose head is right equally often in any text. A
trained head's acceptance depends on the text, so there the server is asked at the corpus's places.
"""

from __future__ import annotations

import json
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from mtp_gguf.convert.heads import acceptance as measuring
from mtp_gguf.gguf_tools.heads.acceptance import Acceptance, Counts, read_stored
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native.checks.acceptance import accepted_drafts, places_of
from mtp_gguf.native.llama.mtp_llama import MTPLlama
from support.commands import invoke, succeed
from support.models import DEMO, Dial
from support.real_server import Server, counts, drafts_of, tokens_of

pytestmark = [pytest.mark.server, pytest.mark.thorough]

ANSWER = 60  # tokens after each passage


def while_generating(model: Path) -> tuple[list[list[int]], Counts, list[list[int]]]:
    """The prompts of the corpus, first drafts while MTPLlama answers them, and the answers."""
    with closing(
        MTPLlama(str(model), depth=1, lookup=False, profile=False, n_ctx=512, n_threads=1)
    ) as llm:
        prompts = [prompt for prompt, _ in places_of(llm)]
        texts = [
            list(islice(llm.generate(prompt, temp=0.0, repeat_penalty=1.0), ANSWER))
            for prompt in prompts
        ]
        stats = llm.mtp_stats
    return prompts, Counts(stats.drafted[:1], stats.accepted[:1]), texts


def served(server: Server, model: Path, prompts: list[list[int]]) -> tuple[Counts, list[list[int]]]:
    """First drafts and answers of llama-server."""
    options = ("--depth", 1, "--no-lookup")
    results = server.answers(model, prompts, options=options, n_predict=ANSWER)
    drafted, accepted = drafts_of(results)
    return Counts((drafted,), (accepted,)), tokens_of(results)


def stated_by(model: Path) -> Acceptance:
    """What a file states."""
    with open_model(model) as opened:
        stated = read_stored(opened).acceptance
    assert stated is not None
    return stated


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """`convert` measures the acceptance, by the same chains on a busy machine, too."""
    monkeypatch.setenv(measuring.VARIABLE, "1")
    monkeypatch.setattr(measuring, "_SECONDS", 300.0)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("hit", [0.4, 0.7])
def test_all_programs_count_what_the_file_states(
    hit: float, server: Server, dial: Dial, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    source = dial.checkpoint("tiny", hit)
    converted = json.loads(succeed("convert", source, "-o", model, "--mtp-f16", "--json"))
    stated = stated_by(model)
    assert converted["acceptance"][str(model)]["share"] == stated.share
    doctor = json.loads(invoke("doctor", model, "--load", "--json").stdout)
    assert doctor["measured_acceptance"]["share"] == stated.share

    prompts, python, texts = while_generating(model)
    counted, answers = served(server, model, prompts)
    assert answers == texts
    low, high = stated.greedy.interval(0)
    print(f"stated {stated.share:.3f} ({low:.3f} to {high:.3f}), {python} {counted}")
    for rate in (*python.rates, *counted.rates, hit):
        assert low <= rate <= high
    # A session also drafts in the last cycle, where the server has no room left.
    assert abs(python.drafted[0] - counted.drafted[0]) <= len(prompts)
    assert abs(python.accepted[0] - counted.accepted[0]) <= len(prompts)


@pytest.mark.usefixtures("measured")
def test_the_server_counts_what_the_file_of_a_trained_head_states(
    server: Server, tmp_path: Path
) -> None:
    """A draft of the server follows one token of its own, which may not be the text's."""
    model = tmp_path / "model.gguf"
    succeed("convert", DEMO, "-o", model, "--mtp-f16")
    stated = stated_by(model)
    accepted, of_the_text = [], 0
    with (
        closing(MTPLlama(str(model), depth=1, profile=False, n_ctx=512, n_threads=1)) as llm,
        server.running(model, options=("--depth", 1, "--no-lookup")) as client,
    ):
        for prompt, places in places_of(llm):
            llm.session.remove(0)
            llm.session.decode(prompt)
            for number, token in enumerate(places):
                result = client.complete([*prompt, *places[:number]], n_predict=3)
                drafted, right = counts(result)
                assert drafted == 1
                accepted.append(right)
                here = accepted_drafts(llm.session, token, 1, sampled=False)
                if result["tokens"][0] == token:  # the place is one that the file was measured at
                    assert right == here
                    of_the_text += 1
    low, high = stated.greedy.interval(0)
    found = sum(accepted) / len(accepted)
    print(f"stated {stated.share:.3f} ({low:.3f} to {high:.3f}), server {found:.3f}")
    assert of_the_text >= 20
    assert low <= found <= high
