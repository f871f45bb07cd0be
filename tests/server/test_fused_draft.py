"""Drafts of one graph (patches/) against those of llama.cpp's own steps, and what they survive."""

from __future__ import annotations

import difflib
import itertools
import re
from pathlib import Path

import pytest

from support import places
from support.models import Dial, Files
from support.native_trunk import opened_session
from support.real_server import (
    DEPTH,
    LEAST_ACCEPTED,
    PROMPTS,
    STEPS,
    TEXTS,
    TOKENS,
    Server,
    at_once,
    certain,
    check_beginnings,
    counts,
    drafted,
    drafts_of,
    in_layout,
    post,
    tokens_of,
)

pytestmark = pytest.mark.server

# Of two drivers' drafts: one leaves out those at the end of a text that the other makes and throws
# away (seen: 0.94), and on a GPU rounding may turn one at a near tie.
LEAST_ALIKE = 0.85
OPTIONS = ("--spec-draft-n-max", DEPTH)
IN_ONE_GRAPH = "in one graph on "
# Options that put trunk and head on the CPU (there is no GPU, or it is left out), or on the GPU.
everywhere = pytest.mark.parametrize(
    "layers", [0, pytest.param(places.ALL, id="gpu", marks=pytest.mark.gpu)]
)
LONG = "".join(TEXTS) * 4  # longer than a checkpoint's distance


def weights_mib(log: str) -> float:
    """Of the model in all buffers, as llama.cpp counts them when it loads."""
    return sum(map(float, re.findall(r"model buffer size = +([\d.]+) MiB", log)))


@pytest.mark.sample(1)
@everywhere
@pytest.mark.parametrize("layout", ["plain", "ids", "table", "sidecar"])
def test_both_drivers_draft_alike(
    layout: str, layers: int, server: Server, files: Files, tmp_path: Path
) -> None:
    device = places.require_gpu() if layers else "CPU"
    model, options = in_layout(files, layout, "demo", tmp_path), (*OPTIONS, "-ngl", layers)
    seen: list[tuple[list[list[int]], list[tuple[int, int]], list[int]]] = []
    for driver in ([], [STEPS]):
        with server.running(model, *driver, options=options, verbose=True) as client:
            results = at_once(client, TEXTS, 1)
        assert (f"{IN_ONE_GRAPH}{device}" in client.log()) == (not driver)
        seen.append((tokens_of(results), [*map(counts, results)], drafted(client.log())))
    (texts, found, one_graph), (want_texts, want, steps) = seen
    assert texts == want_texts
    if not layers:
        plain = server.answers(model, TEXTS, options=["--no-draft"])
        assert texts == tokens_of(plain)
    offered, accepted = map(sum, zip(*found, strict=True))
    assert accepted > LEAST_ACCEPTED * offered
    if layers or layout == "ids":  # llama.cpp's own driver has no list that follows the text
        assert accepted == pytest.approx(sum(right for _, right in want), rel=0.05)
    else:
        assert found == want
    assert len(one_graph) > len(TEXTS) * TOKENS / 2
    alike = difflib.SequenceMatcher(None, one_graph, steps, autojunk=False).ratio()
    assert alike >= LEAST_ALIKE


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["tiny-3v", "tiny-moe"])
@pytest.mark.parametrize("layout", ["plain", "ids", "table", "sidecar"])
def test_text_and_acceptance_are_the_cpus(
    layout: str, shape: str, server: Server, files: Files, dial: Dial, tmp_path: Path
) -> None:
    """Of a trunk whose choices have no near ties, and a head that is often right."""
    device = places.require_gpu()
    model = in_layout(files, layout, dial.checkpoint(shape), tmp_path)
    cycle = dial.successors(shape)
    found: list[list[tuple[list[int], tuple[int, int]]]] = []
    for layers, place in ((0, "CPU"), (places.ALL, device)):
        options = (*OPTIONS, "-ngl", layers)
        with server.running(model, options=options, verbose=True) as client:
            results = at_once(client, PROMPTS, 1)
        said = client.log()
        assert f"{IN_ONE_GRAPH}{place}" in said
        assert ("hidden states of 1 of 1 sequences stay on the device" in said) == (layers > 0)
        weights = [*map(float, re.findall(r"in one graph on \S+ \(weights ([\d.]+) MiB", said))]
        shares = layers > 0 and layout == "plain"  # the trunk's output, once that is loaded
        assert (weights[-1] < weights[0]) == shares
        found.append([(result["tokens"], counts(result)) for result in results])
    on_cpu, on_gpu = found
    assert on_gpu == on_cpu
    assert all(cycle[a] == b for tokens, _ in on_cpu for a, b in itertools.pairwise(tokens))
    assert sum(accepted for _, (_, accepted) in on_cpu) > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("driver", [(), (STEPS,)], ids=["one graph", "steps"])
