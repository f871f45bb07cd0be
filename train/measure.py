"""Acceptance by position on held-out samples: of the block in PyTorch, and of a written GGUF.

Drafts start at every position of a text that the trunk wrote greedily. A draft is accepted if it is
the trunk's most likely token and the drafts before it were accepted. Where a text goes on with
another token, nothing is known about later drafts, and they are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.native.head import Head

from .dataset import Sample


@dataclass(frozen=True)
class Acceptance:
    """Counts by position in the draft: `accepted` of `drafted`, as in MtpStats."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def rates(self) -> list[float]:
        """The acceptance rate by position; a draft after a rejected one is rejected."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def per_cycle(self) -> float:
        """Mean number of accepted drafts in a cycle."""
        return sum(self.rates)


def count(sample: Sample, drafts: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(drafted, accepted) by position, each [steps].

    drafts: [len(sample), steps], in row i what was drafted from the state at position i and the
    token at i + 1.
    """
    steps = drafts.shape[1]
    drafted, accepted = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
    n = len(sample)
    follows = sample.greedy[:-1] == sample.tokens[1:]  # the text goes on greedily after i
    # Prompts are not the trunk's own text.
    known = np.arange(n) >= sample.start
    right = np.ones(n, bool)
    for step in range(steps):
        rows = max(n - 1 - step, 0)  # row i predicts the token after position i + 1 + step
        if step:
            known = known[:rows] & follows[step : step + rows]
        right = right[:rows] & (drafts[:rows, step] == sample.greedy[step + 1 : step + 1 + rows])
        known = known[:rows]
        drafted[step] = known.sum()
        accepted[step] = (known & right).sum()
    return drafted, accepted


def total(counts: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> Acceptance:
    """The sum of the counts of several samples."""
    drafted, accepted = (np.sum(part, axis=0) for part in zip(*counts, strict=True))
    return Acceptance(tuple(drafted.tolist()), tuple(accepted.tolist()))


def measure_file(
    path: Path, samples: Sequence[Sample], steps: int, *, rows: int, threads: int
) -> Acceptance:
    """Measure the head of a GGUF with the draft graph, on at most `rows` positions.

    The head is given the recorded states, so the trunk does not run.
    """
    counts = []
    longest = max(len(sample) for sample in samples)
    with Head(path, n_threads=threads, n_ctx=longest + steps) as head:
        left = rows
        for sample in samples:
            n = min(len(sample) - 1, left + sample.start)
            if n - sample.start < 1:
                continue
            drafts = np.full((n + 1, steps), -1, np.int32)
            tokens, hidden = sample.tokens.tolist(), sample.hidden.astype(np.float32)
            if sample.start:
                head.feed(tokens[1 : sample.start + 1], hidden[: sample.start], 1)
            for i in range(sample.start, n):
                drafts[i] = head.draft([tokens[i + 1]], hidden[i : i + 1], i + 1, steps).tokens
            head.rollback(0)
            left -= n - sample.start
            counts.append(count(_first(sample, n + 1), drafts))
    return total(counts)


def _first(sample: Sample, n: int) -> Sample:
    return Sample(
        sample.tokens[:n],
        sample.hidden[:n],
        sample.greedy[:n],
        sample.log_sum[:n],
        sample.start,
        sample.held_out,
    )
