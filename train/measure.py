"""Acceptance by position on held-out samples: of the block in PyTorch, and of a written GGUF.

Drafts start at every position of a text that the trunk wrote greedily. A draft is accepted if it is
the next token of the text and the drafts before it were accepted. Drafts beyond its end are not
counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.heads.acceptance import Counts
from mtp_gguf.native.head import Head

from .dataset import Sample


def count(sample: Sample, drafts: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(drafted, accepted) by position, each [steps].

    drafts: [len(sample), steps], in row i what was drafted from the state at position i and the
    token at i + 1.
    """
    steps = drafts.shape[1]
    drafted, accepted = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
    n = len(sample)
    right = np.ones(n, bool)
    for step in range(steps):
        rows = max(n - 2 - step, 0)  # row i predicts the token at position i + 2 + step
        right = right[:rows] & (drafts[:rows, step] == sample.tokens[step + 2 : step + 2 + rows])
        # Prompts are not the trunk's own text.
        drafted[step] = max(rows - sample.start, 0)
        accepted[step] = right[sample.start :].sum()
    return drafted, accepted


def total(counts: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> Counts:
    """The sum of the counts of several samples."""
    drafted, accepted = (np.sum(part, axis=0) for part in zip(*counts, strict=True))
    return Counts(tuple(drafted.tolist()), tuple(accepted.tolist()))


def measure_file(
    path: Path, samples: Sequence[Sample], steps: int, *, rows: int, threads: int
) -> Counts:
    """Measure the head of a GGUF with the draft graph, on at most `rows` positions.

    The head is given the recorded states, so the trunk does not run.
    """
    counts = []
    longest = max(len(sample) for sample in samples)
    with Head(path, n_threads=threads, n_ctx=longest + steps) as head:
        left = rows
        for sample in samples:
            n = min(len(sample) - 2, left + sample.start)
            if n - sample.start < 1:
                continue
            drafts = np.full((n + 2, steps), -1, np.int32)
            tokens, hidden = sample.tokens.tolist(), sample.hidden.astype(np.float32)
            if sample.start:
                head.feed(tokens[1 : sample.start + 1], hidden[: sample.start], 1)
            for i in range(sample.start, n):
                drafts[i] = head.draft([tokens[i + 1]], hidden[i : i + 1], i + 1, steps).tokens
            head.rollback(0)
            left -= n - sample.start
            counts.append(count(replace(sample, tokens=sample.tokens[: n + 2]), drafts))
    return total(counts)
