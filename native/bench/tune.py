"""`tune`: the search on a real model, and the profile that it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.machine import this_machine
from mtp_gguf.gguf_tools.profile import AUTO_MAX_DEPTH, Costs, DraftSettings, Profile, identify

from ..session import Rollback
from .costs import cycle_costs
from .model import BenchModel, Setting
from .prompts import CHAT, SETS
from .search import Found, Space, search
from .spread import spread
from .texts import write

COST_DEPTH = 8
COST_ROUNDS = 9


@dataclass(frozen=True)
class TuneOptions:
    """prompts: by name, beside the built-in kinds. tokens: of each answer, at most."""

    space: Space
    kinds: Sequence[str] = tuple(SETS)
    own: Sequence[str] = ()
    tokens: int = 96
    rounds: int = 3
    threads: int = 2
    gpu_layers: int = 0
    head: Path | None = None


def tune(
    path: Path, options: TuneOptions, progress: Callable[[float, str], None]
) -> tuple[Profile, Found]:
    """Search the settings that decode a model fastest here; the profile to be written."""
    o = options
    longest = 1024
    with BenchModel(
        path, n_ctx=longest + o.tokens, threads=o.threads, gpu_layers=o.gpu_layers, head=o.head
    ) as model:
        prompts = _prompts(model, o, longest)
        rounds = _Rounds(model, prompts, o, progress)
        found = search(o.space, rounds.measure)
        best = next(c.settings for c in found.tried if c.settings.depth != 0)
        progress(0.98, "costs of the parts")
        setting = replace(_setting(best), max_depth=COST_DEPTH)
        costs = cycle_costs(model, setting, prompts[0], COST_ROUNDS, lambda: None)
        device = model.device
    packages = ("mtp-gguf", "llama-cpp-python")
    return (
        Profile(
            identify(path),
            this_machine(device),
            found.settings,
            datetime.now(timezone.utc).date().isoformat(),
            ", ".join(f"{name} {version(name)}" for name in packages),
            found.plain_tok_s,
            found.tok_s,
            Costs(
                tuple(s.median for s in costs.verify),
                tuple(max(s.median, 1e-6) for s in costs.draft),
            ),
            found.tried,
        ),
        found,
    )


class _Rounds:
    """Measures settings in turn: every prompt, every round, each setting once."""

    def __init__(
        self,
        model: BenchModel,
        prompts: Sequence[Sequence[int]],
        options: TuneOptions,
        progress: Callable[[float, str], None],
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._options = options
        self._progress = progress
        space = options.space
        # As search() compares them, no drafting in each comparison.
        sizes = (space.sizes, space.rollbacks, space.draft_threads)
        self._total = len(space.depths) + 1 + sum(len(s) + 1 for s in sizes if len(s) > 1) + 5
        self._done = 0

    def measure(self, settings: Sequence[DraftSettings]) -> list[float]:
        """Median tokens per second over the rounds, one speed for each setting."""
        speeds: list[list[float]] = [[] for _ in settings]
        for i in range(self._options.rounds):
            for j, setting in enumerate(settings):
                share = (self._done + (i + j / len(settings)) / self._options.rounds) / self._total
                self._progress(min(share, 0.97), describe(setting))
                speeds[j].append(self._speed(setting))
        self._done += len(settings)
        return [spread(values).median for values in speeds]

    def _speed(self, settings: DraftSettings) -> float:
        """Tokens per second over all prompts. Sessions without a head decode plainly."""
        tokens, seconds = 0, 0.0
        depth: Any = settings.depth
        with ExitStack() as stack:
            session = stack.enter_context(self._model.session(_setting(settings)))
            for prompt in self._prompts:
                did = write(self._model, session, prompt, self._options.tokens, depth)
                tokens += len(did.tokens) - 1
                seconds += did.seconds
        return tokens / max(seconds, 1e-9)


def _setting(settings: DraftSettings) -> Setting:
    depth = AUTO_MAX_DEPTH if settings.depth == "auto" else int(settings.depth)
    return Setting(
        depth, settings.fastmtp_size, Rollback.parse(settings.rollback), settings.draft_threads
    )


def _prompts(model: BenchModel, options: TuneOptions, longest: int) -> list[list[int]]:
    """The first prompt of each kind and the user's own, cut to what the context holds."""
    out = []
    for kind in options.kinds:
        text = SETS[kind][0]
        chat = kind == CHAT and model.write_chat
        out.append(model.tokenize(model.write_chat(text) if chat and model.write_chat else text))
    out += [model.tokenize(text) for text in options.own]
    return [tokens[-longest + 1 :] for tokens in out]


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
