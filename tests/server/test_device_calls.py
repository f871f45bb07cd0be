"""What a slot's cycle exchanges with the device, counted in ggml as in tests/native."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import device_calls, places, preloading
from support.models import Files
from support.real_server import PROMPTS, Server, counts

pytestmark = [pytest.mark.server, pytest.mark.gpu]

DEPTH = 3
OPTIONS = ("--spec-draft-n-max", DEPTH, "-ngl", places.ALL)
SAMPLED = {"temperature": 0.9, "seed": 3}
GREEDY = {"ignore_eos": False}
TOP_K = {**SAMPLED, "top_k": 40}
# A logit that is raised, if only by this, may be any, so all logits are read.
ALL_LOGITS = {"logit_bias": [[7, 1e-9]]}
TOKENS = 120
# Of these, 95 % of the cycles count: where a token appears that the draft vocabulary lacks, its
# rows are uploaded.
UPLOADS = ("syncs", "bytes_up", "ups")


Spend = Callable[[dict[str, Any], int, int], dict[str, float]]


@pytest.fixture
def spend(server: Server, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spend:
    """What a cycle of so many graphs exchanges, in the middle of a text that `slots` slots write.

    Where texts begin and end, cycles have other numbers of drafts.
    """
    places.require_gpu()
    written, model = tmp_path / "counts.txt", files("ids", "demo")
    library = preloading.build("device_calls", tmp_path)

    def spent(body: dict[str, Any], slots: int, graphs: int) -> dict[str, float]:
        with monkeypatch.context() as patch:
            patch.setenv("DEVICE_CALLS", str(written))
            patch.setenv("LD_PRELOAD", str(library))
            asked = (model, [PROMPTS[0]] * slots)
            results = server.answers(*asked, options=OPTIONS, slots=slots, n_predict=TOKENS, **body)
        found, cycles = device_calls.read_counts(written), TOKENS - counts(results[0])[1]
        assert len(found) < (cycles + 4 * slots) * graphs
        middle = (len(found) // graphs - 14) * graphs
        out = {}
        for name in device_calls.NAMES:
            at = [counted[name] for counted in found[8 * graphs :][: middle + 1 : graphs]]
            each = np.diff(at)
            usual = np.quantile(each, 0.95, method="lower")
            out[name] = float(usual if name in UPLOADS else each.mean())
        print({name: round(value, 2) for name, value in out.items()})
        return out

    return spent


@pytest.mark.parametrize(
    ("body", "graphs", "waits", "down"),
    [
        (GREEDY, 2, 3, 64),
        (TOP_K, 3, 4, 1500),
        ({**TOP_K, **ALL_LOGITS}, 2, 4, 66_000),
    ],
    ids=["greedy", "top-k", "all logits"],
)
def test_sampling_reads_what_it_needs(
    spend: Spend, body: dict[str, Any], graphs: int, waits: int, down: int
) -> None:
    """Four rows of logits are 65,536 bytes.

    The waits are for the trunk's inputs, its tokens and hidden states, the drafts, and the logits.
    """
    spent = spend(body, 1, graphs)
    assert spent["graphs"] == graphs
    assert spent["cpu_graphs"] == 0
    assert spent["syncs"] <= waits
    assert spent["bytes_down"] <= down
    assert spent["bytes_up"] <= 320
    assert spent["bytes_moved"] > 0  # hidden states


def test_slots_share_graphs_and_waits(spend: Spend) -> None:
    """Two slots in one batch. Masks of a cache that slots share are uploaded."""
    spent = spend(GREEDY, 2, 2)
    assert spent["graphs"] == 2
    assert spent["syncs"] <= 3
    assert spent["bytes_down"] <= 2 * 64


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


def test_the_text_is_that_of_all_logits(server: Server, files: Files) -> None:
    """With the same logits, the same random numbers choose the same tokens."""
    places.require_gpu()
    n = places.affordable(80)
    with server.running(files("ids", "demo"), options=OPTIONS) as client:
        for body in CHAINS:
            bias = [*body.get("logit_bias", []), *ALL_LOGITS["logit_bias"]]
            found, want = (
                client.complete(PROMPTS[0], n_predict=n, **chain)["tokens"]
                for chain in (body, {**body, "logit_bias": bias})
            )
            assert found == want, body
