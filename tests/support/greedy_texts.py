"""The greedy text of a model at each depth, with the default settings of a session.

    cd tests; python -m support.greedy_texts MODEL '{"depths": [0, 3], …}'

The second argument has the fields of `Work`. Prints the fields of `Written` by depth, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from support.generation import load, take
from support.near_ties import prompt_of

Depth = int | Literal["auto"]


@dataclass(frozen=True)
class Work:
    """What is written: after prompts of so many tokens so many more, at each of the depths.

    logits: look at each row's logits, too, for which a session decodes as ever but samples in
    Python. busy: the number of endless loops that run meanwhile. options: others of MTPLlama's.
    """

    depths: Sequence[Depth]
    prompts: Sequence[int]
    tokens: int
    threads: int = 1
    n_ctx: int = 4096
    logits: bool = False
    busy: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """The text after each prompt; a digest of each text's logits, if asked for; how it drafted."""

    texts: list[list[int]]
    logits: list[str]
    tokens_per_cycle: float


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that compete for the CPUs; they end by themselves after some minutes."""
    loop = ["timeout", "300", "sh", "-c", "while :; do :; done"]
    loops = [subprocess.Popen(loop) for _ in range(count)]
    try:
        yield
    finally:
        for process in loops:
            process.terminate()
            process.wait()


def write(model: str, depth: Depth, work: Work) -> Written:
    """All texts at one depth."""
    texts, digests = [], []
    given = {"n_ctx": work.n_ctx, "n_threads": work.threads, "n_threads_batch": work.threads}
    options = {"depth": depth, "logits_all": work.logits, **given, **work.options}
    with load(Path(model), **options) as llm, busy_loops(work.busy):
        for length in work.prompts:
            llm.reset()
            texts.append(take(llm, work.tokens, prompt_of(length, 8)))
            if work.logits:  # the last token's own row has chosen nothing yet
                rows = llm.scores[length - 1 : length - 1 + work.tokens]
                digests.append(hashlib.sha256(rows.tobytes()).hexdigest())
        return Written(texts, digests, llm.mtp_stats.tokens_per_cycle)


def main(model: str, work: Work) -> None:
    """Print what is written at each depth."""
    print(json.dumps([asdict(write(model, depth, work)) for depth in work.depths]))


if __name__ == "__main__":
    main(sys.argv[1], Work(**json.loads(sys.argv[2])))
