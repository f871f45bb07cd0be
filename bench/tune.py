"""`tune`: the search on a real model, and the profile that it results in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from mtp_gguf.gguf_tools.machine.system import this_machine
from mtp_gguf.gguf_tools.profile import (
    AUTO_MAX_DEPTH,
    LOOKUP_TOKENS,
    Costs,
    DraftSettings,
    Profile,
    identify,
    impossible_speed,
)
from mtp_gguf.native.libraries.exact import kernels
from mtp_gguf.native.libraries.replay import looks_up_by_default
from mtp_gguf.native.session import Rollback

from .costs import cycle_costs
from .estimate import Estimate, probe
from .generation import generate
from .model import BenchModel, Setting
from .other_programs import OtherPrograms
from .plan import FULL, Amount, Plan, Task, make_plan
from .prompts import SETS, texts_of
from .search import Search, SearchResult, Space
from .stats import rotated

COST_BLOCKS = 3
LONGEST_PROMPT = 1024

# After the first round, candidates below this share of the fastest speed are not measured again.
_CONTENTION = 0.9

_DEPTHS, _REFINE = "depths", "the best depth, its neighbours and auto"
# Labels of the comparisons that can be skipped, by field of Space.
LABELS = {
    "sizes": "sizes of the draft vocabulary",
    "draft_threads": "threads for drafting",
    "rollbacks": "rollback modes",
}


@dataclass(frozen=True)
class TuneOptions:
    """What to search, and for how long.

    budget: seconds, None for unlimited. own: the user's prompts, in addition to the built-in kinds.
    tokens of each answer and rounds of each comparison: None for as many as the budget allows.
    """

    space: Space
    budget: float | None = None
    kinds: Sequence[str] = tuple(SETS)
    own: Sequence[str] = ()
    tokens: int | None = None
    rounds: int | None = None
    threads: int = 2
    gpu_layers: int = 0
    head: Path | None = None


@dataclass(frozen=True)
class TuneResult:
    """The result of a search.

    profile: the profile to write; None if the search was interrupted. skipped: fields of Space that
    the budget did not allow to compare. warnings: sentences, why the profile is not to be trusted.
    """

    search: SearchResult
    profile: Profile | None
    skipped: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def tune(
    path: Path,
    options: TuneOptions,
    progress: Callable[[float, str], None],
    planned: Callable[[Plan], None] = lambda plan: None,
    clock: Callable[[], float] = monotonic,
) -> TuneResult:
    """Find the settings with which a model decodes fastest on this machine.

    KeyboardInterrupt ends the search with the result so far, once depths were compared; before
    that, it propagates.

    Args:
        progress: called with the share that is done and what is being measured.
        planned: called with the plan before anything is measured.
        clock: seconds.

    """
    start = clock()
    o = options
    others = OtherPrograms(o.threads)
    n_ctx = LONGEST_PROMPT + (o.tokens or FULL.tokens) + 64
    progress(0.0, "loading")
    with BenchModel(
        path, n_ctx=n_ctx, threads=o.threads, gpu_layers=o.gpu_layers, head=o.head
    ) as model:
        prompts = _prompts(model, o)
        progress(0.0, "estimating the duration")
        estimate = probe(model, Setting(max(o.space.depths)), prompts[0][:16], clock)
        budget = None if o.budget is None else o.budget - (clock() - start)
        tasks = _tasks(o.space, estimate, prompts)
        plan = make_plan(tasks, budget, prompts=1, tokens=o.tokens, rounds=o.rounds)
        planned(plan)
        deadline = math.inf if o.budget is None else start + o.budget
        comparison = _Comparison(model, prompts, plan, progress, clock, deadline)
        search = Search(o.space, comparison.measure, comparison.has_time)
        try:
            result = search.run()
            progress(1.0, "costs of a cycle")
            costs = _costs(model, result, prompts[0])
        except KeyboardInterrupt:
            so_far = search.result()
            if so_far is None:
                raise
            return TuneResult(so_far, None, comparison.skipped)
        device = model.device
    packages = ("mtp-gguf", "llama-cpp-python")
    profile = Profile(
        identify(path),
        this_machine(kernels(), device),
        result.settings,
        datetime.now(timezone.utc).date().isoformat(),
        ", ".join(f"{name} {version(name)}" for name in packages),
        result.plain_tok_s,
        result.tok_s,
        costs,
        result.tried,
    )
    return TuneResult(result, profile, comparison.skipped, warnings_of(result, others))


def warnings_of(result: SearchResult, others: OtherPrograms) -> tuple[str, ...]:
    """Sentences, why the result is not to be trusted: what it contradicts, and who interfered."""
    busy = others.note()
    times = ((c.settings.depth, c.tok_s / result.plain_tok_s) for c in result.tried)
    found = (impossible_speed(depth, ratio) for depth, ratio in times)
    return (*([busy] if busy else []), *filter(None, found))


def _costs(model: BenchModel, result: SearchResult, prompt: Sequence[int]) -> Costs:
    """The costs that depth auto starts from: those of the best drafting settings."""
    best = next(c.settings for c in result.tried if c.settings.depth != 0)
    setting = replace(_setting(best, model), max_depth=AUTO_MAX_DEPTH, lookup=0)
    costs = cycle_costs(model, setting, prompt, blocks=COST_BLOCKS, one_context=True)
    return Costs(
        tuple(s.median for s in costs.verify),
        tuple(max(s.median, 1e-6) for s in costs.draft),
    )


def _tasks(space: Space, estimate: Estimate, prompts: Sequence[Sequence[int]]) -> list[Task]:
    """The comparisons of a search; each includes no drafting."""

    def comparison(depths: Sequence[int], amount: Amount) -> float:
        ms = len(prompts) * sum(estimate.text_ms(d, amount.tokens) for d in (0, *depths))
        prefill = sum(map(len, prompts)) * estimate.prompt_ms + estimate.open_ms
        return amount.rounds * (ms + (1 + len(depths)) * prefill) / 1e3

    middle = sorted(space.depths)[len(space.depths) // 2]
    tasks = [
        Task(_DEPTHS, _DEPTHS, "", partial(comparison, space.depths), needed=True),
        Task(_REFINE, _REFINE, "", partial(comparison, [middle] * 4), needed=True),
    ]
    for name, label in LABELS.items():
        choices: Sequence[Any] = getattr(space, name)
        if len(choices) > 1:
            seconds = partial(comparison, [middle] * len(choices))
            tasks.append(Task(name, label, "", seconds))
    return tasks


class _Comparison:
    """Measures candidates interleaved: in every round each one generates from all prompts."""

    def __init__(
        self,
        model: BenchModel,
        prompts: Sequence[Sequence[int]],
        plan: Plan,
        progress: Callable[[float, str], None],
        clock: Callable[[], float],
        deadline: float,
    ) -> None:
        """deadline: the end of the budget by the clock."""
        self._model = model
        self._prompts = prompts
        self._plan = plan
        self._progress = progress
        self._clock = clock
        self._deadline = deadline
        self._start = clock()
        self._done: list[str] = []  # keys of the plan's tasks
        self._share = 0.0
        self._next: str | None = None

    @property
    def skipped(self) -> tuple[str, ...]:
        """The fields of Space that the budget does not allow to compare."""
        return tuple(str(task.key) for task in self._plan.skipped)

    def has_time(self, name: str) -> bool:
        """Whether the budget allows the comparison of this field of Space; it is then the next."""
        done = [task for task in self._plan.planned if task.key in self._done]
        estimated = sum(task.seconds(self._plan.amount) for task in done)
        slowdown = (self._clock() - self._start) / max(estimated, 1e-9)
        left = (self._deadline - self._clock()) / max(slowdown, 1e-9)
        self._plan = self._plan.adjust(self._done, left)
        self._next = name if self._plan.has(name) else None
        return self._next is not None

    def measure(self, settings: Sequence[DraftSettings]) -> list[float]:
        """Median tokens per second of each setting; the first one is no drafting.

        Settings far behind the fastest are measured once only, no drafting in every round.
        """
        rounds = self._plan.amount.rounds
        speeds: list[list[float]] = [[] for _ in settings]
        remaining = list(range(len(settings)))
        task = self._next_task()
        share = task.seconds(self._plan.amount) / self._plan.seconds
        for i in range(rounds):
            start = self._clock()
            for position, j in enumerate(rotated(remaining, i)):
                done = (i + position / len(remaining)) / rounds
                self._progress(min(self._share + share * done, 1.0), describe(settings[j]))
                speeds[j].append(self._speed(settings[j]))
            medians = [median(values) for values in speeds]
            limit = max(medians) * _CONTENTION
            remaining = [j for j in remaining if j == 0 or medians[j] >= limit]
            if self._clock() + (self._clock() - start) > self._deadline:
                break
        self._done.append(str(task.key))
        self._share += share
        return [median(values) for values in speeds]

    def _next_task(self) -> Task:
        """The task that `has_time` approved last, else the depths, and then their refinement."""
        key = _REFINE if _DEPTHS in self._done else _DEPTHS
        key, self._next = self._next or key, None
        return next(task for task in self._plan.planned if task.key == key)

    def _speed(self, settings: DraftSettings) -> float:
        """Tokens per second over all prompts."""
        tokens, seconds = 0, 0.0
        depth: Any = settings.depth
        with self._model.session(_setting(settings, self._model)) as session:
            for prompt in self._prompts:
                text = generate(self._model, session, prompt, self._plan.amount.tokens, depth)
                tokens += len(text.tokens) - 1
                seconds += text.seconds
        return tokens / max(seconds, 1e-9)


def _setting(settings: DraftSettings, model: BenchModel) -> Setting:
    """As MTPLlama runs them: depth auto with drafts from the text, where those are the default."""
    depth = AUTO_MAX_DEPTH if settings.depth == "auto" else int(settings.depth)
    rollback = Rollback.parse(settings.rollback)
    looks_up = looks_up_by_default(model.architecture, settings.depth, rollback, model.gpu_layers)
    lookup = LOOKUP_TOKENS if looks_up else 0
    return Setting(depth, settings.fastmtp_size, rollback, settings.draft_threads, lookup)


def _prompts(model: BenchModel, options: TuneOptions) -> list[list[int]]:
    """The first prompt of each kind and the user's own, cut to the end that fits the context."""
    texts = [texts_of(kind, model.write_chat)[0] for kind in options.kinds]
    out = [model.tokenize(text) for text in (*texts, *options.own)]
    return [tokens[-LONGEST_PROMPT:] for tokens in out]


def describe(settings: DraftSettings) -> str:
    """Settings as a short phrase, defaults omitted."""
    if settings.depth == 0:
        return "no drafting"
    words = [f"depth {settings.depth}"]
    if settings.fastmtp_size:
        rows = "whole vocabulary" if settings.fastmtp_size < 0 else f"{settings.fastmtp_size} rows"
        words.append(rows)
    if settings.rollback != "snapshot":
        words.append(f"rollback {settings.rollback}")
    if settings.draft_threads:
        plural = "" if settings.draft_threads == 1 else "s"
        words.append(f"{settings.draft_threads} draft thread{plural}")
    return ", ".join(words)
