"""The loss, the loop and the measurement, on a few hundred tokens of the demo model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count as count_from
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.heads.acceptance import Counts
from mtp_gguf.native.head import Head
from mtp_gguf.train import trainer as training
from mtp_gguf.train.block import Weights
from mtp_gguf.train.dataset import Sample
from mtp_gguf.train.loss import draft_loss
from mtp_gguf.train.measure import count
from mtp_gguf.train.trainer import CHECKPOINT_NAME, State, default_rate
from support.head_training import damaged, trainer

Training = Callable[..., training.Trainer]


@pytest.fixture
def train(demo: Path, samples: list[Sample], weights: Weights, tmp_path: Path) -> Training:
    """Makes a trainer of the demo's head, or of other `start` weights."""

    def make(start: Weights = weights, folder: Path = tmp_path, **options: Any) -> training.Trainer:
        folder.mkdir(exist_ok=True)
        return trainer(demo, samples, start, folder, **options)

    return make


def test_the_loss_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(1)
    # Two slices of rows.
    monkeypatch.setattr("mtp_gguf.train.loss._LOGITS_AT_ONCE", 50 * 400)
    # Some rows have two drafts, and some none.
    rows = torch.randint(600, (900,), generator=random).sort().values
    states = torch.randn(900, 16, generator=random).requires_grad_()
    weights = torch.rand(900, generator=random)
    output = torch.randn(50, 16, generator=random)
    teacher = torch.randn(600, 16, generator=random)
    scores = (teacher @ output.T)[rows]
    entropy = -((states @ output.T / 0.8).log_softmax(-1) * (scores / 0.8).softmax(-1)).sum(-1)
    want = torch.zeros(())
    for temperature in (0.3, 0.8):
        p, q = ((logits / temperature).softmax(-1) for logits in (scores, states @ output.T))
        rejected = 1 - torch.minimum(p, q).sum(-1)
        want = want + ((rejected + rejected.detach() * entropy) * weights).sum() / 2
    (want_gradient,) = torch.autograd.grad(want, states)
    found = draft_loss(states, weights, rows, output, output, teacher)
    assert draft_loss(states.detach(), weights, rows, output, output, teacher).equal(found.detach())
    (gradient,) = torch.autograd.grad(found, states)
    assert found.item() == pytest.approx(want.item(), rel=1e-4)
    assert torch.allclose(gradient, want_gradient, rtol=1e-3, atol=1e-5)


