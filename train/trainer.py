"""The training loop: unrolled steps, early stopping on held-out samples, resumable.

Matrices are trained with Muon, norms and other vectors with AdamW.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_gguf.gguf_tools.errors import OutputError, RequestError
from mtp_gguf.gguf_tools.heads.acceptance import Counts
from mtp_gguf.gguf_tools.heads.fastmtp import EMBEDDING_TENSOR, OUTPUT_TENSOR
from mtp_gguf.gguf_tools.model import Model

from . import measure
from .block import TABLE_SUFFIXES, Weights, own_tables, read_rows, rows_of
from .chain import make_head
from .config import BlockConfig
from .dataset import Sample
from .loss import draft_loss
from .muon import Muon

CHECKPOINT_NAME = "checkpoint.pt"
# FastMTP, equation 2 (arXiv 2509.18362): the weight of each step relative to the one before.
_STEP_DECAY = 0.6
# Of width 256, in cases a and c of benchmarks/train_head.py: 0.01 is good for random weights, and
# 0.0007 for a head whose first drafts are right 9 times in 10.
_RATE_OF_RANDOM_WEIGHTS, _RATE_OF_A_PERFECT_HEAD = 0.16, 0.05
# Second and later drafts are learned from one row in so many, another one in each batch: each takes
# as long as a first one, and a row's teaches much the same as those of the rows beside it.
_EVERY = 4
# Tokens; twice as many learn as much from little data, and more in the same time at width 576.
_LEAST_BATCH = 1024
_WARM_UP, _LAST_RATE = 0.05, 0.05
_CLIP = 1.0
_WEIGHT_DECAY = 0.01
_BETAS = (0.9, 0.98)
# Batches that are filled together, so that samples of about the same length share one.
_SORTED_BATCHES = 16


@dataclass(frozen=True)
class TrainSettings:
    """How to train.

    steps: drafts that are unrolled. batch: tokens of a batch, `default_batch` if None. rate: the
    highest learning rate, `default_rate` if None. rank: 0 for all weights. seconds: a budget, over
    which the learning rate falls if it ends before the epochs do. evaluations: how often held-out
    acceptance is measured in all; less often if that would read more than `evaluation_share` times
    the tokens that training does. patience: evaluations without a gain after which training stops.
    """

    steps: int = 4
    epochs: float = 6.0
    batch: int | None = None
    rate: float | None = None
    rank: int = 0
    seed: int = 1
    device: str = "cpu"
    precision: Literal["f32", "bf16"] = "f32"
    seconds: float = math.inf
    evaluations: int = 20
    evaluation_share: float = 0.1
    patience: int = 8
    held_out_tokens: int = 5_000


class Evaluation(NamedTuple):
    """What a head accepts after so many steps and seconds, by position.

    loss: the mean of the steps since the evaluation before; NaN for that before training.
    """

    step: int
    seconds: float
    loss: float
    rates: tuple[float, ...]


@dataclass(frozen=True)
class State:
    """Where training is. evaluations: so far, the one before training included."""

    share: float
    step: int
    loss: float
    evaluations: Sequence[Evaluation]


@dataclass(frozen=True)
class Outcome:
    """The best weights and how they were found. stopped: why training ended."""

    weights: Weights
    before: Counts
    after: Counts
    step: int
    steps: int
    seconds: float
    tokens: int
    stopped: str
    history: tuple[Evaluation, ...]


@dataclass(frozen=True)
class Tables:
    """Rows of matrices that training needs.

    ids: [V], target ids of the draft vocabulary. output: [V, C], the trunk's. outputs: [V, C] of
    each block. embeddings: [U, C] of each block, of the tokens that occur; `place` maps a token to
    its row. A block that has none of its own has the trunk's, the same tensor.
    """

    ids: NDArray[np.int64]
    output: Tensor
    outputs: tuple[Tensor, ...]
    embeddings: tuple[Tensor, ...]
    place: NDArray[np.int64]


def read_tables(
    model: Model, samples: Sequence[Sample], ids: NDArray[np.int64], *, own: bool = True
) -> Tables:
    """Read the rows for these samples and this draft vocabulary, dequantized.

    own: with the matrices of the model's head; else the trunk's are read.
    """
    n_vocab = model.vocabulary_size or 0
    used = np.unique(np.concatenate([sample.tokens for sample in samples])).astype(np.int64)
    if not len(used) or used[0] < 0 or used[-1] >= n_vocab:
        raise RequestError(f"{model.path}: expected tokens from 0 to {n_vocab - 1} in the samples")
    place = np.zeros(n_vocab, np.int64)
    place[used] = np.arange(len(used))
    output = OUTPUT_TENSOR if OUTPUT_TENSOR in model.tensors else EMBEDDING_TENSOR
    blocks = range(
        model.head.trunk_layers, model.head.trunk_layers + max(model.head.usable_layers, 1)
    )
    found = own_tables(model) if own else {}

    def rows_of_blocks(suffix: str, trunk: str, rows: NDArray[np.int64]) -> Iterator[Tensor]:
        """Those of the trunk, then of each block."""
        shared = torch.from_numpy(read_rows(model, trunk, rows))
        yield shared
        for name in (f"blk.{block}.{suffix}" for block in blocks):
            yield torch.from_numpy(read_rows(model, name, rows)) if name in found else shared

    embedding_suffix, output_suffix = TABLE_SUFFIXES
    trunk_output, *outputs = rows_of_blocks(output_suffix, output, ids)
    _, *embeddings = rows_of_blocks(embedding_suffix, EMBEDDING_TENSOR, used)
    return Tables(ids, trunk_output, tuple(outputs), tuple(embeddings), place)


def memory_needed(
    config: BlockConfig,
    weights: Weights,
    settings: TrainSettings,
    n_draft: int,
    n_tokens: int,
    own: int,
) -> int:
    """An estimate of the bytes that training takes, without the interpreter and PyTorch itself.

    n_draft: size of the draft vocabulary. n_tokens: different tokens in the samples. own: how many
    embeddings and outputs the head has besides the trunk's.
    """
    values = sum(array.size for array in weights.values())
    trained = values
    if settings.rank:
        trained = sum(settings.rank * sum(a.shape) for a in weights.values() if a.ndim == 2)
    # Weights, the best ones and those read from the file; gradient, momentum, and Muon's products.
    parameters = 4 * (3 * values + 3 * trained)
    copies = 2 if settings.precision == "bf16" else 1
    rows = 4 * config.width * (n_tokens + n_draft * copies) * (1 + own)
    widest = max((array.shape[-2] for array in weights.values() if array.ndim > 1), default=1)
    # What backward needs of each row of each step: some 12 tensors of the width and 5 of the FFN.
    batch = settings.batch or default_batch(config.width)
    activations = 4 * batch * settings.steps * (12 * config.width + 5 * widest)
    return parameters + rows + activations


def default_device() -> str:
    """A GPU that PyTorch can use, else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def check_device(device: str) -> None:
    """RequestError for a device that PyTorch does not know, or cannot use here."""
    try:
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError, ImportError):
        raise RequestError(
            f"--device: expected a device that PyTorch can use here, found {device}; leave the "
            f"option out for {default_device()}"
        ) from None


