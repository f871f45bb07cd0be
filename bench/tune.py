"""`tune`: the search on a real model, and the profile that it gives."""

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

from mtp_gguf.gguf_tools.profile import AUTO_MAX_DEPTH, Costs, DraftSettings, Profile, identify
from mtp_gguf.gguf_tools.system import this_machine
from mtp_gguf.native.exact import kernels
from mtp_gguf.native.session import Rollback

from .costs import cycle_costs
from .model import BenchModel, Setting
from .pace import Pace, probe
from .plan import FULL, Amount, Plan, Wish, fit
from .prompts import CHAT, SETS
from .search import Found, Search, Space
from .texts import write
from .turns import rotated

COST_BLOCKS = 3
LONGEST_PROMPT = 1024

# After the first round, what is slower than this much of the fastest is not measured again.
_IN_THE_RACE = 0.9


@dataclass(frozen=True)
class TuneOptions:
    """budget: seconds; None: everything in full. own: prompts beside those of the built-in kinds.

    tokens: of each answer, at most; rounds: of each comparison; None: what the budget allows.
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
class Tuned:
    """What a search found. profile: to be written; None where the search was interrupted.

    left_out: names of Space's fields that there was no time for.
    """

    found: Found
    profile: Profile | None
    left_out: tuple[str, ...]


def tune(
    path: Path,
    options: TuneOptions,
    progress: Callable[[float, str], None],
    planned: Callable[[Plan], None] = lambda plan: None,
    clock: Callable[[], float] = monotonic,
) -> Tuned:
    """Search the settings that decode a model fastest here.

    planned: called with the plan before anything of it is measured. KeyboardInterrupt once depths
    are compared ends the search with what was found; before, it goes on to the caller.
    """
    began = clock()
    o = options
    n_ctx = LONGEST_PROMPT + (o.tokens or FULL.tokens) + 64
    progress(0.0, "loading")
    with BenchModel(
        path, n_ctx=n_ctx, threads=o.threads, gpu_layers=o.gpu_layers, head=o.head
    ) as model:
        prompts = _prompts(model, o)
        progress(0.0, "a first look")
        pace = probe(model, Setting(max(o.space.depths)), prompts[0][:16], clock)
        budget = None if o.budget is None else o.budget - (clock() - began)
        wishes = _wishes(o.space, pace, prompts)
        plan = fit(wishes, budget, prompts=1, tokens=o.tokens, rounds=o.rounds)
        planned(plan)
        ends = math.inf if o.budget is None else began + o.budget
        race = _Race(model, prompts, plan, progress, clock, ends)
        search = Search(o.space, race.measure, race.go_on)
        try:
            found = search.run()
            progress(1.0, "costs of the parts")
            costs = _costs(model, found, prompts[0])
        except KeyboardInterrupt:
            so_far = search.found()
            if so_far is None:
                raise
            return Tuned(so_far, None, race.left_out)
        device = model.device
    packages = ("mtp-gguf", "llama-cpp-python")
    profile = Profile(
        identify(path),
        this_machine(kernels(), device),
        found.settings,
        datetime.now(timezone.utc).date().isoformat(),
        ", ".join(f"{name} {version(name)}" for name in packages),
        found.plain_tok_s,
        found.tok_s,
        costs,
        found.tried,
    )
    return Tuned(found, profile, race.left_out)


def _costs(model: BenchModel, found: Found, prompt: Sequence[int]) -> Costs:
    """Where depth auto starts from: of the best drafting settings, with its own snapshots."""
    best = next(c.settings for c in found.tried if c.settings.depth != 0)
    setting = replace(_setting(best), max_depth=AUTO_MAX_DEPTH)
    costs = cycle_costs(model, setting, prompt, blocks=COST_BLOCKS, one_context=True)
    return Costs(
        tuple(s.median for s in costs.verify),
        tuple(max(s.median, 1e-6) for s in costs.draft),
    )


_DEPTHS, _AGAIN = "depths", "the best depth, its neighbours and auto"
# What can be left out, by its name in Space.
SAID = {
    "sizes": "sizes of the draft vocabulary",
    "draft_threads": "threads for drafting",
    "rollbacks": "ways to roll back",
}


def _wishes(space: Space, pace: Pace, prompts: Sequence[Sequence[int]]) -> list[Wish]:
    """The comparisons of a search, no drafting in each."""

    def turns(depths: Sequence[int], amount: Amount) -> float:
        ms = len(prompts) * sum(pace.text_ms(d, amount.tokens) for d in (0, *depths))
        read = sum(map(len, prompts)) * pace.prompt_ms + pace.open_ms
        return amount.rounds * (ms + (1 + len(depths)) * read) / 1e3

    middle = sorted(space.depths)[len(space.depths) // 2]
    wishes = [
        Wish(_DEPTHS, _DEPTHS, "", partial(turns, space.depths), needed=True),
        Wish(_AGAIN, _AGAIN, "", partial(turns, [middle] * 4), needed=True),
    ]
    for name, said in SAID.items():
        choices: Sequence[Any] = getattr(space, name)
        if len(choices) > 1:
            seconds = partial(turns, [middle] * len(choices))
            wishes.append(Wish(name, said, "", seconds))
    return wishes


class _Race:
    """Measures settings in turn: in every round each writes all prompts."""

    def __init__(
        self,
        model: BenchModel,
        prompts: Sequence[Sequence[int]],
        plan: Plan,
        progress: Callable[[float, str], None],
        clock: Callable[[], float],
        ends: float,
    ) -> None:
        """ends: when the time is up, by the clock."""
        self._model = model
        self._prompts = prompts
        self._plan = plan
        self._progress = progress
        self._clock = clock
        self._ends = ends
        self._began = clock()
        self._done: list[str] = []  # keys of the plan's parts
        self._share = 0.0
        self._asked: str | None = None

    @property
    def left_out(self) -> tuple[str, ...]:
        """What there was no time for, by its name in Space."""
        return tuple(str(wish.key) for wish in self._plan.left_out)

    def go_on(self, name: str) -> bool:
        """Whether there is time for a part that can be left out."""
        planned = sum(w.seconds(self._plan.amount) for w in self._plan.kept if w.key in self._done)
        pace = (self._clock() - self._began) / max(planned, 1e-9)
        left = (self._ends - self._clock()) / max(pace, 1e-9)
        self._plan = self._plan.adjust(self._done, left)
        self._asked = name if self._plan.has(name) else None
        return self._asked is not None

    def measure(self, settings: Sequence[DraftSettings]) -> list[float]:
        """Median tokens per second over the rounds, one speed for each setting.

        What is far behind after a round takes no part in the next; no drafting always does.
        """
        rounds = self._plan.amount.rounds
        speeds: list[list[float]] = [[] for _ in settings]
        racing = list(range(len(settings)))
        part = self._next_part()
        share = part.seconds(self._plan.amount) / self._plan.seconds
        for i in range(rounds):
            began = self._clock()
            for at, j in enumerate(rotated(racing, i)):
                done = (i + at / len(racing)) / rounds
                self._progress(min(self._share + share * done, 1.0), describe(settings[j]))
                speeds[j].append(self._speed(settings[j]))
            now = [median(values) for values in speeds]
            racing = [j for j in racing if j == 0 or now[j] >= max(now) * _IN_THE_RACE]
            if self._clock() + (self._clock() - began) > self._ends:
                break
        self._done.append(str(part.key))
        self._share += share
        return [median(values) for values in speeds]

    def _next_part(self) -> Wish:
        """Of the plan: what was asked about last, or depths first and depths again."""
        key = _AGAIN if _DEPTHS in self._done else _DEPTHS
        key, self._asked = self._asked or key, None
        return next(wish for wish in self._plan.kept if wish.key == key)

    def _speed(self, settings: DraftSettings) -> float:
        """Tokens per second over all prompts. Sessions without a head decode plainly."""
        tokens, seconds = 0, 0.0
        depth: Any = settings.depth
        with self._model.session(_setting(settings)) as session:
            for prompt in self._prompts:
                did = write(self._model, session, prompt, self._plan.amount.tokens, depth)
                tokens += len(did.tokens) - 1
                seconds += did.seconds
        return tokens / max(seconds, 1e-9)


def _setting(settings: DraftSettings) -> Setting:
    depth = AUTO_MAX_DEPTH if settings.depth == "auto" else int(settings.depth)
    return Setting(
        depth, settings.fastmtp_size, Rollback.parse(settings.rollback), settings.draft_threads
    )


def _prompts(model: BenchModel, options: TuneOptions) -> list[list[int]]:
    """The first prompt of each kind and the user's own, cut to what the context holds."""
    out = []
    for kind in options.kinds:
        text = SETS[kind][0]
        chat = kind == CHAT and model.write_chat
        out.append(model.tokenize(model.write_chat(text) if chat and model.write_chat else text))
    out += [model.tokenize(text) for text in options.own]
    return [tokens[-LONGEST_PROMPT:] for tokens in out]


def describe(settings: DraftSettings) -> str:
    """Settings in a few words."""
    if settings.depth == 0:
        return "no drafting"
    words = [f"depth {settings.depth}"]
    if settings.fastmtp_size:
        rows = "whole vocabulary" if settings.fastmtp_size < 0 else f"{settings.fastmtp_size} rows"
        words.append(rows)
    if settings.rollback != "snapshot":
        words.append(f"rollback {settings.rollback}")
    if settings.draft_threads:
        words.append(f"{settings.draft_threads} draft threads")
    return ", ".join(words)
