"""A plan of measurements, said before they begin."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .share_progress import duration

if TYPE_CHECKING:
    from mtp_gguf.bench.plan import Plan


def plan_lines(plan: "Plan", budget: float | None) -> Iterator[str]:
    """What will be measured, about how long each part takes, and what is left out."""
    amount = plan.amount
    within = "" if budget is None else f", to end within {duration(budget)}"
    if budget is not None and plan.seconds > budget:
        within = f", more than the {duration(budget)} of --budget: nothing else can be left out"
    yield (
        f"plan: about {duration(plan.seconds)}{within}; {_count(amount.prompts, 'prompt')} of each "
        f"kind, answers of {amount.tokens} tokens, {_count(amount.rounds, 'round')}"
    )
    for what, seconds in plan.lines(plan.kept):
        yield f"  {duration(seconds):>9}  {what}"
    for what, _ in plan.lines(plan.left_out):
        yield f"  {'left out':>9}  {what}"
    if plan.whole > 1.2 * plan.seconds:
        yield f"everything in full would take about {duration(plan.whole)} (--full)"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
