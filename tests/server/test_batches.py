"""How many graphs the trunk computes for the batches of several slots."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.models import Files
from support.real_server import TEXTS, answers, certain, check_beginnings, running

pytestmark = pytest.mark.server

SLOTS = 4
LONG = (
    400  # tokens, so that the ends of texts, where there is less room for drafts, are few batches
)
PRINTED = re.compile(r"(ubatch_add:)|ubatch_print: +(n_seq_tokens|n_seqs|n_seqs_unq) += (\d+)")
Graphs = list[tuple[int, int]]  # of each: sequences, tokens of each sequence


def batches(log: Path) -> Iterator[Graphs]:
    """The graphs of each batch with tokens of all slots, from llama.cpp's own account."""
    graphs: Graphs = []
    added, shape = False, {"n_seqs": 0, "n_seq_tokens": 0}
    for add, name, value in PRINTED.findall(log.read_text("utf-8", "replace")):
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


@pytest.fixture
def verbose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Sequence[object]]:
    """A log and the options of a server that tells each graph in it."""
    monkeypatch.setenv("LLAMA_BATCH_DEBUG", "1")
    log = tmp_path / "log"
    return log, ("--parallel", SLOTS, "--log-file", log, "--verbosity", 10)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        ("--spec-draft-n-max", "auto"),
        ("--spec-draft-n-max", "3", "--spec-draft-p-min", "0.5"),
    ],
)
def test_slots_verify_the_same_number_of_drafts(
    options: Sequence[str],
    patched_server: Path,
    files: Files,
    verbose: tuple[Path, Sequence[object]],
    free_port: int,
) -> None:
    """Different numbers take a graph each, though each slot would choose another."""
    model, (log, passed) = files("ids", "demo"), verbose
    texts, server = TEXTS[:SLOTS], (patched_server, model, free_port)
    plain = answers(*server, texts, options=["--no-draft"], n_predict=LONG, n_probs=2)
    results = answers(*server, texts, *passed, *options, slots=SLOTS, n_predict=LONG)
    check_beginnings([certain(result) for result in plain], results)
    found = list(batches(log))
    print(f"{sum(map(len, found))} graphs for {len(found)} batches")
    assert len({tokens for graphs in found for _, tokens in graphs}) > 1
    assert len(found) > 10
    assert sum(map(len, found)) < 1.25 * len(found)


def test_slots_with_as_many_drafts_share_a_graph(
    patched_server: Path,
    files: Files,
    verbose: tuple[Path, Sequence[object]],
    free_port: int,
) -> None:
    """Where texts end, there is room for fewer drafts: each number of tokens takes one graph."""
    log, passed = verbose
    model, depth = files("ids", "demo"), ("--spec-draft-n-max", 3)
    lengths = [n for first in range(9, 25) for n in (first, first, first + 2, first + 2)]
    with (
        running(patched_server, model, free_port, *passed, "-kvu", options=depth) as client,
        ThreadPoolExecutor(SLOTS) as pool,
    ):
        list(pool.map(lambda n: client.complete(TEXTS[0], n_predict=n), lengths))
    uneven = [graphs for graphs in batches(log) if len(graphs) > 1]
    assert any(sequences > 1 for graphs in uneven for sequences, _ in graphs)
    for graphs in uneven:
        assert len({tokens for _, tokens in graphs}) == len(graphs), graphs
