"""How many graphs the trunk computes for the batches of several slots."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.models import Files
from support.real_server import TEXTS, Server, at_once, certain, check_beginnings

pytestmark = pytest.mark.server

SLOTS = 4
# Tokens, so that the ends of texts, where there is less room for drafts, are few batches.
LONG = 400
PRINTED = re.compile(r"(ubatch_add:)|ubatch_print: +(n_seq_tokens|n_seqs|n_seqs_unq) += (\d+)")
Graphs = list[tuple[int, int]]  # of each: sequences, tokens of each sequence


def batches(log: str) -> Iterator[Graphs]:
    """The graphs of each batch with tokens of all slots, from llama.cpp's own account."""
    graphs: Graphs = []
    added, shape = False, {"n_seqs": 0, "n_seq_tokens": 0}
    for add, name, value in PRINTED.findall(log):
        if add:
            added = True
        elif name != "n_seqs_unq":
            shape[name] = int(value)
        elif added:
            graphs.append((shape["n_seqs"], shape["n_seq_tokens"]))
            added = False
        else:  # the next batch
            if sum(sequences for sequences, _ in graphs) >= SLOTS:
                yield graphs
            graphs = []


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server tells each graph in its log."""
    monkeypatch.setenv("LLAMA_BATCH_DEBUG", "1")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        ("--spec-draft-n-max", "auto"),
        ("--spec-draft-n-max", "3", "--spec-draft-p-min", "0.5"),
    ],
)
def test_slots_verify_the_same_number_of_drafts(
    options: Sequence[str], server: Server, files: Files
) -> None:
    """Different numbers take a graph each, though each slot would choose another."""
    model, texts = files("ids", "demo"), TEXTS[:SLOTS]
    plain = server.answers(model, texts, options=["--no-draft"], n_predict=LONG, n_probs=2)
    with server.running(model, "--parallel", SLOTS, *options, verbose=True) as client:
        results = at_once(client, texts, SLOTS, n_predict=LONG)
    check_beginnings([certain(result) for result in plain], results)
    found = list(batches(client.log()))
    print(f"{sum(map(len, found))} graphs for {len(found)} batches")
    assert len({tokens for graphs in found for _, tokens in graphs}) > 1
    assert len(found) > 10
    assert sum(map(len, found)) < 1.25 * len(found)


def test_slots_with_as_many_drafts_share_a_graph(server: Server, files: Files) -> None:
    """Where texts end, there is room for fewer drafts: each number of tokens takes one graph."""
    model, depth = files("ids", "demo"), ("--spec-draft-n-max", 3)
    lengths = [n for first in range(9, 25) for n in (first, first, first + 2, first + 2)]
    passed = ("--parallel", SLOTS, "-kvu")
    with (
        server.running(model, *passed, options=depth, verbose=True) as client,
        ThreadPoolExecutor(SLOTS) as pool,
    ):
        list(pool.map(lambda n: client.complete(TEXTS[0], n_predict=n), lengths))
    uneven = [graphs for graphs in batches(client.log()) if len(graphs) > 1]
    assert any(sequences > 1 for graphs in uneven for sequences, _ in graphs)
    for graphs in uneven:
        assert len({tokens for _, tokens in graphs}) == len(graphs), graphs
