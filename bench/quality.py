"""How much a quantized model differs from a reference: divergence, perplexity, drafting.

The text is cut into windows as llama-perplexity cuts it. The reference's logits are kept in a file
(`logit_file`), so that it runs once for any number of candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.model import Model

from .costs import cycle_costs
from .generation import generate
from .logit_file import LogitFile, Logits, Packed, first_row, unpack
from .model import BenchModel, Reader, Setting

DEPTH = 3
_PROMPT, _ANSWER = 64, 48  # tokens
_ANSWERS = 8
_NEGLIGIBLE = np.float32(-16)  # log-probabilities of the reference below this do not count
_ROWS = 32  # that a thread compares at once

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Divergence:
    """What llama-perplexity --kl-divergence prints; KL divergences are in nats.

    same_top: share of tokens for which both models have the same most likely token.
    """

    mean: Mean
    median: float
    percentile_99_9: float
    maximum: float
    same_top: Mean
    perplexity: Mean
    reference_perplexity: Mean
    tokens: int


@dataclass(frozen=True)
class Drafting:
    """Acceptance by position in the draft, and the speed that it predicts on this machine.

    tokens_per_second: at the best depth; plain: without drafting. verify: milliseconds of a batch
    of 1, 2, … tokens.
    """

    acceptance: tuple[float, ...]
    depth: int
    tokens_per_second: float
    plain: float
    verify: tuple[float, ...]


@dataclass(frozen=True)
class Candidate:
    """A file that was compared with the reference. drafting: None if it cannot draft."""

    HEADS: ClassVar[tuple[str, ...]] = (
        "size",
        "mean KLD",
        "median",
        "99.9 %",
        "same top",
        "perplexity",
        "acceptance",
        "predicted tok/s",
    )

    name: str
    nbytes: int
    divergence: Divergence
    drafting: Drafting | None

    def cells(self) -> tuple[str, ...]:
        """The values under HEADS."""
        d = self.divergence
        drafting = ("", "")
        if self.drafting is not None:
            drafting = (
                " ".join(f"{rate:.0%}" for rate in self.drafting.acceptance),
                f"{self.drafting.tokens_per_second:.1f} at depth {self.drafting.depth}",
            )
        return (
            f"{self.nbytes / 1e6:.1f} MB",
            f"{d.mean.value:.5f} ± {d.mean.error:.5f}",
            f"{d.median:.5f}",
            f"{d.percentile_99_9:.4f}",
            f"{d.same_top.value:.2%}",
            f"{d.perplexity.value:.4f} ± {d.perplexity.error:.4f}",
            *drafting,
        )


@dataclass(frozen=True)
class _Rows:
    """Of each token: KL divergence, losses, and whether the most likely tokens are the same."""

    divergence: Floats
    loss: Floats
    reference_loss: Floats
    same: NDArray[np.bool_]


def check_same_model(reference: Model, candidate: Model) -> None:
    """RequestError unless both have the architecture, the shape and the tokens of one model."""
    architecture = reference.first.scalar("general.architecture")
    keys = ("general.architecture", f"{architecture}.embedding_length")
    for key in keys:
        have, want = candidate.first.scalar(key), reference.first.scalar(key)
        if have != want:
            raise RequestError(
                f"{candidate.path}: {key}: expected {want}, as in the reference {reference.path}, "
                f"found {have}; compare files of one model"
            )
    tokens = "tokenizer.ggml.tokens"
    if tokens in reference.first.keys and (
        tokens not in candidate.first.keys
        or candidate.first.raw(tokens) != reference.first.raw(tokens)
    ):
        raise RequestError(
            f"{candidate.path}: expected the vocabulary of the reference {reference.path}, found "
            "another; compare files of one model"
        )


def store_reference(
    reader: Reader, file: LogitFile, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Let the reference read all windows of `file` and keep its logits there."""
    first = first_row(file.windows.shape[1])
    file.write(lambda i: reader.logits(file.windows[i], first)[:-1], progress)