def test_rows_that_no_draft_can_be_right_in_do_not_count(
    train: Training, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row counts if the token after it is in the draft vocabulary, or unknown."""
    seen: list[torch.Tensor] = []

    def loss(states: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        seen.append(others[4])
        return draft_loss(states, *others)

    monkeypatch.setattr(training, "draft_loss", loss)
    held = [s for s in samples if s.held_out]
    left_out = np.bincount(np.concatenate([s.tokens for s in held])).argmax()
    train(without=int(left_out)).evaluate()
    want = []
    for sample in held:
        rows = [i for i in range(sample.start, len(sample) - 1) if sample.tokens[i + 1] != left_out]
        want += [sample.hidden[rows], sample.hidden[-1:]]
    found = torch.cat(seen).numpy()
    assert 0 < len(found) < sum(len(s) - s.start for s in held)
    assert sorted(map(bytes, found)) == sorted(map(bytes, np.concatenate(want).astype(np.float32)))


@pytest.mark.sample(1)
def test_training_recovers_a_damaged_head(train: Training, weights: Weights) -> None:
    """What 1,300 tokens can do; benchmarks/train_head.py trains until nothing is gained."""
    whole = train().evaluate()[0]
    made = train(damaged(weights), epochs=6).run()
    assert made.before.rates[0] < 0.4 * whole.rates[0]
    assert made.after.rates[0] > 0.5 * whole.rates[0]
    assert sum(made.after.rates) > 2 * sum(made.before.rates)
    assert made.step > 0
    assert made.history[0].rates == made.before.rates


@pytest.mark.thorough
def test_a_seed_gives_the_same_weights(train: Training, weights: Weights, tmp_path: Path) -> None:
    def run(seed: int, name: str) -> Weights:
        made = train(damaged(weights), tmp_path / name, epochs=1, seed=seed)
        return made.run().weights

    first, again, other = run(1, "a"), run(1, "b"), run(2, "c")
    assert all(np.array_equal(first[s], again[s]) for s in first)
    assert not all(np.array_equal(first[s], other[s]) for s in first)


@pytest.mark.thorough
def test_an_interrupted_run_ends_with_the_same_weights(
    train: Training, weights: Weights, tmp_path: Path
) -> None:
    want = train(damaged(weights), tmp_path / "a").run()

    def stop(state: State) -> None:
        if state.step == want.steps // 2:  # the last checkpoint is older
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(damaged(weights)).run(stop)
    seen: list[int] = []
    # What is left of --minutes is another time than in the run that was interrupted.
    resumed = train(damaged(weights), seconds=1e6)
    found = resumed.run(lambda state: seen.append(state.step))
    assert 1 < seen[0] <= want.steps // 2
    assert all(np.array_equal(want.weights[s], found.weights[s]) for s in want.weights)
    assert [rates for *_, rates in found.history] == [rates for *_, rates in want.history]
    # Another training does not go on from this checkpoint, and a torn one is reported.
    other = train(epochs=0.01).run()
    assert other.steps == 1
    (tmp_path / CHECKPOINT_NAME).write_bytes(b"torn")
    with pytest.raises(RequestError, match=r"cannot be read .*; remove it to start again"):
        resumed.run()


def test_nan_keeps_the_best(
    train: Training, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def loss(*arguments: torch.Tensor) -> torch.Tensor:
        calls.extend([1] * torch.is_grad_enabled())  # not while it measures
        return draft_loss(*arguments) * (float("nan") if len(calls) == 8 else 1)

    monkeypatch.setattr(training, "draft_loss", loss)
    made = train(damaged(weights), evaluations=100, evaluation_share=100.0).run()
    assert made.stopped == "the loss became nan in step 8"
    assert made.steps == 7
    assert 0 < made.step <= 7
    assert made.after.rates == made.history[made.step].rates
    assert all(np.isfinite(array).all() for array in made.weights.values())


def test_time_is_a_budget(train: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count_from(100)  # every look at it takes a second
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    made = train(epochs=1000.0, seconds=5.0).run()
    assert made.stopped == "the time is over"
    assert (made.steps, made.seconds) == (5, 6)
    # The last steps have the lowest rate, and so their weights are measured, too.
    assert made.history[-1].step == made.steps


def test_a_short_training_measures_seldom(train: Training) -> None:
    made = train(epochs=1, evaluations=100, evaluation_share=0.1).run()
    assert [step for step, *_ in made.history] == [0, made.steps]


def test_without_a_gain_it_stops(train: Training, weights: Weights) -> None:
    made = train(rate=0.0, evaluations=9, patience=2).run()
    assert made.stopped == "no gain in the last 2 evaluations"
    assert made.step == 0
    assert len(made.history) == 4  # at first, and three evaluations, of which none is the lowest
    assert all(np.array_equal(made.weights[s], array) for s, array in weights.items())


@pytest.mark.thorough
def test_low_rank_changes_only_what_it_adds(train: Training, weights: Weights) -> None:
    start = damaged(weights)
    made = train(start, rank=8, rate=5e-3, epochs=3).run()
    assert sum(made.after.rates) > sum(made.before.rates)
    change = made.weights["nextn.eh_proj.weight"] - start["nextn.eh_proj.weight"]
    assert np.linalg.matrix_rank(change, tol=1e-4 * np.linalg.norm(change, 2)) <= 8


def test_counting_follows_a_real_chain(demo: Path, samples: list[Sample]) -> None:
    """What is counted is what cycles from each position of a greedy text would accept."""
    sample = next(s for s in samples if s.held_out)
    n, steps = len(sample), 3
    drafts = np.full((n, steps), -1, np.int32)
    accepted = np.zeros(steps, int)
    with Head(demo, n_threads=1) as head:
        hidden = sample.hidden.astype(np.float32)
        head.feed(sample.tokens[1 : sample.start + 1].tolist(), hidden[: sample.start], 1)
        for i in range(sample.start, n - 2):
            token = [int(sample.tokens[i + 1])]
            drafts[i] = head.draft(token, hidden[i : i + 1], i + 1, steps).tokens
            for step in range(min(steps, n - 2 - i)):
                if drafts[i, step] != sample.tokens[i + 2 + step]:
                    break
                accepted[step] += 1
    found = count(sample, drafts)
    assert found[1].tolist() == accepted.tolist()
    assert found[0].tolist() == [n - 2 - sample.start - step for step in range(steps)]


def test_a_better_head_is_trained_at_a_lower_rate() -> None:
    random, good = (default_rate(256, Counts((100,), (n,))) for n in (0, 97))
    assert random == pytest.approx(0.01)
    assert 0.05 * random < good < 0.06 * random
    assert default_rate(1024, Counts((100,), (0,))) == pytest.approx(random / 2)


def test_rates() -> None:
    assert Counts((10, 8, 0), (9, 4, 0)).rates == (0.9, 0.5, 0.0)
