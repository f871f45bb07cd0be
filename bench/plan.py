"""Which measurements fit into a time budget. Knows neither a model nor a clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Amount:
    """How much is generated: prompts of each kind, tokens of each answer, and rounds."""

    prompts: int
    tokens: int
    rounds: int


FULL = Amount(3, 128, 3)
# The smallest of these still gives a spread and texts that go beyond their beginnings. Below it,
# tasks are skipped first, and the amount is reduced further only if that is not enough.
_SUFFICIENT = (FULL, Amount(2, 128, 3), Amount(1, 128, 3), Amount(1, 96, 3), Amount(1, 64, 3))
_MINIMAL = (Amount(1, 48, 2), Amount(1, 32, 2), Amount(1, 24, 1))


@dataclass(frozen=True)
class Task:
    """One measurement that can be planned.

    key: identifies it to the code that measures. group, member: its label in the printed plan,
    where tasks of one group share a line. seconds: estimate for an amount. needed: never skipped.
    """

    key: Hashable
    group: str
    member: str
    seconds: Callable[[Amount], float]
    needed: bool = False


@dataclass(frozen=True)
class Plan:
    """What is measured, and in how long.

    tasks: all, most important first. planned: those to measure. whole: seconds without a budget.
    """

    amount: Amount
    tasks: tuple[Task, ...]
    planned: tuple[Task, ...]
    whole: float

    @property
    def skipped(self) -> tuple[Task, ...]:
        """The tasks that do not fit into the budget."""
        return tuple(task for task in self.tasks if task not in self.planned)

    @property
    def seconds(self) -> float:
        """Estimated seconds of the planned tasks."""
        return _total(self.planned, self.amount)

    def has(self, key: Hashable) -> bool:
        """Whether the task with this key is planned."""
        return any(task.key == key for task in self.planned)

    def lines(self, tasks: Sequence[Task]) -> list[tuple[str, float]]:
        """Label and estimated seconds for each group among the given tasks."""
        groups: dict[str, list[Task]] = {}
        for task in tasks:
            groups.setdefault(task.group, []).append(task)
        lines = []
        for group, members in groups.items():
            names = [task.member for task in members if task.member]
            label = f"{group}: {', '.join(names)}" if names else group
            lines.append((label, _total(members, self.amount)))
        return lines

    def adjust(self, done: Collection[Hashable], seconds: float) -> Plan:
        """The plan with `seconds` left for the tasks that are not done.

        Tasks are dropped if measuring was slower than estimated, and return if it was faster.
        """
        ahead = [task for task in self.tasks if task.key not in done]
        fitting = _fitting(ahead, self.amount, seconds)
        planned = [task for task in self.tasks if task.key in done or task in fitting]
        return replace(self, planned=tuple(planned))


def make_plan(
    tasks: Sequence[Task],
    budget: float | None,
    *,
    prompts: int | None = None,
    tokens: int | None = None,
    rounds: int | None = None,
) -> Plan:
    """The plan that measures most within a budget.

    The amount is as large as fits with all tasks. If not even a small amount fits, tasks that are
    not needed are skipped, the least important first.

    Args:
        tasks: most important first.
        budget: seconds; None for everything in full.
        prompts, tokens, rounds: fix that part of the amount.

    """

    def fixed(amount: Amount) -> Amount:
        return Amount(prompts or amount.prompts, tokens or amount.tokens, rounds or amount.rounds)

    whole = _total(tasks, fixed(FULL))
    if budget is None or whole <= budget:
        return Plan(fixed(FULL), tuple(tasks), tuple(tasks), whole)
    for amount in map(fixed, _SUFFICIENT):
        if _total(tasks, amount) <= budget:
            return Plan(amount, tuple(tasks), tuple(tasks), whole)
    needed = [task for task in tasks if task.needed]
    amounts = [fixed(a) for a in (_SUFFICIENT[-1], *_MINIMAL)]
    amount = next((a for a in amounts if _total(needed, a) <= budget), amounts[-1])
    return Plan(amount, tuple(tasks), tuple(_fitting(tasks, amount, budget)), whole)


def _fitting(tasks: Sequence[Task], amount: Amount, seconds: float) -> list[Task]:
    """All needed tasks, and of the others, in their order, each that still fits."""
    left = seconds - _total([task for task in tasks if task.needed], amount)
    fitting = []
    for task in tasks:
        if not task.needed:
            estimate = task.seconds(amount)
            if estimate > left:
                continue
            left -= estimate
        fitting.append(task)
    return fitting


def _total(tasks: Sequence[Task], amount: Amount) -> float:
    return sum(task.seconds(amount) for task in tasks)
