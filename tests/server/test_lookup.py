"""`--spec-type lookup` (patches/): drafts from a slot's own text, with a head and without one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native.lookup_files import Corpus
from mtp_gguf.native.vocabulary import Vocabulary
from support.chi_square import far_off, two_samples
from support.models import Dial, Files
from support.real_server import Server, certain, check_beginnings, drafts_of, refusal, tokens_of

pytestmark = pytest.mark.server

WORDS = ("one two three four", "red green blue grey", "north east south west", "am are is was")
TEXTS = [f"{words} " * 12 for words in WORDS]  # the demo model goes on with the repetition


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("plain", ()),
        ("plain", ("--depth", 2)),
        ("plain", ("--no-draft",)),
        ("base", ("--no-draft",)),
    ],
)
def test_the_text_is_that_of_no_drafting(
    layout: str, options: tuple[Any, ...], server: Server, files: Files
) -> None:
    """With depth auto, a fixed depth, and without a head; and drafts are accepted.

    Recurrent states are rolled back, although nothing asks for that but the text.
    """
    asked = (files(layout, "demo"), TEXTS)
    want = tokens_of(server.answers(*asked, options=["--no-draft"], n_predict=60))
    results = server.answers(*asked, options=["--lookup", *options], n_predict=60)
    assert tokens_of(results) == want
    offered, accepted = drafts_of(results)
    assert 30 < accepted <= offered


# Each is llama-server's own sampler chain; drafts are accepted if they equal what it samples.
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repeat_penalty": 1.02, "top_k": 20},
    "grammar": {"grammar": "root ::= [a-z ]*"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("how", SAMPLING)
def test_sampled_texts_are_those_of_no_drafting(how: str, server: Server, files: Files) -> None:
    """Seed by seed, so the distribution is the same, too.

    The fixed depth drafts whatever the times, which decide on a busy machine.
    """
    sampled = {"temperature": 0.6, "n_predict": 60, **SAMPLING[how]}

    def asked(*options: object) -> list[dict[str, Any]]:
        with server.running(files("plain", "demo"), options=options) as client:
            return [
                client.complete(TEXTS[seed % len(TEXTS)], seed=seed, **sampled)
                for seed in range(12)
            ]

    want = tokens_of(asked("--no-draft"))
    offered = accepted = 0
    for drafting in (["--depth", 3], [], ["--no-draft"]):
        results = asked("--lookup", *drafting)
        assert tokens_of(results) == want
        offered, accepted = map(sum, zip((offered, accepted), drafts_of(results), strict=True))
    assert 10 < accepted < offered


def test_four_slots_at_once(server: Server, files: Files) -> None:
    """Each goes on with its own text."""
    model = files("plain", "demo")
    plain = server.answers(model, TEXTS, options=["--no-draft"], n_probs=2)
    # The slots change places, and prompts come from the cache.
    results = server.answers(model, TEXTS * 3, options=["--lookup", "--no-draft"], slots=4)
    check_beginnings([certain(result) for result in plain] * 3, results)


def test_no_slot_sees_the_text_of_another(server: Server, files: Files) -> None:
    """The end of one slot's text, in another slot: it has no earlier occurrence there."""
    model = files("plain", "demo")
    options = ["--lookup", "--no-draft", "--parallel", 4]
    with server.running(model, options=options) as client:
        assert client.complete(TEXTS[0], n_predict=24, id_slot=0)["timings"]["draft_n"] > 0
        prompt = list(range(300, 306))
        follows = client.complete(prompt, n_predict=3, id_slot=0)["tokens"]
        assert len({*prompt, *follows[:2]}) == len(prompt) + 2  # nothing to draft from
        client.complete([*prompt, follows[0], 400, 401, 402], n_predict=1, id_slot=0)
        for slot in (1, 2, 3, 0):  # the first slot has forgotten what it held
            other = client.complete(prompt, n_predict=3, id_slot=slot)
            assert other["tokens"] == follows
            assert "draft_n" not in other["timings"]  # as of 400, which was in the first slot


def written_index(model: Path, folder: Path, *texts: str) -> Path:
    """An index of texts for the vocabulary of a model."""
    path = folder / "texts.index"
    with Vocabulary(model) as vocabulary:
        tokens = [vocabulary.encode(text, special=False).tolist() for text in texts]
        fingerprint, size = vocabulary.fingerprint(), vocabulary.size
    Corpus.write(path, tokens, n_vocab=size, tokenizer=fingerprint)
    return path