def precision_of(device: str) -> Literal["f32", "bf16"]:
    """BF16 products where the hardware has them; weights and sums are F32 anyway."""
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.is_bf16_supported() else "f32"
    if device != "cpu":
        return "f32"
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    known = [getattr(torch.cpu, name, None) for name in names]
    return "bf16" if any(ask is not None and ask() for ask in known) else "f32"


class Trainer:
    """Trains a block on samples; `run` may be called once.

    weights: to start from. folder: where checkpoints are kept; a run that was killed goes on from
    the last one if nothing else has changed.
    """

    def __init__(
        self,
        configs: Sequence[BlockConfig],
        weights: Weights,
        tables: Tables,
        train: Sequence[Sample],
        held_out: Sequence[Sample],
        settings: TrainSettings,
        folder: Path,
        divisors: NDArray[np.float32] | None = None,
    ) -> None:
        self._settings = settings
        self._train = train
        self._held_out = _up_to(held_out, settings.held_out_tokens)
        self._path = folder / CHECKPOINT_NAME
        self._key = _key(configs, weights, tables, train, held_out, settings)
        self._device = torch.device(settings.device)
        self._products = torch.bfloat16 if settings.precision == "bf16" else torch.float32
        self._tables = tables
        self._listed = np.zeros(len(tables.place), bool)
        self._listed[tables.ids] = True
        self._width = configs[0].width
        self._size = settings.batch or default_batch(self._width)
        every = {*tables.outputs, tables.output, *tables.embeddings}
        there = {table: table.to(self._device) for table in every}
        self._outputs = [there[table] for table in tables.outputs]
        self._embeddings = [there[table] for table in tables.embeddings]
        low = {table: there[table].to(self._products) for table in (tables.output, *tables.outputs)}
        self._low_output = low[tables.output]
        self._low_outputs = [low[table] for table in tables.outputs]
        torch.manual_seed(settings.seed)
        self._block = make_head(configs, weights, settings.rank, divisors).to(self._device)
        matrices = [p for p in self._block.parameters() if p.dim() > 1]
        vectors = [p for p in self._block.parameters() if p.dim() == 1]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices, self._products, _WEIGHT_DECAY),
            torch.optim.AdamW(vectors, betas=_BETAS, weight_decay=0.0),
        )
        self._total = max(1, round(settings.epochs * len(list(self._epoch(0)))))

    def run(self, progress: Callable[[State], None] = lambda _: None) -> Outcome:
        """Train until the epochs or the time are over, or nothing is gained any more."""
        began = time.monotonic()
        done = self._resume() or self._start()
        settings, earlier = self._settings, done.seconds
        rate = settings.rate
        if rate is None:
            rate = default_rate(self._width, done.before)
        every = self._interval()
        losses: list[float] = []  # since the last evaluation
        stopped = "all epochs done"
        for batch in self._batches(done.step):
            share = max(done.step / self._total, done.seconds / settings.seconds)
            if share >= 1:
                stopped = "the time is over"
                break
            loss = self._update(batch, rate * _rate(share), done.step % _EVERY)
            if not math.isfinite(loss):
                stopped = f"the loss became {loss} in step {done.step + 1}"
                break
            losses.append(loss)
            done.step += 1
            done.tokens += sum(len(sample) for sample in batch)
            done.seconds = earlier + time.monotonic() - began
            if len(losses) == every:
                self._assess(done, losses)
                losses = []
                if done.without_gain >= settings.patience:
                    stopped = f"no gain in the last {done.without_gain} evaluations"
                    break
            progress(State(share, done.step, loss, done.history))
        if losses:
            self._assess(done, losses)
        self._block.load_state_dict(done.best)
        return Outcome(
            self._block.weights(),
            done.before,
            done.after,
            done.best_step,
            done.step,
            earlier + time.monotonic() - began,
            done.tokens,
            stopped,
            tuple(done.history),
        )

    def _start(self) -> _Progress:
        first, loss = self.evaluate()
        done = _Progress(first, first, self._snapshot(), loss)
        done.history.append(Evaluation(0, 0.0, math.nan, first.rates))
        return done

    def _interval(self) -> int:
        """Steps from one evaluation to the next."""
        settings = self._settings
        share = math.ceil(len(self._batches_held_out()) / settings.evaluation_share)
        return max(1, share, self._total // settings.evaluations)

    def _assess(self, done: _Progress, losses: Sequence[float]) -> None:
        """Evaluate, keep the weights if they are the best, and save all.

        losses: of the steps since the last evaluation.
        """
        acceptance, loss = self.evaluate()
        mean = float(np.mean(losses))
        done.history.append(Evaluation(done.step, done.seconds, mean, acceptance.rates))
        if loss < done.lowest:
            done.after, done.best_step, done.lowest = acceptance, done.step, loss
            done.best = self._snapshot()
        # A good head is worse at first, while the rate is high, and better in the end.
        if loss < done.lowest_trained:
            done.lowest_trained, done.without_gain = loss, 0
        else:
            done.without_gain += 1
        self._save(done)

    def _update(self, batch: Sequence[Sample], rate: float, first: int) -> float:
        """One step of the optimizer, unless loss or gradient is not finite; returns the loss.

        first: the first row from which more than one draft is learned.
        """
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        packed = self._pack(batch)
        loss = self._loss_of(packed, self._block_steps(packed, first, _EVERY), first, _EVERY)
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self._block.parameters(), _CLIP)
        value = float(loss.detach())
        if not math.isfinite(float(norm)):
            return math.nan
        if math.isfinite(value):
            for optimizer in self._optimizers:
                optimizer.step()
        return value

    def _loss_of(
        self, packed: _Packed, outputs: Iterable[Tensor], first: int = 0, every: int = 1
    ) -> Tensor:
        """The weighted mean of the steps' losses over the rows that count."""
        counts = packed.counts
        teachers = counts.flatten().cumsum(0).view_as(counts) - 1  # of each position that counts
        states, weights, rows = [], [], []
        for step, state in enumerate(outputs):
            # Row i of step s predicts what follows position i + 1 + s.
            own = rows_of(step, counts.shape[1], first, every)
            valid, teacher = (t[:, step + 1 :][:, own] for t in (counts, teachers))
            states.append(state.float()[valid])
            rows.append(teacher[valid])
            weight = _STEP_DECAY**step / max(len(rows[-1]), 1)
            weights.append(torch.full_like(states[-1][:, 0], weight))
        total = sum(_STEP_DECAY**step for step in range(len(states)))
        hidden = packed.hidden[counts].float()
        by_output: dict[Tensor, list[int]] = {}  # the steps whose logits are products with it
        for step in range(len(states)):
            by_output.setdefault(_of_step(self._low_outputs, step), []).append(step)
        losses = []
        for output, steps in by_output.items():
            of_steps = [torch.cat([part[i] for i in steps]) for part in (states, weights, rows)]
            order = of_steps[2].argsort(stable=True)
            own_states, own_weights, own_rows = (part[order] for part in of_steps)
            losses.append(
                draft_loss(
                    own_states, own_weights / total, own_rows, output, self._low_output, hidden
                )
            )
        return torch.stack(losses).sum()

    def _block_steps(self, packed: _Packed, first: int = 0, every: int = 1) -> Iterator[Tensor]:
        places = packed.places
        fed = {table: table[places] for table in {*self._embeddings}}
        with torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._products is torch.bfloat16
        ):
            yield from self._block.steps(
                packed.hidden,
                [fed[table] for table in self._embeddings],
                self._settings.steps,
                first=first,
                every=every,
            )

    @torch.no_grad()
    def evaluate(self) -> tuple[Counts, float]:
        """Acceptance by position on the held-out samples, with F32 output products; mean loss.

        The loss stands for acceptance at all temperatures. It also changes where no draft does, and
        so has less noise than the rates of a few texts.
        """
        counts, loss, rows = [], 0.0, 0
        for batch in self._batches_held_out():
            packed = self._pack(batch)
            outputs = list(self._block_steps(packed))
            n = int(packed.counts.sum())
            loss, rows = loss + n * float(self._loss_of(packed, outputs)), rows + n
            drafts = np.full((*packed.counts.shape, self._settings.steps), -1, np.int32)
            for step, state in enumerate(outputs):
                flat = state.reshape(-1, state.shape[-1]).float()
                parts = torch.split(flat, 512)
                output = _of_step(self._outputs, step)
                best = torch.cat([(part @ output.T).argmax(-1) for part in parts])
                ids = self._tables.ids[best.cpu().numpy()].reshape(len(batch), -1)
                drafts[:, : state.shape[1], step] = ids
            for sample, own in zip(batch, drafts, strict=True):
                counts.append(measure.count(sample, own[: len(sample)]))
        return measure.total(counts), loss / rows

    def _batches_held_out(self) -> list[list[Sample]]:
        return list(_filled(sorted(self._held_out, key=len), self._size))

    def _pack(self, batch: Sequence[Sample]) -> _Packed:
        """Samples of a batch as tensors, padded to the longest."""
        n, width = max(map(len, batch)), batch[0].hidden.shape[1]
        hidden = np.zeros((len(batch), n, width), np.float16)
        places = np.zeros((len(batch), n), np.int64)
        counts = np.zeros((len(batch), n), bool)
        for i, sample in enumerate(batch):
            m = len(sample)
            hidden[i, :m] = sample.hidden
            places[i, :m] = self._tables.place[sample.tokens]
            counts[i, sample.start : m - 1] = self._listed[sample.tokens[sample.start + 1 :]]
            counts[i, m - 1] = True
        return _Packed(*(torch.from_numpy(a).to(self._device) for a in (hidden, places, counts)))

    def _batches(self, skip: int) -> Iterator[list[Sample]]:
        """The batches of all epochs but the first `skip`."""
        epochs = map(self._epoch, itertools.count())
        return itertools.islice(itertools.chain.from_iterable(epochs), skip, self._total)

    def _epoch(self, epoch: int) -> Iterator[list[Sample]]:
        """All samples once, in an order that depends on seed and epoch."""
        random = np.random.default_rng((self._settings.seed, epoch))
        order = [self._train[i] for i in random.permutation(len(self._train))]
        batches = []
        at = 0
        while at < len(order):
            tokens, end = 0, at
            while end < len(order) and tokens < _SORTED_BATCHES * self._size:
                tokens += len(order[end])
                end += 1
            batches += list(_filled(sorted(order[at:end], key=len), self._size))
            at = end
        for i in random.permutation(len(batches)):
            yield batches[i]

    # ------------------------------------------------------------------- checkpoints

    def _snapshot(self) -> dict[str, Tensor]:
        return {k: v.detach().cpu().clone() for k, v in self._block.state_dict().items()}

    def _save(self, done: _Progress) -> None:
        content = {
            "key": self._key,
            "block": self._snapshot(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "done": {
                **vars(done),
                "before": asdict(done.before),
                "after": asdict(done.after),
                "history": [tuple(evaluation) for evaluation in done.history],
            },
        }
        partial = self._path.with_suffix(".partial")
        try:
            torch.save(content, partial)
            os.replace(partial, self._path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise OutputError(f"{self._path}: cannot be written: {error}") from None

    def _resume(self) -> _Progress | None:
        """Load the checkpoint of an interrupted run of the same training, if there is one."""
        try:
            content = torch.load(self._path, map_location="cpu", weights_only=True)
            if content["key"] != self._key:
                return None
            done = content["done"]
            done["before"], done["after"] = (Counts(**done[n]) for n in ("before", "after"))
            done["history"] = [Evaluation(*found) for found in done["history"]]
            self._block.load_state_dict(content["block"])
            for optimizer, state in zip(self._optimizers, content["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            return _Progress(**done)
        except FileNotFoundError:
            return None
        except Exception as error:  # a torn or foreign file: anything may be raised
            raise RequestError(
                f"{self._path}: expected a checkpoint of this training, found a file that cannot "
                f"be read ({type(error).__name__}); remove it to start again"
            ) from None


@dataclass(frozen=True)
class _Packed:
    """A batch, padded: hidden [B, T, C], places and counts [B, T].

    counts: whether the token after a position counts: no draft can be one that is not in the draft
    vocabulary, and the trunk's distribution over the others says little there. What follows a text
    is unknown and counts.
    """

    hidden: Tensor
    places: Tensor
    counts: Tensor


@dataclass
class _Progress:
    """What a checkpoint holds besides weights and optimizer.

    best: the weights with the lowest held-out loss, the start's included; lowest_trained: the
    lowest loss after the start.
    """

    before: Counts
    after: Counts
    best: dict[str, Tensor]
    lowest: float
    lowest_trained: float = math.inf
    step: int = 0
    best_step: int = 0
    without_gain: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[Evaluation] = field(default_factory=list)


def default_batch(width: int) -> int:
    """Tokens of a batch: in proportion to the width, as Muon's share of a token's time is."""
    return max(_LEAST_BATCH, 2 * width)


def default_rate(width: int, start: Counts) -> float:
    """The highest learning rate: lower for a wider block, and for a head that is good already.

    A step's values have the size of the rate, its singular values sqrt(width) times that. A rate
    from which random weights learn fast makes a good head forget, and its own rate is too small for
    them.
    """
    highest = _RATE_OF_RANDOM_WEIGHTS / math.sqrt(width)
    return highest * math.pow(_RATE_OF_A_PERFECT_HEAD, start.rates[0])


def _rate(share: float) -> float:
    """The factor of the learning rate: a warm-up, then a cosine."""
    if share < _WARM_UP:
        return share / _WARM_UP + 0.01
    fallen = (share - _WARM_UP) / (1 - _WARM_UP)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * fallen))


def _filled(samples: Sequence[Sample], tokens: int) -> Iterator[list[Sample]]:
    """Batches of about `tokens` tokens, padding included."""
    batch: list[Sample] = []
    for sample in samples:
        longest = max([len(sample), *map(len, batch)])
        if batch and longest * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _up_to(samples: Sequence[Sample], tokens: int) -> list[Sample]:
    """The first samples with `tokens` tokens together, one at least."""
    chosen: list[Sample] = []
    n = 0
    for sample in samples:
        if chosen and n + len(sample) > tokens:
            break
        chosen.append(sample)
        n += len(sample)
    return chosen


def _of_step(of_blocks: Sequence[Tensor], step: int) -> Tensor:
    """That of the block that drafts in a step: its own of a chain, else the only one."""
    return of_blocks[step if len(of_blocks) > 1 else 0]


def _key(
    configs: Sequence[BlockConfig],
    weights: Weights,
    tables: Tables,
    train: Sequence[Sample],
    held_out: Sequence[Sample],
    settings: TrainSettings,
) -> str:
    """Identifies a training, so that only a checkpoint of the same one is continued.

    The time budget does not belong to it: what is left of --minutes differs from run to run.
    """
    same = replace(settings, seconds=math.inf)
    digest = hashlib.sha256(repr((*configs, same)).encode())
    for suffix, array in sorted(weights.items()):
        digest.update(suffix.encode())
        digest.update(np.ascontiguousarray(array).data)
    digest.update(tables.ids.tobytes())
    for sample in (*train, *held_out):
        digest.update(sample.tokens.tobytes())
    return digest.hexdigest()
