"""`n_probs`, `logprobs`, `top_logprobs`: drafts change no value, and streams have all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from support.llama_libraries import has_kernels
from support.models import Files
from support.real_server import STEPS, Server, chunks_of, opened

pytestmark = pytest.mark.server

TOKENS = 48
# Rounding depends on the size of the batch, unless the kernels of patches/ run.
CLOSE = 1e-6 if has_kernels() else 0.05
TEXT = "for name in names:\n    print(name)\nfor name in names:\n    print(name)\n"
SAMPLED = {"temperature": 0.8, "top_k": 20, "seed": 5}
CHAT = [{"role": "user", "content": "Write a loop."}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "n_probs": ("/completion", {"prompt": TEXT, "n_probs": 3}),
    "sampled": ("/completion", {"prompt": TEXT, "n_probs": 2, **SAMPLED}),
    "post_sampling_probs": (
        "/completion",
        {"prompt": TEXT, "n_probs": 4, "post_sampling_probs": True, **SAMPLED},
    ),
    "grammar": ("/completion", {"prompt": TEXT, "n_probs": 2, "grammar": 'root ::= ("a" | "b")+'}),
    "stop": ("/completion", {"prompt": TEXT, "n_probs": 2, "stop": ["print(name)\nfor"]}),
    "logprobs": ("/v1/completions", {"prompt": TEXT, "logprobs": 2}),
    "top_logprobs": (
        "/v1/chat/completions",
        {"messages": CHAT, "logprobs": True, "top_logprobs": 5},
    ),
    "chat with a stop": (
        "/v1/chat/completions",
        {"messages": CHAT, "logprobs": True, "stop": ["\n    "]},
    ),
}
DRAFTING: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    "depth 1": (("--depth", 1), ()),
    "depth 3": (("--depth", 3), ()),
    "depth 8": (("--depth", 8), ()),
    "auto": (("--depth", "auto"), ()),
    "steps": (("--depth", 3), (STEPS,)),
    "n-grams": (
        ("--no-draft",),
        (
            *("--spec-type", "ngram-simple"),
            *("--spec-ngram-simple-size-n", 3, "--spec-ngram-simple-size-m", 4),
        ),
    ),
}


def answers(port: int, path: str, body: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    """The answer as one JSON, or as the chunks of a stream."""
    whole = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, "stream": stream, **body}
    with opened(port, path, whole) as answer:
        return [*chunks_of(answer)] if stream else [json.load(answer)]


Token = tuple[int, float, dict[int, float]]


def probabilities(chunks: Sequence[dict[str, Any]]) -> Iterator[Token]:
    """Of each token its id, its (log)probability, and those of the most likely ones."""
    for chunk in chunks:
        listed = chunk.get("completion_probabilities") or []
        for choice in chunk.get("choices", []):
            listed = (choice.get("logprobs") or {}).get("content") or []
        for token in listed:
            kind = "prob" if "prob" in token else "logprob"
            yield token["id"], token[kind], {t["id"]: t[kind] for t in token[f"top_{kind}s"]}


Case = tuple[str, bool]


def ask_all(port: int) -> tuple[dict[Case, list[Token]], int]:
    """The probabilities of each kind of request, streamed and not; the number of right drafts."""
    found, accepted = {}, 0
    for name, stream in product(REQUESTS, (False, True)):
        chunks = answers(port, *REQUESTS[name], stream)
        found[name, stream] = [*probabilities(chunks)]
        accepted += chunks[-1]["timings"].get("draft_n_accepted", 0)
    return found, accepted


@pytest.fixture(scope="module")
def expected(server: Server, files: Files) -> dict[Case, list[Token]]:
    """What the server says that does not draft."""
    with server.running(files("plain", "demo"), options=["--no-draft"]) as client:
        return ask_all(client.port)[0]


def check(found: Sequence[Token], wanted: Sequence[Token], case: object) -> None:
    assert [token for token, _, _ in found] == [token for token, _, _ in wanted], case
    for (_, one, tops), (_, other, other_tops) in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=CLOSE), case
        assert tops == pytest.approx(other_tops, abs=CLOSE), case


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_has_what_a_whole_answer_has(name: str, expected: dict[Case, list[Token]]) -> None:
    wanted, streamed = expected[name, False], expected[name, True]
    assert all(tops for _, _, tops in wanted)
    if "stop" in REQUESTS[name][1]:  # a stream may have the tokens of the stop string, too
        assert wanted
        streamed = streamed[: len(wanted)]
    else:
        assert len(wanted) == TOKENS
    check(streamed, wanted, name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("drafting", DRAFTING)
def test_drafts_change_none(
    drafting: str, expected: dict[Case, list[Token]], server: Server, files: Files
) -> None:
    options, passed = DRAFTING[drafting]
    with server.running(files("plain", "demo"), *passed, options=options) as client:
        found, accepted = ask_all(client.port)
    assert accepted > 0 or drafting == "auto"  # measured times decide
    for case, wanted in expected.items():
        check(found[case], wanted, case)
