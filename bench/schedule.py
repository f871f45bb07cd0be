"""Carries out a plan within its budget, and reports how far it has come."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from .plan import Plan, Task, make_plan
from .result import DONE, PLANNED, SHORT, SKIPPED, PlannedPart

if TYPE_CHECKING:
    from .options import BenchOptions
    from .plan import Amount

# A part that was interrupted by other work does not stretch all later estimates beyond this.
_SLOWDOWN_BOUNDS = (0.5, 5.0)


class Schedule:
    """Runs the parts of a plan in order, skips what no longer fits, and reports progress.

    Use `start` once, then `run` for each part; the part calls `step` as it goes.
    """

    def __init__(
        self,
        budget: float | None,
        clock: Callable[[], float],
        progress: Callable[[float, str], None],
    ) -> None:
        """budget: seconds from now, None for unlimited. clock: seconds. progress: share, title."""
        self._budget = budget
        self._clock = clock
        self._progress = progress
        self._start = clock()
        self._plan: Plan | None = None
        self._slowdown = 1.0  # measured seconds over estimated seconds
        self._share = 0.0
        self._title = ""
        self.done: set[Hashable] = set()

    def start(self, tasks: Sequence[Task], options: BenchOptions) -> Plan:
        """Plan the tasks for the time that is left."""
        left = None if self._budget is None else self.seconds_left()
        o = options
        self._plan = make_plan(tasks, left, prompts=o.prompts, tokens=o.tokens, rounds=o.rounds)
        return self._plan

    @property
    def plan(self) -> Plan:
        """The current plan, once `start` was called."""
        assert self._plan is not None
        return self._plan

    @property
    def amount(self) -> Amount:
        """How many prompts, tokens and rounds are planned."""
        return self.plan.amount

    def elapsed(self) -> float:
        """Seconds since the schedule was made."""
        return self._clock() - self._start

    def seconds_left(self) -> float:
        """Seconds until the budget ends; infinite without one."""
        return math.inf if self._budget is None else self._budget - self.elapsed()

    def run(
        self,
        keys: Sequence[Hashable],
        measure: Callable[[], bool | None],
        *,
        representative: bool = False,
    ) -> bool:
        """Call `measure` if the plan still has a task with one of these keys.

        measure: returns False if it could not measure, so that the tasks remain to be done.
        representative: correct the estimates of later parts by the duration of this one.
        Returns whether `measure` was called.
        """
        self._plan = self.plan.adjust(self.done, self.seconds_left() / self._slowdown)
        tasks = [task for task in self._plan.planned if task.key in keys]
        if not tasks:
            return False
        self.announce(tasks[0].group)
        share_before, start = self._share, self._clock()
        measured = measure() is not False
        estimated = sum(task.seconds(self._plan.amount) for task in tasks)
        if representative:
            lowest, highest = _SLOWDOWN_BOUNDS
            slowdown = (self._clock() - start) / max(estimated, 1e-9)
            self._slowdown = min(max(slowdown, lowest), highest)
        if measured:
            self.done.update(task.key for task in tasks)
        self._advance(share_before + estimated / self._plan.seconds - self._share)
        return True

    def step(self, key: Hashable, parts: int) -> None:
        """One of several equal parts of a task is complete."""
        task = next((task for task in self.plan.planned if task.key == key), None)
        if task is not None and key not in self.done:
            self._advance(task.seconds(self.plan.amount) / self.plan.seconds / parts)

    def announce(self, title: str) -> None:
        """Report what is being measured."""
        self._title = title
        self._progress(self._share, title)

    def _advance(self, share: float) -> None:
        self._share = min(1.0, self._share + max(0.0, share))
        self.announce(self._title)

    def planned_parts(self, short: Collection[Hashable]) -> Iterator[PlannedPart]:
        """The plan by lines; tasks of one group in the same state share a line.

        short: keys of tasks that were measured for fewer rounds than planned.
        """

        def state(task: Task) -> str:
            if task in self.plan.skipped:
                return SKIPPED
            if task.key in short:
                return SHORT
            return DONE if task.key in self.done else PLANNED

        for current in dict.fromkeys(map(state, self.plan.tasks)):
            tasks = [task for task in self.plan.tasks if state(task) == current]
            for what, seconds in self.plan.lines(tasks):
                yield PlannedPart(what, seconds, current)
