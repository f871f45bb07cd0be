"""Predict how fast a trunk drafts with each of several heads, on this machine.

The heads have the same weights in other types, or other draft vocabularies. Acceptance is counted
on the same greedy answers, and the costs of a cycle are measured in rounds over all heads, of
which the fastest counts, because other programs only add to them. The trunk's costs are those of
all rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from mtp_gguf.gguf_tools.machine.system import this_machine
from mtp_gguf.native.libraries.exact import kernels

from .calibration import built_in_text
from .costs import cycle_costs
from .head_costs import HeadCosts, shape_of
from .imatrix import windows_of
from .model import BenchModel, Setting
from .quality import DEPTH, acceptance_by_position, best_depth
from .result import CycleCosts
from .stats import Stats, rotated

_CONTEXT, _ANSWERS = 128, 8  # tokens of a window of text, and windows that are continued
_ROUNDS, _SECONDS = 3, 20.0  # of measuring costs: at least so many rounds, more in so short a time


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
    """A head to measure. kind: its type. rows: of its draft vocabulary; 0 for all."""

    kind: str
    path: Path
    rows: int = 0

    @property
    def label(self) -> str:
        """The type, or the type and the size of the draft vocabulary."""
        return f"{self.kind}, {self.rows} tokens" if self.rows else self.kind


@dataclass(frozen=True)
class Measured:
    """Of some heads: acceptance by position, by label; what drafting costs, if it was measured."""

    acceptance: dict[str, tuple[float, ...]]
    costs: HeadCosts | None


def measure_heads(
    trunk: Path,
    mix: str,
    heads: Sequence[HeadFile],
    threads: int,
    text: str = "",
    step: Callable[[float, str], None] = lambda *_: None,
    *,
    with_costs: bool = True,
) -> Measured:
    """Measure all heads with the trunk, in the order of `heads`.

    mix: of the trunk's types. heads: each with a label of its own. text: whose beginnings are
    continued; empty for the built-in one. step: called with the share that is done and what comes
    next. with_costs: measure them, too.
    """
    acceptance: dict[str, tuple[float, ...]] = {}
    costs: dict[str, list[CycleCosts]] = {head.label: [] for head in heads}
    rounds, number, shown, began = _ROUNDS if with_costs else 1, 0, 0.0, perf_counter()
    while number < rounds:
        for place, head in enumerate(rotated(heads, number)):
            shown = max(shown, (number + place / len(heads)) / rounds)
            step(shown, head.label)
            setting = Setting(DEPTH, fastmtp_size=head.rows)
            with BenchModel(trunk, n_ctx=4 * _CONTEXT, threads=threads, head=head.path) as m:
                ids = m.tokenize(text or built_in_text(m.write_chat))
                windows = windows_of(ids, _CONTEXT, None, m.bos, "--target-text")
                picked = windows[:: max(1, len(windows) // _ANSWERS)]
                if head.label not in acceptance:
                    acceptance[head.label] = acceptance_by_position(m, setting, picked[:_ANSWERS])
                if with_costs:
                    prompt = picked[0].tolist()
                    costs[head.label].append(cycle_costs(m, setting, prompt, blocks=1))
        number += 1
        if with_costs and number == 1:
            rounds = max(rounds, int(_SECONDS / (perf_counter() - began)))
    if not with_costs:
        return Measured(acceptance, None)
    every = [cost for each in costs.values() for cost in each]
    drafts = {
        (head.kind, head.rows): _least([cost.draft for cost in costs[head.label]]) for head in heads
    }
    measured = HeadCosts(
        this_machine(kernels()),
        shape_of(trunk, mix),
        _least([cost.verify for cost in every]),
        min(cost.rollback.median for cost in every),
        drafts,
    )
    return Measured(acceptance, measured)


def speeds_of(
    heads: Sequence[HeadFile], measured: Measured, costs: HeadCosts, where: Path | None = None
) -> list[HeadSpeed]:
    """What heads promise with these costs, which the file `where` has if they are not measured."""
    found = []
    for head in heads:
        rates = measured.acceptance[head.label]
        draft = costs.draft(head.kind, head.rows, where)
        depth, speed = best_depth(rates, costs.verify, draft, costs.rollback, least=1)
        found.append(HeadSpeed(head.label, rates, depth, speed))
    return found


def _least(rounds: Sequence[Sequence[Stats]]) -> tuple[float, ...]:
    """The fastest round's median at each place."""
    return tuple(min(stats.median for stats in place) for place in zip(*rounds, strict=True))