@pytest.mark.parametrize("spec", ["dense-3v", "next-unfused"])
def test_drafts_follow_from_the_text_alone(
    spec: str, driver: tuple[str, ...], server: Server, files: Files
) -> None:
    """They are those of a new session, whatever the slot did before and whatever was rejected.

    With random weights every draft depends on all of the head's rows. Qwen3-Next restores a copy of
    its state after a rejected draft and decodes the accepted tokens again.
    """
    model, prompt = files("plain", spec), PROMPTS[3]
    passed = ("--parallel", 1, *driver)
    with server.running(model, *passed, options=OPTIONS, verbose=True) as client:
        client.complete(PROMPTS[2])
        text = [*prompt, *client.complete(prompt)["tokens"]]
    follow_from(text, len(prompt), model, client.log(), skips=spec == "next-unfused")


def follow_from(text: list[int], last: int, model: Path, log: str, *, skips: bool) -> None:
    """The drafts of the last request are those of a new session after the same text.

    last: the token of `text` that the first draft begins with. skips: after a rejected draft there
    is a cycle without drafts.
    """
    found = iter(drafted(log.rsplit("launch_slot_", 1)[1]))
    cycles = 0
    with opened_session(model, "checkpoint", DEPTH) as (session, _):
        while last + DEPTH + 1 < len(text):  # after that there is no room for all drafts
            session.decode(text[:last])
            want = session.begin(text[last], DEPTH)
            session.end(0)
            session.remove(0)
            assert [*itertools.islice(found, DEPTH)] == want, cycles
            right = itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(want, text[last + 1 :], strict=False)
            )
            accepted = len([*right])
            last += accepted + 1 + (skips and accepted < DEPTH)
            cycles += 1
    assert cycles > TOKENS / 4


def test_drafts_after_a_checkpoint(server: Server, files: Files) -> None:
    """It has the hidden state before the first new token; the text is short, so that it matters."""
    model, prompt = files("plain", "dense-3v"), [5, 6, 7, 8, 9, 10, 11, 12, 13]
    passed = ("--parallel", 1, "--cache-ram", 0)
    with server.running(model, *passed, options=OPTIONS, verbose=True) as client:
        client.complete(prompt)
        prompt = [*prompt[:7], 700, 3]
        text = [*prompt, *client.complete(prompt)["tokens"]]
    assert "restored context checkpoint" in client.log()
    follow_from(text, len(prompt), model, client.log(), skips=False)


@pytest.mark.thorough
def test_the_head_is_in_memory_once(server: Server, files: Files) -> None:
    """The model beside it takes what it takes where nothing drafts, and less than for the steps.

    A head that cannot be run by itself (of a cache in other types) leaves the model its layer.
    """
    other = ("--spec-draft-type-k", "q8_0")
    sizes: list[float] = []
    for options, passed in (
        (["--no-draft"], ()),
        (OPTIONS, ()),
        (OPTIONS, (STEPS,)),
        (OPTIONS, other),
    ):
        more = (*passed, "--load-mode", "none")
        with server.running(files("plain"), *more, options=options, verbose=True) as client:
            assert ("draft_n" in client.complete(TEXTS[0])["timings"]) == bool(sizes)
        sizes.append(weights_mib(client.log()))
    without, in_one_graph, in_steps, refused = sizes
    assert 0 < without == in_one_graph < in_steps == refused


