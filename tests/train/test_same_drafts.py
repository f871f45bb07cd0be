"""A trained head drafts the same tokens in PyTorch, in our draft graph and in llama.cpp."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mtp_gguf.gguf_tools.files.rewrite import write
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.gguf_tools.heads.transplant import with_head
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native.head import Head
from mtp_gguf.train.answers import Job
from mtp_gguf.train.block import MtpBlock, Weights, read_rows, read_tensor, read_weights
from mtp_gguf.train.collect import CollectSettings, Trunk
from mtp_gguf.train.config import BlockConfig
from mtp_gguf.train.dataset import Sample, split_data
from mtp_gguf.train.measure import measure_file
from mtp_gguf.train.write_back import head_tensors
from support.head_training import damaged, trainer
from support.real_server import counts, running
from support.upstream.llama_mtp import LlamaMtp

STEPS = 3


@pytest.fixture(scope="module")
def trained(
    demo: Path, samples: list[Sample], weights: Weights, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The demo model with a head that was trained a little, in F32."""
    folder = tmp_path_factory.mktemp("trained")
    made = trainer(demo, samples, damaged(weights), folder, epochs=2).run()
    assert made.step > 0
    with open_model(demo) as model:
        tensors = head_tensors(made.weights, model.head.trunk_layers, BY_NAME["F32"])
        write(folder / "trained.gguf", with_head(model, tensors, {}))
    return folder / "trained.gguf"


def test_the_draft_graph_accepts_the_same_tokens(
    demo: Path, samples: list[Sample], weights: Weights, tmp_path: Path
) -> None:
    """In PyTorch and in the graph, from the same states."""
    held_out = split_data(samples)[1]
    torch_found = trainer(
        demo, samples, weights, tmp_path, whole=True, held_out_tokens=10_000
    ).evaluate()[0]
    graph_found = measure_file(demo, held_out, STEPS, rows=10_000, threads=1)
    assert graph_found.drafted == torch_found.drafted
    # Products in another order can change the order of two tokens at a near tie.
    for a, b in zip(graph_found.accepted, torch_found.accepted, strict=True):
        assert abs(a - b) <= 1
    few = measure_file(demo, held_out, STEPS, rows=20, threads=1)
    assert few.drafted[0] == 20


def test_llama_cpp_drafts_the_same_tokens(trained: Path, samples: list[Sample]) -> None:
    sample = split_data(samples)[1][0]
    hidden, tokens = sample.hidden.astype(np.float32), sample.tokens.tolist()
    same = []
    with LlamaMtp(trained) as upstream, Head(trained, n_threads=1) as head:
        for i in range(sample.start, sample.start + 12):
            ours = head.draft(tokens[: i + 2], after_zeros(hidden[: i + 1]), 0, STEPS).tokens
            head.rollback(0)
            theirs, _ = upstream.draft(tokens[: i + 2], hidden[: i + 1], STEPS)
            same += [a == b for a, b in zip(ours, theirs, strict=True)]
    assert sum(same) >= len(same) - 1  # one near tie


@pytest.mark.sample(1)
@pytest.mark.server
@pytest.mark.parametrize(
    ("server", "steps"),
    [("patched_server", ()), ("patched_server", ("--no-spec-draft-fused",)), ("stock_server", ())],
    ids=["fused", "upstream", "stock"],
)
def test_llama_server_accepts_the_same_tokens(
    trained: Path,
    samples: list[Sample],
    tmp_path: Path,
    free_port: int,
    request: pytest.FixtureRequest,
    server: str,
    steps: tuple[str, ...],
) -> None:
    """llama-server's draft-mtp against the block in PyTorch and our draft graph, cycle by cycle.

    Only the stock server has a row at position 0 (docs/decisions.md).
    """
    program = request.getfixturevalue(server)
    zeros = server == "stock_server"
    log = tmp_path / "log"
    verbose = ("--log-file", log, "--verbosity", 10, *steps)
    depth = ("--spec-draft-n-max", STEPS)
    prompt = samples[0].tokens[: samples[0].start + 1].tolist()
    with running(program, trained, free_port, *verbose, options=depth) as client:
        result = client.complete(prompt, n_predict=220)
    tokens = prompt + result["tokens"]
    hidden = states_of(trained, tokens)
    block = drafts_of_block(trained, tokens, hidden, zeros=zeros)
    same, accepted, offered = [], 0, 0
    cycles = drafts_by_cycle(log)
    at = len(prompt)  # of the last token that is known
    with Head(trained, n_threads=1) as head:
        while at < len(tokens) - 2:  # the last token needs no draft
            # The server offers no more drafts than it can use.
            theirs = cycles.pop(0)[: len(tokens) - 2 - at]
            states = after_zeros(hidden[:at]) if zeros else hidden[:at]
            first = at + 1 - len(states)
            ours = head.draft(tokens[first : at + 1], states, first, STEPS).tokens
            head.rollback(0)
            right = [a == b for a, b in zip(theirs, tokens[at + 1 :], strict=False)]
            n = [*right, False].index(False)
            # The block was given the text, so what it drafts after a rejected draft differs.
            for drafts in (ours, block[at - 1].tolist()):
                same += [a == b for a, b in zip(theirs[: n + 1], drafts, strict=False)]
            offered, accepted = offered + len(theirs), accepted + n
            at += n + 1
    assert not cycles
    assert (offered, accepted) == counts(result)
    assert 0.2 * offered < accepted < 0.9 * offered  # accepted and rejected ones are compared
    assert sum(same) >= len(same) - 2, (sum(same), len(same))  # a near tie


def after_zeros(hidden: np.ndarray) -> np.ndarray:
    """The states of llama.cpp's own draft-mtp: it has a row at position 0, with one of zeros."""
    return np.concatenate([np.zeros((1, hidden.shape[1]), np.float32), hidden])


def drafts_by_cycle(log: Path) -> list[list[int]]:
    """What draft-mtp drafted in each cycle, from a log at the highest verbosity."""
    pattern = r"draft candidate +0, pos +(\d+): +(\d+)"
    cycles: list[list[int]] = []
    for place, token in re.findall(pattern, log.read_text(errors="replace")):
        if place == "0":
            cycles.append([])
        cycles[-1].append(int(token))
    return cycles


def states_of(path: Path, tokens: list[int]) -> np.ndarray:
    with Trunk(path, CollectSettings(length=256, chat=False), 1, 0) as trunk:
        (sample,) = trunk.samples([Job(tuple(tokens), held_out=False)])
    return sample.hidden.astype(np.float32)


def drafts_of_block(
    path: Path, tokens: list[int], hidden: np.ndarray, *, zeros: bool
) -> np.ndarray:
    """The block's drafts after the token at each position i + 1, [n, steps]; -1 past the end."""
    with open_model(path) as model:
        block = MtpBlock(BlockConfig.of(model.head), read_weights(model))
        names = [n for n in ("output.weight", "token_embd.weight") if n in model.tensors]
        output = read_tensor(model, names[0])
        fed = [0, *tokens] if zeros else tokens
        embedding = read_rows(model, "token_embd.weight", np.asarray(fed))
    drafts = np.full((len(tokens), STEPS), -1)
    with torch.no_grad():
        fed_states = after_zeros(hidden) if zeros else hidden
        states, embedded = (torch.from_numpy(a)[None] for a in (fed_states, embedding))
        for step, state in enumerate(block.steps(states, [embedded], STEPS)):
            rows = (state[0].numpy() @ output.T).argmax(1)[int(zeros) :]
            drafts[: len(rows), step] = rows
    return drafts