@pytest.mark.thorough
def test_lookup_files_are_drafted_from_by_all_slots(
    server: Server, files: Files, tmp_path: Path
) -> None:
    """The prompt is too short to repeat anything, so only the file can have what follows it."""
    model = files("plain", "demo")
    prompt = "def is_prime(n):\n"
    with server.running(model, options=["--no-draft", "--lookup"]) as client:
        want = client.complete(prompt)
    assert want["timings"].get("draft_n_accepted", 0) < 8
    text = tmp_path / "text.py"
    text.write_text(prompt + want["content"])
    for options in (("--no-draft", "--parallel", 4), ("--depth", 2), ()):
        given = ["--lookup-file", text, *options]
        slots = range(4) if "--parallel" in options else (0,)
        with server.running(model, options=given) as client:
            for slot in slots:  # measured times decide which drafts are taken, so each has tries
                accepted = []
                for _ in range(4):
                    result = client.complete(prompt, id_slot=slot)
                    assert result["tokens"] == want["tokens"]
                    accepted.append(result["timings"].get("draft_n_accepted", 0))
                assert max(accepted) >= 8 or "--no-draft" not in options, accepted


def test_indexes_that_do_not_fit_are_refused(server: Server, files: Files, tmp_path: Path) -> None:
    """Before anything is served, in one sentence."""
    model = files("plain", "demo")
    index = written_index(model, tmp_path, "some text", "another one")
    good = index.read_bytes()

    def said(raw: bytes | None, *options: object) -> str:
        path = tmp_path / "given.index"
        path.unlink(missing_ok=True)
        if raw is not None:
            path.write_bytes(raw)
        log = refusal(server.program, "-m", model, *options, "--spec-lookup-index", path)
        (line,) = [line for line in log.splitlines() if "speculative decoding context: " in line]
        return line

    alone = ("--spec-type", "lookup")
    assert "cannot be opened" in said(None, *alone)
    assert "found another kind of file" in said(model.read_bytes()[:4096], *alone)
    assert "found a size that is not the one in its header" in said(good[:-4], *alone)
    assert "content has changed" in said(good[:60] + b"\1" + good[61:], *alone)
    other = written_index(files("plain"), tmp_path, "some text")
    assert "found one of another tokenizer" in said(other.read_bytes(), *alone)
    for types in ("none", "ngram-mod", "draft-mtp"):
        found = said(good, "--spec-type", types)
        assert "--spec-lookup-index: expected --spec-type lookup" in found
    stepwise = ("--spec-type", "draft-mtp,lookup", "--no-spec-draft-fused")
    assert "--spec-lookup-index: expected --spec-type lookup" in said(good, *stepwise)


@pytest.mark.thorough
@pytest.mark.parametrize("draws", [300, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("drafting", "passed"),
    [
        (["--lookup", "--no-draft"], ()),
        # A list that is made at load, and changes as the text grows.
        (["--depth", 2], ("--spec-draft-n-vocab", 120)),
    ],
)
def test_drafts_keep_the_distribution_of_samples(
    drafting: list[object], passed: tuple[object, ...], draws: int, server: Server, dial: Dial
) -> None:
    """Other seeds with drafts than without, so that equal texts do not hide a fault.

    pytest -m slow tests/server/test_lookup.py compares 20,000 draws of six tokens.
    """
    cycle = dial.successors("tiny")
    text = [7]
    while len(text) < 60:
        text.append(cycle[text[-1]])
    prompt = [*text, *text[:6]]  # a draft follows, which is right in most cases, but not in all
    model = dial("tiny", gain=0.25)
    sampled = {"temperature": 1.0, "top_k": 6, "n_predict": 6, "id_slot": 0}
    sides: list[Counter[tuple[int, ...]]] = []
    for side, options in enumerate((["--no-draft"], drafting)):
        with server.running(model, *(passed if side else ()), options=options) as client:
            results = [
                client.complete(prompt, seed=2 * seed + side, **sampled) for seed in range(draws)
            ]
        sides.append(Counter(tuple(result["tokens"]) for result in results))
    offered, accepted = drafts_of(results)
    assert offered > draws / 4  # measured times decide when a draft pays
    assert 0.2 < accepted / offered < 0.98
    for part in (*(slice(i, i + 1) for i in range(6)), slice(0, 2), slice(0, 6)):
        parts: list[Counter[Any]] = [Counter(), Counter()]
        for seen, of_part in zip(sides, parts, strict=True):
            for tokens, count in seen.items():
                of_part[tokens[part]] += count
        statistic, freedom = two_samples(*parts)
        assert freedom >= 1
        assert not far_off(statistic, freedom), (part, statistic, freedom)
