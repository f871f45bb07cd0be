"""A whole bench: what is measured, in which order, and how the parts become one result."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from mtp_gguf.gguf_tools.errors import RequestError, ServerError
from mtp_gguf.gguf_tools.profile import AUTO, AUTO_MAX_DEPTH
from mtp_gguf.gguf_tools.system import STOCK
from mtp_gguf.native.checkpoint import Checkpoint, CheckpointKind

from .about import about_environment, about_model, sha256
from .beside import has_room, in_turn
from .costs import PREFILL_TOKENS, CycleCosts, PrefillCosts, cycle_costs, prefill_costs
from .coverage import coverage
from .model import BenchModel, Setting
from .options import COST_DEPTH, BenchOptions
from .pace import probe
from .plan import FULL, Plan, Wish, fit
from .prompts import CHAT, SETS
from .result import (
    ALL,
    DONE,
    LEFT_OUT,
    PLANNED,
    RUNNING,
    SHORT,
    STOPPED,
    BenchResult,
    PlannedPart,
    Sample,
    ServerResult,
    TextToken,
)
from .server import running
from .texts import trace
from .turns import Contender, Turns
from .verdict import best_drafting, judge
from .wishes import COSTS, DIGEST, PREFILL, SAMPLE, SAMPLE_TOKENS, make_wishes, server_name

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROMPT_TOKENS = 16  # before the cycles whose parts are timed
_FILLER = (
    "The keeper wrote down what the sea did. He wrote the hour, the wind, the colour of the water "
    "and the ships that passed, and when there was no ship he wrote that too. "
)


@dataclass(frozen=True)
class Watcher:
    """Who is told of a bench, while it runs. clock: seconds, whose differences count.

    progress: the share done and what is going on. planned: the plan, before anything of it is
    measured. saved: the result after each part.
    """

    progress: Callable[[float, str], None] = lambda share, text: None
    planned: Callable[[Plan], None] = lambda plan: None
    saved: Callable[[BenchResult], None] = lambda result: None
    clock: Callable[[], float] = monotonic


def run_bench(path: Path, options: BenchOptions, watcher: Watcher | None = None) -> BenchResult:
    """Measure a file. Raises what loading raises, RequestError for contexts that do not fit.

    Once something is measured, KeyboardInterrupt ends the bench with the result so far.
    """
    return _Bench(path, options, watcher or Watcher()).run()


class _Bench:
    def __init__(self, path: Path, options: BenchOptions, watcher: Watcher) -> None:
        self._path = path
        self._options = options
        self._watcher = watcher
        self._began = watcher.clock()
        self._state = RUNNING
        self._plan: Plan | None = None
        self._done: set[Hashable] = set()
        self._pace = 1.0  # seconds that a second of the plan takes
        self._share = 0.0
        self._title = ""
        self._prompts: dict[str, list[list[int]]] = {}
        self._environment: dict[str, Any] = {}
        self._model = about_model(path)
        self._cycles: list[CycleCosts] = []
        self._prefill: PrefillCosts | None = None
        self._turns: list[Turns] = []  # by context
        self._sizes: Turns | None = None
        self._servers: list[ServerResult] = []
        self._alone: list[tuple[str, int, int]] = []  # servers without room for our copy beside
        self._coverage: dict[int, float] = {}
        self._samples: tuple[Sample, ...] = ()

    def run(self) -> BenchResult:
        o = self._options
        n_ctx = max(2048, max(o.contexts) + 1024) + (o.tokens or FULL.tokens) + 64
        try:
            self._say("loading")
            with BenchModel(
                self._path, n_ctx=n_ctx, threads=o.threads, gpu_layers=o.gpu_layers, head=o.head
            ) as model:
                self._in_process(model, n_ctx)
                for key in self._server_keys():
                    self._part([key], partial(self._serve, key, model))
            while self._alone:
                key = self._alone.pop(0)
                self._part([key], partial(self._serve, key, None))
            self._part([DIGEST], self._digest)
            self._state = DONE
        except KeyboardInterrupt:
            if not self._done:
                raise
            self._state = STOPPED
        result = self._result()
        self._watcher.saved(result)
        return result

    def _in_process(self, model: BenchModel, n_ctx: int) -> None:
        """All that one copy of the weights serves."""
        o = self._options
        self._environment = about_environment(model.device, o.threads, o.gpu_layers)
        self._prompts = self._tokenize(model, n_ctx)
        filler = _repeat(model.tokenize(_FILLER), max(PREFILL_TOKENS, *o.contexts))
        self._say("a first look")
        clock = self._watcher.clock
        pace = probe(model, Setting(COST_DEPTH), filler[:_PROMPT_TOKENS], clock)
        wishes = make_wishes(o, pace, self._prompts, self._model["size"])
        spent = self._watcher.clock() - self._began
        budget = None if o.budget is None else o.budget - spent
        self._plan = fit(wishes, budget, prompts=o.prompts, tokens=o.tokens, rounds=o.rounds)
        self._watcher.planned(self._plan)
        first, *others = o.contexts
        with _standing(model, filler[:first]) as before:
            self._part([COSTS], lambda: self._costs(model, filler, before))
            depths = [("depth", depth) for depth in o.depths]
            self._part(depths, lambda: self._texts(model, o.depths, before))
            self._part([SAMPLE], lambda: self._sample(model, before))
            self._part([PREFILL], lambda: self._prompt(model, filler))
            sizes = [("size", rows) for rows in o.sizes]
            self._part(sizes, lambda: self._compare_sizes(model))
        for context in others:
            self._part([("context", context)], partial(self._context, model, filler[:context]))

    # --- the plan ---

    def _server_keys(self) -> list[tuple[str, int, int]]:
        """What could be measured of servers, what matters most first."""
        assert self._plan is not None
        keys = [wish.key for wish in self._plan.wishes]
        return [key for key in keys if isinstance(key, tuple) and key[0] == "server"]

    def _part(self, keys: Sequence[Hashable], measure: Callable[[], None]) -> None:
        """Measure what the plan has of these keys, in the time that is left."""
        assert self._plan is not None
        self._plan = self._plan.adjust(self._done, self._left() / self._pace)
        wishes = [wish for wish in self._plan.kept if wish.key in keys]
        if not wishes:
            return
        self._say(wishes[0].group)
        before, began = self._share, self._watcher.clock()
        measure()
        planned = sum(wish.seconds(self._plan.amount) for wish in wishes)
        took = self._watcher.clock() - began
        if any(key[0] == "depth" for key in keys if isinstance(key, tuple)):
            self._pace = min(max(took / max(planned, 1e-9), 0.5), 5.0)
        self._done.update(wish.key for wish in wishes if wish.key not in self._alone)
        self._advance(before + planned / self._plan.seconds - self._share)
        self._watcher.saved(self._result())

    def _left(self) -> float:
        budget = self._options.budget
        return math.inf if budget is None else budget - (self._watcher.clock() - self._began)

    def _step(self, wish: Hashable, parts: int) -> None:
        """One of several equal parts of a wish is done."""
        assert self._plan is not None
        found = next(w for w in self._plan.kept if w.key == wish)
        self._advance(found.seconds(self._plan.amount) / self._plan.seconds / parts)

    def _advance(self, share: float) -> None:
        self._share = min(1.0, self._share + max(0.0, share))
        self._say(self._title)

    def _say(self, title: str) -> None:
        self._title = title
        self._watcher.progress(self._share, title)

    # --- the parts ---

    def _costs(self, model: BenchModel, filler: Sequence[int], before: Checkpoint | None) -> None:
        assert self._plan is not None
        rounds = self._plan.amount.rounds
        self._cycles.append(
            cycle_costs(
                model,
                Setting(COST_DEPTH),
                filler[:_PROMPT_TOKENS],
                blocks=rounds,
                before=before,
                step=lambda: self._step(COSTS, rounds) if COSTS not in self._done else None,
            )
        )

    def _texts(
        self, model: BenchModel, depths: Sequence[int | str], before: Checkpoint | None
    ) -> None:
        """The planned rounds of texts, fewer if they take longer than they should."""
        assert self._plan is not None
        amount, kept = self._plan.amount, [d for d in depths if self._plan.has(("depth", d))]
        contenders: dict[Hashable, Contender] = {d: _contender(d) for d in kept}
        turns = Turns(model, self._chosen(), amount.tokens, contenders, before)
        self._turns.append(turns)
        self._rounds(turns, "texts", lambda key: self._step_texts(key, amount.rounds))
        if len(self._turns) == 1:
            self._coverage = self._cover(model, turns.tokens(kept[0]))

    def _step_texts(self, key: Hashable, rounds: int) -> None:
        if ("depth", key) not in self._done:
            self._step(("depth", key), rounds)

    def _rounds(self, turns: Turns, title: str, step: Callable[[Hashable], None]) -> None:
        """Rounds as planned; none is begun that would take the time of what must follow."""
        assert self._plan is not None
        rounds = self._plan.amount.rounds
        for i in range(rounds):
            began = self._watcher.clock()
            self._say(f"{title}, round {i + 1} of {rounds}")
            turns.round(step)
            self._watcher.saved(self._result())
            took = self._watcher.clock() - began
            if i + 1 < rounds and self._left() < took:
                return

    def _sample(self, model: BenchModel, before: Checkpoint | None) -> None:
        """The first text of each kind at the best drafting depth, token by token."""
        assert self._plan is not None
        best = best_drafting(self._turns[0].results())
        if best is None:
            return
        out = []
        n = min(self._plan.amount.tokens, SAMPLE_TOKENS)
        with model.session(Setting(int(best.depth))) as session:
            for kind, prompts in self._chosen().items():
                tokens = trace(model, session, prompts[0], n, int(best.depth), before)
                shown = tuple(
                    TextToken(
                        _text(model, t.token),
                        t.origin,
                        None if t.rejected is None else _text(model, t.rejected),
                    )
                    for t in tokens
                )
                text = b"".join(map(model.piece, prompts[0])).decode(errors="replace")
                out.append(Sample(kind, best.depth, text, shown))
        self._samples = tuple(out)

    def _prompt(self, model: BenchModel, filler: Sequence[int]) -> None:
        assert self._plan is not None
        rounds = self._plan.amount.rounds
        setting = Setting(AUTO_MAX_DEPTH)
        self._prefill = prefill_costs(
            model,
            setting,
            filler[:PREFILL_TOKENS],
            rounds,
            lambda: self._step(PREFILL, rounds + 1),
        )

    def _compare_sizes(self, model: BenchModel) -> None:
        """Sizes of the draft vocabulary at the best depth; the file's own takes its turns, too."""
        assert self._plan is not None
        best = best_drafting(self._turns[0].results())
        if best is None:
            return
        depth = int(best.depth)
        sizes = [0, *(size for size in self._options.sizes if self._plan.has(("size", size)))]
        contenders: dict[Hashable, Contender] = {
            size: Contender(Setting(depth, fastmtp_size=size), depth, size)
            for size in dict.fromkeys(sizes)
        }
        self._sizes = Turns(model, self._chosen(), self._plan.amount.tokens, contenders)
        rounds = self._plan.amount.rounds
        self._rounds(
            self._sizes,
            "draft vocabularies",
            lambda key: self._step(("size", key), rounds) if key else None,
        )

    def _context(self, model: BenchModel, filler: Sequence[int]) -> None:
        with _standing(model, filler) as before:
            self._costs(model, filler, before)
            self._texts(model, self._options.depths, before)

    def _serve(self, key: tuple[str, int, int], model: BenchModel | None) -> None:
        """A server in turn with the model; later and without it where both do not fit."""
        o, plan = self._options, self._plan
        assert plan is not None
        _, index, depth = key
        name, server = server_name(o, index), o.servers[index]
        self._say(f"{name}, depth {depth}")
        if model and not has_room(self._model["size"]):
            self._alone.append(key)
            return
        texts, amount = self._chosen(), plan.amount
        prompts = [p for of_kind in texts.values() for p in of_kind]
        contender: dict[Hashable, Contender] = {depth: _contender(depth)}
        ours = Turns(model, texts, amount.tokens, contender) if model else None
        ready = False
        try:
            with running(
                server.path,
                self._path,
                depth=depth,
                threads=o.threads,
                n_ctx=max(map(len, prompts)) + amount.tokens + 64,
                gpu_layers=o.gpu_layers,
                head=o.head,
            ) as up:
                ready = True
                found = in_turn(
                    name,
                    server,
                    up,
                    ours,
                    prompts,
                    depth=depth,
                    tokens=amount.tokens,
                    rounds=amount.rounds,
                )
        except ServerError as error:
            if model and not ready:  # memory of a GPU, for one: two copies may be too many
                self._alone.append(key)
                return
            found = ServerResult(name, server.version, depth, None, None, note=str(error))
        self._servers.append(found)

    def _digest(self) -> None:
        self._model = {**self._model, "sha256": sha256(self._path)}

    # --- what they are made of, and what comes of them ---

    def _tokenize(self, model: BenchModel, n_ctx: int) -> dict[str, list[list[int]]]:
        """Prompts by kind, as token ids."""
        out: dict[str, list[list[int]]] = {}
        for kind in self._options.kinds:
            texts = SETS[kind]
            if kind == CHAT and model.write_chat:
                texts = tuple(map(model.write_chat, texts))
            out[kind] = [model.tokenize(text) for text in texts]
        for name, text in self._options.own.items():
            out[name] = [model.tokenize(text)]
        answer = self._options.tokens or FULL.tokens
        most = n_ctx - answer - max(self._options.contexts) - 1
        for kind, prompts in out.items():
            for prompt in prompts:
                if not 0 < len(prompt) <= most:
                    raise RequestError(
                        f"a prompt of {kind} has {len(prompt)} tokens, expected 1 to {most}: "
                        "shorten it"
                    )
        return out

    def _chosen(self) -> Mapping[str, Sequence[Sequence[int]]]:
        """As many prompts of each kind as are planned."""
        assert self._plan is not None
        n = self._plan.amount.prompts
        return {kind: prompts[:n] for kind, prompts in self._prompts.items()}

    def _cover(self, model: BenchModel, written: Counter[int]) -> dict[int, float]:
        with model.session(Setting(1)) as session:
            assert session.head is not None
            if session.head.layout == "none":
                return {}
            return coverage(session.head.draft_ids().tolist(), written)

    def _result(self) -> BenchResult:
        o, plan = self._options, self._plan
        texts = [t for turns in self._turns for t in turns.results()]
        whole = [t for t in texts if (t.kind, t.context) == (ALL, o.contexts[0])]
        environment = dict(self._environment)
        if plan:
            environment |= {
                "prompts": plan.amount.prompts,
                "tokens": plan.amount.tokens,
                "rounds": plan.amount.rounds,
            }
        on_cpu = environment.get("device") == "CPU" and environment.get("kernels") == STOCK
        return BenchResult(
            self._state,
            environment,
            self._model,
            o.budget,
            plan.whole if plan else 0.0,
            self._watcher.clock() - self._began,
            tuple(self._planned_parts(plan)) if plan else (),
            tuple(self._cycles),
            self._prefill,
            tuple(texts),
            tuple(self._sizes.results()) if self._sizes else (),
            tuple(sorted(self._servers, key=lambda s: (s.name, s.depth))),
            self._coverage,
            self._samples,
            judge(whole, slow_kernels=on_cpu),
        )

    def _planned_parts(self, plan: Plan) -> Iterator[PlannedPart]:
        """Lines of the plan: what belongs together and fared alike is one."""

        def state(wish: Wish) -> str:
            if wish in plan.left_out:
                return LEFT_OUT
            key = wish.key
            if isinstance(key, tuple) and key[0] == "depth" and self._turns:
                rounds = len(self._turns[0].written.get(key[1], ()))
                if 0 < rounds < plan.amount.rounds:
                    return SHORT
            return DONE if key in self._done else PLANNED

        for how in dict.fromkeys(map(state, plan.wishes)):
            for what, seconds in plan.lines([wish for wish in plan.wishes if state(wish) == how]):
                yield PlannedPart(what, seconds, how)


@contextmanager
def _standing(model: BenchModel, tokens: Sequence[int]) -> Iterator[Checkpoint | None]:
    """A checkpoint after some tokens, for every kind of session; None after none."""
    if not tokens:
        yield None
        return
    with ExitStack() as stack:
        with model.session(Setting(1)) as session:
            session.decode(tokens)
            saved = stack.enter_context(session.save(CheckpointKind.WHOLE))
        yield saved


def _contender(depth: int | str) -> Contender:
    if depth == AUTO:
        return Contender(Setting(AUTO_MAX_DEPTH), AUTO)
    return Contender(Setting(int(depth)), int(depth))


def _repeat(tokens: Sequence[int], n: int) -> list[int]:
    """N tokens of a text that is said over and over."""
    times = n // max(1, len(tokens)) + 1
    return (list(tokens) * times)[:n]


def _text(model: BenchModel, token: int) -> str:
    return model.piece(token).decode(errors="replace") or f"<{token}>"
