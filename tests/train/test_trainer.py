"""The loss, the loop and the measurement, on a few hundred tokens of the demo model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.rewrite import write
from mtp_gguf.gguf_tools.tensor_types import BY_NAME
from mtp_gguf.gguf_tools.transplant import with_head
from mtp_gguf.native.head import Head
from mtp_gguf.train import trainer as training
from mtp_gguf.train.block import Weights, read_weights
from mtp_gguf.train.collect import CollectSettings, Texts, collect
from mtp_gguf.train.config import BlockConfig
from mtp_gguf.train.dataset import Sample, open_data, split_data
from mtp_gguf.train.loss import draft_loss
from mtp_gguf.train.measure import Acceptance, count, measure_file
from mtp_gguf.train.trainer import CHECKPOINT_NAME, State, Trainer, TrainSettings, read_tables
from mtp_gguf.train.write_back import head_tensors
from support.models import Models
from support.upstream.llama_mtp import LlamaMtp

# The trunk's own answers to these are the training data, which no edit of a file changes.
PROMPTS = tuple(
    f'{start}\n    """'
    for start in (
        "def is_prime(n):",
        "def read_lines(path):",
        "def add(self, name, value):",
        "def main(args=None):",
        "def get_size(data):",
        "def join(first, second):",
        "def parse(text):",
        "def close(self):",
        "def sort(items, key=None):",
        "def write(self, data):",
        "def find(self, name):",
        "def copy(source, target):",
        "class Reader:",
        "class Node(object):",
        "class Queue:",
        "class Error(Exception):",
        "def test_list(self):",
        "def split(path):",
        "def __init__(self, size):",
        "def update(self, other):",
        "def encode(text):",
        "def count(words):",
        "def load(file):",
        "def run(command):",
    )
)
SETTINGS = TrainSettings(
    steps=3, epochs=2, batch=256, rate=1e-3, evaluations=4, held_out_tokens=400
)


@pytest.fixture(scope="module")
def demo(models: Models) -> Path:
    return models.gguf("demo", "F16", "F16")


