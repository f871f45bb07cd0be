"""What a slot's cycle exchanges with the device, counted in ggml as in tests/native."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import device_calls, places, preloading
from support.models import Files
from support.real_server import PROMPTS, counts, running

pytestmark = [pytest.mark.server, pytest.mark.gpu]

DEPTH = 3
OPTIONS = ("--spec-draft-n-max", DEPTH, "-ngl", places.ALL)
SAMPLED = {"temperature": 0.9, "seed": 3}
GREEDY = {"ignore_eos": False}
TOP_K = {**SAMPLED, "top_k": 40}
# A logit that is raised, if only by this, may be any, so all logits are read.
ALL_LOGITS = {"logit_bias": [[7, 1e-9]]}


@pytest.mark.parametrize(
    ("body", "graphs", "down"),
    [
        (GREEDY, 2, 128),
        (TOP_K, 3, 2048),
        ({**TOP_K, **ALL_LOGITS}, 2, 1 << 20),
    ],
    ids=["greedy", "top-k", "all logits"],
)
def test_sampling_reads_what_it_needs(
    body: dict[str, Any],
    graphs: int,
    down: int,
    patched_server: Path,
    files: Files,
    tmp_path: Path,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Per cycle, from a short and a long text; four rows of logits are 65,536 bytes."""
    places.require_gpu()
    model, totals = files("ids", "demo"), []
    library = preloading.build("device_calls", tmp_path)
    for n in (40, 120):
        written = tmp_path / f"{n}.txt"
        with monkeypatch.context() as preloaded, monkeypatch.context() as told:
            told.setenv("DEVICE_CALLS", str(written))
            preloaded.setenv("LD_PRELOAD", str(library))
            with running(patched_server, model, free_port, options=OPTIONS) as client:
                result = client.complete(PROMPTS[0], n_predict=n, **body)
        totals.append((n - counts(result)[1], device_calls.read_counts(written)))
    (few, before), (many, after) = totals
    cycles = many - few
    spent = {name: (after[name] - before[name]) / cycles for name in device_calls.NAMES}
    print({name: round(value, 1) for name, value in spent.items()})
    assert spent["graphs"] < graphs + 0.3  # a text's last cycle has fewer drafts
    assert spent["bytes_down"] < down
    assert (spent["bytes_down"] > 50_000) == (body.get("logit_bias") is not None)


CHAINS: list[dict[str, Any]] = [
    TOP_K,
    {**TOP_K, "top_k": 1},
    {**TOP_K, "top_p": 0.8, "min_p": 0.05},
    {**TOP_K, "presence_penalty": 1.5, "repeat_penalty": 1.1, "frequency_penalty": 0.2},
    {**TOP_K, "logit_bias": [[11, False], [12, -3.0]]},
    {**TOP_K, "samplers": ["temperature", "top_k", "top_p"]},
    {**TOP_K, "samplers": ["top_p", "top_k"], "top_p": 0.7},
    {**TOP_K, "typical_p": 0.7},
    {**TOP_K, "xtc_probability": 0.5},
    {**TOP_K, "dry_multiplier": 0.8},
    {**TOP_K, "top_n_sigma": 1.0},
    {**TOP_K, "mirostat": 2},
    {**TOP_K, "n_probs": 3, "post_sampling_probs": True},
    {**TOP_K, "grammar": "root ::= [a-z ]+"},
    {**SAMPLED, "top_k": 0},
    {"temperature": 0},
    {"temperature": 0, "repeat_penalty": 1.3},
    {"temperature": 0, "top_k": 0, "xtc_probability": 0.9, "seed": 3},
    {"temperature": 0, "samplers": ["top_k", "top_p"], "seed": 3},
]


def test_the_text_is_that_of_all_logits(patched_server: Path, files: Files, free_port: int) -> None:
    """With the same logits, the same random numbers choose the same tokens."""
    places.require_gpu()
    with running(patched_server, files("ids", "demo"), free_port, options=OPTIONS) as client:
        for body in CHAINS:
            bias = [*body.get("logit_bias", []), *ALL_LOGITS["logit_bias"]]
            found, want = (
                client.complete(PROMPTS[0], n_predict=40, **chain)["tokens"]
                for chain in (body, {**body, "logit_bias": bias})
            )
            assert found == want, body