@pytest.mark.thorough
def test_an_unlikely_draft_is_not_offered(server: Server, files: Files) -> None:
    answers = [
        server.answers(files("ids", "demo"), TEXTS, "--spec-draft-p-min", p_min, options=OPTIONS)
        for p_min in (0.0, 0.5, 1.1)
    ]
    assert tokens_of(answers[0]) == tokens_of(answers[1]) == tokens_of(answers[2])
    offered, accepted = zip(*map(drafts_of, answers[:2]), strict=True)
    assert 0 < offered[1] < offered[0]
    assert accepted[1] / offered[1] > accepted[0] / offered[0]
    assert not any("draft_n" in result["timings"] for result in answers[2])


def test_a_cached_prompt_brings_its_head_along(server: Server, files: Files) -> None:
    """A prompt that left its only slot for the cache in memory is drafted on as it was before.

    With random weights every draft depends on all of the head's rows.
    """
    prompts = [list(range(40, 300)), list(range(500, 800))] * 2
    passed = ("--parallel", 1)
    with server.running(files("ids"), *passed, options=OPTIONS, verbose=True) as client:
        results = at_once(client, prompts, 1)
    assert all(result["timings"]["cache_n"] > 0 for result in results[2:])
    tokens = iter(drafted(client.log()))
    drafts = [list(itertools.islice(tokens, counts(result)[0])) for result in results]
    assert min(map(len, drafts)) > TOKENS
    assert drafts[:2] == drafts[2:]


@pytest.mark.sample(1)
@pytest.mark.parametrize("slots", [2, 8])
def test_slots_share_the_graph_and_draft_as_alone(slots: int, server: Server, files: Files) -> None:
    """The same texts, as far as no near tie is in them, and the same acceptance as one slot has.

    With a list that does not follow the texts, which all slots would share. Each prompt comes
    three times, so that slots have it already.
    """
    asked = (files("table", "demo"), TEXTS)
    plain = server.answers(*asked, options=["--no-draft"], n_predict=48, n_probs=2)
    alone = server.answers(*asked, options=OPTIONS, n_predict=48)
    passed = ("--parallel", slots)
    with server.running(asked[0], *passed, options=OPTIONS, verbose=True) as client:
        together = at_once(client, TEXTS * 3, slots, n_predict=48)
    beginnings = [certain(result) for result in plain]
    assert sum(map(len, beginnings)) > len(TEXTS) * TOKENS / 2  # there is something to compare
    check_beginnings(beginnings * 3, together)
    offered, accepted = drafts_of(together)
    offered_alone, accepted_alone = drafts_of(alone)
    assert accepted / offered == pytest.approx(accepted_alone / offered_alone, rel=0.05)
    said = re.findall(r"drafting for (\d+) sequences in one graph", client.log())
    graphs = [*map(int, said)]
    assert slots // 2 <= max(graphs) <= slots  # on a busy machine answers overlap less
    assert len(graphs) < offered / DEPTH  # fewer than with a graph for each draft


@everywhere
def test_several_answers_to_one_prompt(layers: int, server: Server, files: Files) -> None:
    """The slots of the other answers get the prompt's rows, too."""
    options = (*OPTIONS, "-ngl", layers)
    passed = (files("ids", "demo"), "--parallel", 4)
    with server.running(*passed, options=options, verbose=True) as client:
        alone = client.complete(LONG, cache_prompt=False)
        body = {"prompt": LONG, "n_predict": TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"n_cmpl": 4, "return_tokens": True}
        _, answers = post(client.port, "/completion", body)
    assert [answer["tokens"] for answer in answers] == [alone["tokens"]] * 4
    assert [counts(answer) for answer in answers] == [counts(alone)] * 4
    said = "hidden states of 4 of 4 sequences stay on the device"
    assert (said in client.log()) == (layers > 0)


def test_a_slot_from_a_file_starts_anew(server: Server, files: Files, tmp_path: Path) -> None:
    passed = ("--parallel", 1, "--cache-ram", 0, "--slot-save-path", f"{tmp_path}/")
    with server.running(files("ids", "demo"), *passed, options=OPTIONS) as client:
        want = client.complete(LONG)["tokens"]
        for action, between in (("save", TEXTS[1]), ("restore", LONG)):
            body = {"filename": "slot"}
            assert post(client.port, f"/slots/0?action={action}", body)[0] == 200
            found = client.complete(between)["tokens"]
        assert found == want