@pytest.fixture(scope="module")
def samples(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    return answers(demo, tmp_path_factory.mktemp("data"), 1300, 1)


def answers(demo: Path, folder: Path, tokens: int, each: int) -> list[Sample]:
    """The trunk's answers, `each` to every prompt, the first of them greedy."""
    settings = CollectSettings(length=64, tokens=tokens, answers=each, chat=False)
    collect(demo, folder, Texts(PROMPTS, are_prompts=True), settings, threads=1)
    return open_data(folder, 256)


@pytest.fixture(scope="module")
def weights(demo: Path) -> Weights:
    with open_model(demo) as model:
        return read_weights(model)


def damaged(weights: Weights) -> Weights:
    """A head that has forgotten its projection, but little else."""
    noise = np.random.default_rng(5).standard_normal(weights["nextn.eh_proj.weight"].shape)
    projection = weights["nextn.eh_proj.weight"]
    noise = np.random.default_rng(5).standard_normal(projection.shape).astype(np.float32)
    changed = (0.3 * projection + 0.06 * noise).astype(np.float32)
    return weights | {"nextn.eh_proj.weight": changed}


def trainer(
    demo: Path, samples: list[Sample], weights: Weights, folder: Path, **changes: object
) -> Trainer:
    with open_model(demo) as model:
        config = BlockConfig.of(model.head)
        tables = read_tables(model, samples, np.arange(model.vocabulary_size or 0))
    train, held_out = split_data(samples)
    settings = replace(SETTINGS, **changes)  # type: ignore[arg-type]
    return Trainer(config, weights, tables, train, held_out, settings, folder)


def test_the_loss_is_the_formula() -> None:
    random = torch.Generator().manual_seed(1)
    states = torch.randn(2, 600, 16, generator=random).requires_grad_()
    weights = torch.rand(2, 600, generator=random)
    output = torch.randn(50, 16, generator=random)
    teacher = torch.randn(600, 16, generator=random)
    # The draft vocabulary is a part of the trunk's: other tokens have a share of its distribution.
    log_sum = (teacher @ output.T).logsumexp(-1) + torch.rand(600, generator=random)
    scores = teacher @ output.T
    target = 0.8 * scores.softmax(-1)
    target += 0.2 * torch.nn.functional.one_hot(scores.argmax(-1), 50)
    share = (scores.logsumexp(-1) - log_sum).exp()
    entropy = -((states @ output.T).log_softmax(-1) * target).sum(-1)
    want = (entropy * weights * share).sum()
    (want_gradient,) = torch.autograd.grad(want, states)
    found = draft_loss(states, weights, output, teacher, log_sum)
    (gradient,) = torch.autograd.grad(found, states)
    assert found.item() == pytest.approx(want.item(), rel=1e-4)
    assert torch.allclose(gradient, want_gradient, rtol=1e-3, atol=1e-5)


def test_training_recovers_a_damaged_head(demo: Path, weights: Weights, tmp_path: Path) -> None:
    samples = answers(demo, tmp_path / "data", 7000, 5)
    whole = trainer(demo, samples, weights, tmp_path).evaluate()
    made = trainer(demo, samples, damaged(weights), tmp_path, epochs=5).run()
    assert made.before.rates[0] < 0.6 * whole.rates[0]
    assert made.after.rates[0] > 0.65 * whole.rates[0]
    assert made.after.per_cycle > 2 * made.before.per_cycle
    assert made.step > 0
    assert made.history[0][2] == tuple(made.before.rates)


def test_a_seed_gives_the_same_weights(
    demo: Path, samples: list[Sample], weights: Weights, tmp_path: Path
) -> None:
    def run(seed: int, name: str) -> Weights:
        (tmp_path / name).mkdir()
        made = trainer(demo, samples, damaged(weights), tmp_path / name, epochs=1, seed=seed)
        return made.run().weights

    first, again, other = run(1, "a"), run(1, "b"), run(2, "c")
    assert all(np.array_equal(first[s], again[s]) for s in first)
    assert not all(np.array_equal(first[s], other[s]) for s in first)


def test_an_interrupted_run_ends_with_the_same_weights(
    demo: Path, samples: list[Sample], weights: Weights, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    want = trainer(demo, samples, damaged(weights), tmp_path / "a").run()

    def stop(state: State) -> None:
        if state.step == want.steps // 2:  # the last checkpoint is older
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(demo, samples, damaged(weights), tmp_path).run(stop)
    seen: list[int] = []
    resumed = trainer(demo, samples, damaged(weights), tmp_path)
    found = resumed.run(lambda state: seen.append(state.step))
    assert 1 < seen[0] <= want.steps // 2
    assert all(np.array_equal(want.weights[s], found.weights[s]) for s in want.weights)
    assert [rates for *_, rates in found.history] == [rates for *_, rates in want.history]
    # Another training does not go on from this checkpoint, and a torn one is reported.
    other = trainer(demo, samples, weights, tmp_path, epochs=0.01).run()
    assert other.steps == 1
    (tmp_path / CHECKPOINT_NAME).write_bytes(b"torn")
    with pytest.raises(RequestError, match=r"cannot be read .*; remove it to start again"):
        resumed.run()


def test_nan_keeps_the_best(
    demo: Path,
    samples: list[Sample],
    weights: Weights,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def loss(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return draft_loss(*arguments) * (float("nan") if len(calls) == 8 else 1)

    monkeypatch.setattr(training, "draft_loss", loss)
    made = trainer(demo, samples, damaged(weights), tmp_path, evaluations=100).run()
    assert made.stopped == "the loss became nan in step 8"
    assert made.steps == 7
    assert made.after.per_cycle >= made.before.per_cycle
    assert all(np.isfinite(array).all() for array in made.weights.values())


def test_time_is_a_budget(
    demo: Path, samples: list[Sample], weights: Weights, tmp_path: Path
) -> None:
    made = trainer(demo, samples, weights, tmp_path, epochs=1000.0, seconds=1.0).run()
    assert made.stopped == "the time is over"
    assert made.seconds < 20


def test_low_rank_changes_only_what_it_adds(
    demo: Path, samples: list[Sample], weights: Weights, tmp_path: Path
) -> None:
    start = damaged(weights)
    made = trainer(demo, samples, start, tmp_path, rank=8, rate=5e-3, epochs=3).run()
    assert made.after.per_cycle > made.before.per_cycle
    change = made.weights["nextn.eh_proj.weight"] - start["nextn.eh_proj.weight"]
    assert np.linalg.matrix_rank(change, tol=1e-4 * np.linalg.norm(change, 2)) <= 8


def test_the_draft_graph_accepts_the_same_tokens(
    demo: Path, samples: list[Sample], weights: Weights, tmp_path: Path
) -> None:
    """In PyTorch and in the graph, from the same states."""
    held_out = split_data(samples)[1]
    torch_found = trainer(demo, samples, weights, tmp_path, held_out_tokens=10_000).evaluate()
    graph_found = measure_file(demo, held_out, 3, rows=10_000, threads=1)
    assert graph_found.drafted == torch_found.drafted
    # Products in another order can change the order of two tokens at a near tie.
    for a, b in zip(graph_found.accepted, torch_found.accepted, strict=True):
        assert abs(a - b) <= 1
    few = measure_file(demo, held_out, 3, rows=20, threads=1)
    assert few.drafted[0] == 20


def test_llama_cpp_accepts_the_same_drafts(
    demo: Path, samples: list[Sample], weights: Weights, tmp_path: Path
) -> None:
    """A trained head, written to a GGUF: llama.cpp's own graph drafts what ours drafts."""
    made = trainer(demo, samples, damaged(weights), tmp_path, epochs=1).run()
    path = tmp_path / "trained.gguf"
    with open_model(demo) as model:
        tensors = head_tensors(made.weights, model.head.trunk_layers, BY_NAME["F32"])
        write(path, with_head(model, tensors, {}))
    sample = split_data(samples)[1][0]
    hidden, tokens = sample.hidden.astype(np.float32), sample.tokens.tolist()
    zero = np.zeros((1, 256), np.float32)
    same = []
    with LlamaMtp(path) as upstream, Head(path, n_threads=1) as head:
        for i in range(sample.start, sample.start + 12):
            # llama.cpp's draft-mtp has a row at position 0, with a hidden state of zeros.
            rows = np.concatenate([zero, hidden[: i + 1]])
            ours = head.draft(tokens[: i + 2], rows, 0, 3).tokens
            head.rollback(0)
            theirs, _ = upstream.draft(tokens[: i + 2], hidden[: i + 1], 3)
            same += [a == b for a, b in zip(ours, theirs, strict=True)]
    assert sum(same) >= len(same) - 1  # one near tie


def test_counting_follows_a_real_chain(demo: Path, samples: list[Sample]) -> None:
    """What is counted is what cycles from each position of a greedy text would accept."""
    sample = next(s for s in samples if s.held_out)
    n, steps = len(sample), 3
    drafts = np.full((n, steps), -1, np.int32)
    accepted = np.zeros(steps, int)
    with Head(demo, n_threads=1) as head:
        hidden = sample.hidden.astype(np.float32)
        head.feed(sample.tokens[1 : sample.start + 1].tolist(), hidden[: sample.start], 1)
        for i in range(sample.start, n - 1):
            token = [int(sample.tokens[i + 1])]
            drafts[i] = head.draft(token, hidden[i : i + 1], i + 1, steps).tokens
            for step in range(min(steps, n - 1 - i)):
                if drafts[i, step] != sample.greedy[i + 1 + step]:
                    break
                accepted[step] += 1
    found = count(sample, drafts)
    assert found[1].tolist() == accepted.tolist()
    assert found[0].tolist() == [n - 1 - sample.start - step for step in range(steps)]


def test_rates() -> None:
    found = Acceptance((10, 8, 0), (9, 4, 0))
    assert found.rates == [0.9, 0.5, 0.0]
    assert found.per_cycle == 1.4
