"""How long things will take here, guessed from a model's first batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from .costs import cycle_costs
from .model import BenchModel, Setting
from .texts import write

_PROBE_DEPTH = 3
_PROBE_TOKENS = 16
_PRIOR = 2.0  # drafts, half of them right: so few tokens alone prove no acceptance


@dataclass(frozen=True)
class Pace:
    """Milliseconds, and a chance.

    verify_ms[i]: of a trunk batch of i + 1 tokens; draft_ms[i]: of i + 1 drafts; prompt_ms: of a
    prompt's token; open_ms: of making a context. acceptance: of a draft, those before it right.
    """

    verify_ms: Sequence[float]
    draft_ms: Sequence[float]
    prompt_ms: float
    open_ms: float
    acceptance: float

    def text_ms(self, depth: int, tokens: int) -> float:
        """Milliseconds of writing, without the prompt."""
        per_cycle = sum(self.acceptance**i for i in range(depth + 1))
        verify = self.verify_ms[min(depth, len(self.verify_ms) - 1)]
        draft = self.draft_ms[min(depth, len(self.draft_ms)) - 1] if depth else 0.0
        return tokens / per_cycle * (verify + draft)

    def round_of_cycles_ms(self) -> float:
        """Milliseconds of one cycle at every depth."""
        return sum(self.verify_ms) + sum(self.draft_ms)


def probe(
    model: BenchModel,
    setting: Setting,
    prompt: Sequence[int],
    clock: Callable[[], float] = perf_counter,
) -> Pace:
    """A few seconds' look. setting: with the most drafts of which costs are to be known.

    A text comes before all that is timed: it brings the file into memory, which may take longer
    than everything after it.
    """
    with model.session(setting) as session:
        depth = min(_PROBE_DEPTH, setting.max_depth)
        stats = write(model, session, prompt, _PROBE_TOKENS, depth).stats
    # A draft was tried where all before it were right.
    tried = sum(stats.drafted[:1]) + sum(stats.accepted[:-1])
    acceptance = (_PRIOR / 2 + sum(stats.accepted)) / (_PRIOR + tried)
    costs = cycle_costs(model, setting, prompt, blocks=1, cycles=1)
    began = clock()
    with model.session(replace(setting, max_depth=0)) as session:  # a context that is new
        opened = clock()
        session.decode(prompt)
        decoded = clock()
    return Pace(
        tuple(s.median for s in costs.verify),
        tuple(s.median for s in costs.draft),
        (decoded - opened) * 1e3 / len(prompt),
        (opened - began) * 1e3,
        acceptance,
    )
