"""An estimate of how long measurements will take, from the first batches of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from .costs import cycle_costs
from .generation import generate
from .model import BenchModel, Setting

_PROBE_DEPTH = 3
_PROBE_TOKENS = 16
# Pseudo-count of drafts, half of them accepted: so few tokens alone say little about acceptance.
_PRIOR = 2.0


@dataclass(frozen=True)
class Estimate:
    """Estimated costs in milliseconds, and the estimated acceptance rate.

    verify_ms[i]: a trunk batch of i + 1 tokens. draft_ms[i]: a chain of i + 1 drafts. prompt_ms:
    one token of a prompt. open_ms: creating a context. acceptance: of a draft whose predecessors
    were accepted.
    """

    verify_ms: Sequence[float]
    draft_ms: Sequence[float]
    prompt_ms: float
    open_ms: float
    acceptance: float

    def text_ms(self, depth: int, tokens: int) -> float:
        """Milliseconds of generating `tokens` tokens, without the prompt."""
        per_cycle = sum(self.acceptance**i for i in range(depth + 1))
        verify = self.verify_ms[min(depth, len(self.verify_ms) - 1)]
        chain = min(depth, len(self.draft_ms))
        draft = self.draft_ms[chain - 1] if chain else 0.0
        return tokens / per_cycle * (verify + draft)

    def round_of_cycles_ms(self) -> float:
        """Milliseconds of one cycle at every depth."""
        return sum(self.verify_ms) + sum(self.draft_ms)


def probe(
    model: BenchModel,
    setting: Setting,
    prompt: Sequence[int],
    clock: Callable[[], float] = perf_counter,
) -> Estimate:
    """Measure for a few seconds. setting: as for `cycle_costs`.

    A text is generated before anything is timed: it brings the file into memory, which can take
    longer than everything that follows.
    """
    with model.session(setting) as session:
        depth = min(_PROBE_DEPTH, setting.max_depth)
        stats = generate(model, session, prompt, _PROBE_TOKENS, depth).stats
    # A draft counts as tried if all drafts before it were accepted.
    tried = sum(stats.drafted[:1]) + sum(stats.accepted[:-1])
    acceptance = (_PRIOR / 2 + sum(stats.accepted)) / (_PRIOR + tried)
    costs = cycle_costs(model, setting, prompt, blocks=1, cycles=1)
    start = clock()
    with model.session(replace(setting, max_depth=0)) as session:  # needs a new context
        opened = clock()
        session.decode(prompt)
        decoded = clock()
    return Estimate(
        tuple(stats.median for stats in costs.verify),
        tuple(stats.median for stats in costs.draft),
        (decoded - opened) * 1e3 / len(prompt),
        (opened - start) * 1e3,
        acceptance,
    )
