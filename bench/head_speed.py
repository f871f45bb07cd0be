"""Predict how fast a trunk drafts with each of several heads, on this machine.

The heads have the same weights in other types, or other draft vocabularies. Acceptance is counted
on the same greedy answers, and the costs of a cycle are measured in rounds over all heads, of
which the fastest counts, because other programs only add to them. The trunk's costs are those of
all rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .calibration import built_in_text
from .costs import CycleCosts, cycle_costs
from .imatrix import windows_of
from .interleaved import rotated
from .model import BenchModel, Setting
from .quality import DEPTH, acceptance_by_position, best_depth

_CONTEXT, _ANSWERS = 128, 8  # tokens of a window of text, and windows that are continued
_ROUNDS = 3


@dataclass(frozen=True)
class HeadSpeed:
    """What a head promises: acceptance by position, and tokens per second with drafts.

    depth: the best one of at least 1. Whether to draft at all is decided when the model runs.
    label: the type, or the type and the size of the draft vocabulary.
    """

    label: str
    acceptance: tuple[float, ...]
    depth: int
    tokens_per_second: float


@dataclass(frozen=True)
class HeadFile:
    """A head to measure. rows: of its draft vocabulary; 0 for all."""

    label: str
    path: Path
    rows: int = 0


def measure_heads(
    trunk: Path,
    heads: Sequence[HeadFile],
    threads: int,
    text: str = "",
    step: Callable[[float, str], None] = lambda *_: None,
) -> list[HeadSpeed]:
    """Measure all heads with the trunk, in the order of `heads`.

    heads: each with a label of its own. text: whose beginnings are continued; empty for the
    built-in one. step: called with the share that is done and what comes
    next.
    """
    acceptance: dict[str, tuple[float, ...]] = {}
    costs: dict[str, list[CycleCosts]] = {head.label: [] for head in heads}
    for number in range(_ROUNDS):
        for place, head in enumerate(rotated(heads, number)):
            step((number * len(heads) + place) / (_ROUNDS * len(heads)), head.label)
            setting = Setting(DEPTH, fastmtp_size=head.rows)
            with BenchModel(trunk, n_ctx=4 * _CONTEXT, threads=threads, head=head.path) as m:
                ids = m.tokenize(text or built_in_text(m.write_chat))
                windows = windows_of(ids, _CONTEXT, None, m.bos, "--target-text")
                picked = windows[:: max(1, len(windows) // _ANSWERS)]
                if head.label not in acceptance:
                    acceptance[head.label] = acceptance_by_position(m, setting, picked[:_ANSWERS])
                costs[head.label].append(cycle_costs(m, setting, picked[0].tolist(), blocks=1))
    every = [cost for each in costs.values() for cost in each]
    verify = [min(c.verify[i].median for c in every) for i in range(DEPTH + 1)]
    rollback = min(c.rollback.median for c in every)
    found = []
    for head in heads:
        own = costs[head.label]
        draft = [min(c.draft[i].median for c in own) for i in range(DEPTH)]
        depth, speed = best_depth(acceptance[head.label], verify, draft, rollback, least=1)
        found.append(HeadSpeed(head.label, acceptance[head.label], depth, speed))
    return found