def measure_divergence(
    reader: Reader,
    file: LogitFile,
    progress: Callable[[int], None] = lambda _: None,
    *,
    threads: int = 1,
    windows: Sequence[int] | None = None,
) -> Divergence:
    """Compare a candidate with the reference's logits. windows: only these, by their index."""
    first = first_row(file.windows.shape[1])
    parts: list[_Rows] = []
    with ThreadPoolExecutor(threads) as pool:
        for done, index in enumerate(windows or range(len(file.windows)), 1):
            window = file.windows[index]
            logits, packed = reader.logits(window, first)[:-1], file.window(index)
            said = window[first + 1 :]
            cuts = range(_ROWS, len(said), _ROWS)
            rows_of = (np.split(array, cuts) for array in (logits, packed, said))
            parts += pool.map(_compare, *rows_of)
            progress(done)
    rows = _Rows(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("divergence", "loss", "reference_loss", "same")
        )
    )
    same = rows.same.mean()
    return Divergence(
        mean=_mean(rows.divergence),
        median=float(np.median(rows.divergence)),
        percentile_99_9=float(np.percentile(rows.divergence, 99.9)),
        maximum=float(rows.divergence.max()),
        same_top=Mean(float(same), float(np.sqrt(same * (1 - same) / max(len(rows.same) - 1, 1)))),
        perplexity=_perplexity(rows.loss),
        reference_perplexity=_perplexity(rows.reference_loss),
        tokens=len(rows.same),
    )


def _compare(logits: Logits, packed: Packed, said: NDArray[np.int32]) -> _Rows:
    """Rows of one window; said: the token that follows each in the text."""
    reference = unpack(packed, logits.shape[1])
    highest = logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(logits - highest).sum(axis=1, keepdims=True, dtype=np.float64))
    log_probs = logits - (highest + log_sum.astype(np.float32))
    terms = np.exp(reference) * (reference - log_probs)
    divergence = np.where(reference > _NEGLIGIBLE, terms, 0).sum(axis=1, dtype=np.float64)
    at = (np.arange(len(said)), said)
    return _Rows(
        divergence.astype(np.float32),
        -log_probs[at],
        -reference[at],
        logits.argmax(axis=1) == reference.argmax(axis=1),
    )


def _mean(values: Floats) -> Mean:
    doubles = values.astype(np.float64)
    return Mean(float(doubles.mean()), float(doubles.std() / np.sqrt(max(len(values) - 1, 1))))


def _perplexity(losses: Floats) -> Mean:
    loss = _mean(losses)
    value = float(np.exp(loss.value))
    return Mean(value, value * loss.error)


def measure_drafting(model: BenchModel, windows: NDArray[np.int32]) -> Drafting:
    """Continue the beginnings of some windows greedily, with drafts, and time a few cycles."""
    setting = Setting(DEPTH)
    rates = acceptance_by_position(model, setting, windows[:_ANSWERS])
    costs = cycle_costs(model, setting, windows[0][:_PROMPT].tolist(), blocks=1)
    verify = [stats.median for stats in costs.verify]
    draft = [stats.median for stats in costs.draft]
    best, speed = best_depth(rates, verify, draft, costs.rollback.median)
    return Drafting(rates, best, speed, 1000 / verify[0], tuple(verify))


def acceptance_by_position(
    model: BenchModel, setting: Setting, windows: NDArray[np.int32]
) -> tuple[float, ...]:
    """The share of drafts that are accepted, by position, in answers to the windows' beginnings."""
    drafted, accepted = np.zeros(DEPTH), np.zeros(DEPTH)
    prompts = [window[:_PROMPT].tolist() for window in windows]
    with model.session(setting) as session:
        for prompt in prompts:
            stats = generate(model, session, prompt, _ANSWER, DEPTH).stats
            drafted[: len(stats.drafted)] += stats.drafted
            accepted[: len(stats.accepted)] += stats.accepted
            session.remove(0)
    return tuple((accepted / np.maximum(drafted, 1)).tolist())


def best_depth(
    rates: Sequence[float],
    verify: Sequence[float],
    draft: Sequence[float],
    rollback: float,
    *,
    least: int = 0,
) -> tuple[int, float]:
    """The depth of at least `least` with the most tokens per second, and how many these are.

    rates: of acceptance, by position. verify[i]: milliseconds of a batch of i + 1 tokens. draft[i]:
    of a chain of i + 1 drafts. rollback: of rejected drafts.
    """
    speeds = [1000 / verify[0]] + [
        1000 * (1 + sum(rates[:depth])) / (verify[depth] + draft[depth - 1] + rollback)
        for depth in range(1, len(verify))
    ]
    best = max(range(least, len(speeds)), key=lambda depth: speeds[depth])
    return best, speeds[best]
