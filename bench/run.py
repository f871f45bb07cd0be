"""A whole benchmark: which measurements are made in which order, and how they become a result."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from mtp_gguf.gguf_tools.errors import RequestError, ServerError
from mtp_gguf.gguf_tools.machine.process_memory import peak_memory
from mtp_gguf.gguf_tools.machine.system import STOCK
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.profile import AUTO, AUTO_MAX_DEPTH, LOOKUP_TOKENS
from mtp_gguf.native.checkpoint import Checkpoint, CheckpointKind

from .analysis import analyze, best_drafting, contradictions
from .costs import PREFILL_TOKENS, cycle_costs, prefill_costs
from .coverage import coverage
from .environment import Environment, describe_environment, describe_file, sha256
from .estimate import probe
from .generation import trace
from .interleaved import InterleavedRuns, Variant
from .limits import measure_limits, reached, work_of
from .model import BenchModel, Setting
from .options import BenchOptions
from .other_programs import OtherPrograms
from .plan import FULL, Plan
from .prompts import texts_of
from .result import (
    ALL,
    BOTH,
    DONE,
    LOOKUP,
    RUNNING,
    STOPPED,
    Analysis,
    BenchResult,
    CycleCosts,
    Limits,
    PrefillCosts,
    Sample,
    SampleToken,
    ServerResult,
    TextResult,
)
from .schedule import Schedule
from .server import running
from .server_comparison import fits_in_memory, interleave
from .tasks import COSTS, DIGEST, PREFILL, SAMPLE, SAMPLE_TOKENS, make_tasks, server_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PROMPT_TOKENS = 16  # before the cycles whose parts are timed
_FILLER = (
    "The keeper wrote down what the sea did. He wrote the hour, the wind, the colour of the water "
    "and the ships that passed, and when there was no ship he wrote that too. "
)

Prompts = Mapping[str, Sequence[Sequence[int]]]  # token ids by kind of text


@dataclass(frozen=True)
class Watcher:
    """Callbacks of a running benchmark, and its clock in seconds.

    progress: the share that is done and what is being measured. planned: the plan, before anything
    is measured. saved: the result so far, after each part.
    """

    progress: Callable[[float, str], None] = lambda share, text: None
    planned: Callable[[Plan], None] = lambda plan: None
    saved: Callable[[BenchResult], None] = lambda result: None
    clock: Callable[[], float] = monotonic


def run_bench(path: Path, options: BenchOptions, watcher: Watcher | None = None) -> BenchResult:
    """Measure a model file.

    KeyboardInterrupt ends the benchmark with the result so far, once something was measured.

    Raises:
        RequestError: a prompt does not fit into the context.
        ModelRefusedError: llama.cpp cannot load the model.

    """
    return _Bench(path, options, watcher or Watcher()).run()


class _Bench:
    """One benchmark: measures part by part and keeps what was measured."""

    def __init__(self, path: Path, options: BenchOptions, watcher: Watcher) -> None:
        self._path = path
        self._options = options
        self._watcher = watcher
        self._schedule = Schedule(options.budget, watcher.clock, watcher.progress)
        self._others = OtherPrograms(options.threads)
        self._state = RUNNING
        self._prompts: Prompts = {}
        self._file = describe_file(path)
        self._environment: Environment | None = None
        self._cycles: list[CycleCosts] = []
        self._prefill: PrefillCosts | None = None
        self._limits: list[Limits] = []
        self._texts: list[InterleavedRuns] = []  # by context
        self._sizes: InterleavedRuns | None = None
        self._servers: list[ServerResult] = []
        self._coverage: dict[int, float] = {}
        self._samples: tuple[Sample, ...] = ()

    def run(self) -> BenchResult:
        o = self._options
        n_ctx = max(2048, max(o.contexts) + 1024) + (o.tokens or FULL.tokens) + 64
        try:
            self._schedule.announce("loading")
            with BenchModel(
                self._path, n_ctx=n_ctx, threads=o.threads, gpu_layers=o.gpu_layers, head=o.head
            ) as model:
                self._measure_in_process(model, n_ctx)
                servers = [key for key in self._server_keys() if not self._compare(key, model)]
            for key in servers:  # those that did not fit into memory with the model
                self._compare(key, None)
            self._part([DIGEST], self._measure_digest)
            self._state = DONE
        except KeyboardInterrupt:
            if not self._schedule.done:
                raise
            self._state = STOPPED
        self._save()
        return self._result()

    def _measure_in_process(self, model: BenchModel, n_ctx: int) -> None:
        """Everything that needs only one copy of the weights."""
        o = self._options
        self._environment = describe_environment(model.device, o.threads, o.gpu_layers)
        self._prompts = _tokenize(model, o, n_ctx)
        filler = _repeat(model.tokenize(_FILLER), max(PREFILL_TOKENS, *o.contexts))
        self._schedule.announce("estimating the duration")
        clock = self._watcher.clock
        estimate = probe(model, Setting(o.cost_depth), filler[:_PROMPT_TOKENS], clock)
        tasks = make_tasks(o, estimate, self._prompts, self._file.size)
        self._watcher.planned(self._schedule.start(tasks, o))
        first, *others = o.contexts
        with self._decoded(model, filler[:first]) as prefix:
            self._part([COSTS], lambda: self._measure_costs(model, filler, prefix))
            depths = [("depth", depth) for depth in o.depths]
            texts = partial(self._measure_texts, model, prefix)
            self._part(depths, texts, representative=True)
            self._part([SAMPLE], lambda: self._generate_samples(model, prefix))
            self._part([PREFILL], lambda: self._measure_prefill(model, filler))
            sizes = [("size", rows) for rows in o.sizes]
            self._part(sizes, lambda: self._measure_sizes(model))
        for context in others:
            self._part(
                [("context", context)], partial(self._measure_context, model, filler[:context])
            )

    def _part(
        self,
        keys: Sequence[Hashable],
        measure: Callable[[], bool | None],
        *,
        representative: bool = False,
    ) -> None:
        if self._schedule.run(keys, measure, representative=representative):
            self._save()

    # --- measurements ---

    def _measure_costs(
        self, model: BenchModel, filler: Sequence[int], prefix: Checkpoint | None
    ) -> None:
        rounds = self._schedule.amount.rounds
        self._cycles.append(
            cycle_costs(
                model,
                Setting(self._options.cost_depth),
                filler[:_PROMPT_TOKENS],
                blocks=rounds,
                prefix=prefix,
                step=lambda: self._costs_measured(COSTS, rounds),
            )
        )

    def _measure_texts(self, model: BenchModel, prefix: Checkpoint | None) -> None:
        """All texts at every planned depth, interleaved."""
        schedule = self._schedule
        depths = [d for d in self._options.depths if schedule.plan.has(("depth", d))]
        runs = InterleavedRuns(
            model,
            self._planned_prompts(),
            schedule.amount.tokens,
            {depth: _variant(depth) for depth in depths},
            prefix,
        )
        self._texts.append(runs)
        self._run_rounds(runs, "texts", lambda depth: ("depth", depth))
        if len(self._texts) == 1 and self._options.drafts:
            self._coverage = _measure_coverage(model, runs, depths[0])

    def _run_rounds(
        self, runs: InterleavedRuns, title: str, task_key: Callable[[Hashable], Hashable]
    ) -> None:
        """Run the planned rounds; stop early rather than start a round beyond the budget.

        task_key: the plan's key of a variant.
        """
        schedule, rounds = self._schedule, self._schedule.amount.rounds
        for i in range(rounds):
            start = schedule.elapsed()
            schedule.announce(f"{title}, round {i + 1} of {rounds}")
            runs.round(lambda variant: schedule.step(task_key(variant), rounds))
            self._save()
            if i + 1 < rounds and schedule.seconds_left() < schedule.elapsed() - start:
                return

    def _generate_samples(self, model: BenchModel, prefix: Checkpoint | None) -> None:
        """The first text of each kind at the best drafting depth, token by token.

        With drafts from the text, if they were measured, too, and alone without a head.
        """
        best = best_drafting(self._texts[0].results())
        depth = 0 if best is None else int(best.depth)
        name = depth or LOOKUP
        both = BOTH if self._options.drafts else LOOKUP
        lookup = LOOKUP_TOKENS if self._schedule.plan.has(("depth", both)) else 0
        if not depth and not lookup:
            return
        n = min(self._schedule.amount.tokens, SAMPLE_TOKENS)
        samples = []
        with model.session(Setting(depth, lookup=lookup)) as session:
            for kind, prompts in self._planned_prompts().items():
                tokens = tuple(
                    SampleToken(
                        _text(model, token.token),
                        token.origin,
                        None if token.rejected is None else _text(model, token.rejected),
                    )
                    for token in trace(model, session, prompts[0], n, depth, prefix)
                )
                prompt = b"".join(map(model.piece, prompts[0])).decode(errors="replace")
                samples.append(Sample(kind, name, prompt, tokens))
        self._samples = tuple(samples)

    def _measure_prefill(self, model: BenchModel, filler: Sequence[int]) -> None:
        rounds = self._schedule.amount.rounds
        self._prefill = prefill_costs(
            model,
            Setting(AUTO_MAX_DEPTH if self._options.drafts else 0),
            filler[:PREFILL_TOKENS],
            rounds,
            lambda: self._costs_measured(PREFILL, rounds + 1),
        )

    def _costs_measured(self, key: Hashable, rounds: int) -> None:
        """Measure the limits, and report that one of `rounds` of these costs is done."""
        if self._options.gpu_layers == 0:
            limits = measure_limits(self._path, self._options.threads)
            self._limits += [limits] if limits else []
        self._schedule.step(key, rounds)

    def _reached(self) -> Limits | None:
        if not self._limits:
            return None
        with open_model(self._path) as model:
            return reached(self._limits, work_of(model), self._cycles[0], self._prefill)

    def _measure_sizes(self, model: BenchModel) -> None:
        """Sizes of the draft vocabulary at the best depth, interleaved with the file's own."""
        best = best_drafting(self._texts[0].results())
        if best is None:
            return
        depth, plan = int(best.depth), self._schedule.plan
        sizes = [0, *(size for size in self._options.sizes if plan.has(("size", size)))]
        variants: dict[Hashable, Variant] = {
            size: Variant(Setting(depth, fastmtp_size=size), depth, size) for size in sizes
        }
        self._sizes = InterleavedRuns(model, self._planned_prompts(), plan.amount.tokens, variants)
        self._run_rounds(self._sizes, "draft vocabularies", lambda size: ("size", size))

    @contextmanager
    def _decoded(self, model: BenchModel, tokens: Sequence[int]) -> Iterator[Checkpoint | None]:
        """A checkpoint after these tokens, usable in every kind of session; None for no tokens."""
        if not tokens:
            yield None
            return
        with ExitStack() as stack:
            with model.session(Setting(1 if self._options.drafts else 0)) as session:
                session.decode(tokens)
                checkpoint = stack.enter_context(session.save(CheckpointKind.WHOLE))
            yield checkpoint

    def _measure_context(self, model: BenchModel, filler: Sequence[int]) -> None:
        with self._decoded(model, filler) as prefix:
            self._measure_costs(model, filler, prefix)
            self._measure_texts(model, prefix)

    def _measure_digest(self) -> None:
        self._file = replace(self._file, sha256=sha256(self._path))

    # --- llama-server ---

    def _server_keys(self) -> list[tuple[str, int, int]]:
        """The planned comparisons, most important first, as ("server", index, depth)."""
        keys = [task.key for task in self._schedule.plan.tasks]
        return [key for key in keys if isinstance(key, tuple) and key[0] == "server"]

    def _compare(self, key: tuple[str, int, int], model: BenchModel | None) -> bool:
        """Compare a server with the model, or measure it alone; False if both did not fit."""
        fits = True

        def measure() -> bool:
            nonlocal fits
            fits = self._measure_server(key, model)
            return fits

        self._part([key], measure)
        return fits

    def _measure_server(self, key: tuple[str, int, int], model: BenchModel | None) -> bool:
        o, amount = self._options, self._schedule.amount
        _, index, depth = key
        name, server = server_name(o, index), o.servers[index]
        self._schedule.announce(f"{name}, depth {depth}")
        if model and not fits_in_memory(self._file.size):
            return False
        texts = self._planned_prompts()
        prompts = [p for of_kind in texts.values() for p in of_kind]
        ours = (
            InterleavedRuns(model, texts, amount.tokens, {depth: _variant(depth)})
            if model
            else None
        )
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
            ) as bench_server:
                ready = True
                result = interleave(
                    name,
                    server,
                    bench_server,
                    ours,
                    prompts,
                    depth=depth,
                    tokens=amount.tokens,
                    rounds=amount.rounds,
                )
        except ServerError as error:
            if model and not ready:  # two copies may be too many for the memory of a GPU
                return False
            result = ServerResult(name, server.version, depth, None, None, note=str(error))
        self._servers.append(result)
        return True

    # --- the result ---

    def _planned_prompts(self) -> Prompts:
        """As many prompts of each kind as are planned."""
        n = self._schedule.amount.prompts
        return {kind: prompts[:n] for kind, prompts in self._prompts.items()}

    def _short_tasks(self) -> list[Hashable]:
        """Keys of the depths that were measured for some of the planned rounds."""
        runs = self._texts[0].runs if self._texts else {}
        planned = self._schedule.amount.rounds
        return [("depth", depth) for depth, done in runs.items() if 0 < len(done) < planned]

    def _save(self) -> None:
        self._watcher.saved(self._result())

    def _result(self) -> BenchResult:
        o, schedule = self._options, self._schedule
        assert self._environment is not None
        texts = [t for runs in self._texts for t in runs.results()]
        return BenchResult(
            self._state,
            self._environment,
            self._file,
            schedule.amount,
            o.budget,
            schedule.plan.whole,
            schedule.elapsed(),
            tuple(schedule.planned_parts(self._short_tasks())),
            tuple(self._cycles),
            self._prefill,
            self._reached(),
            tuple(texts),
            tuple(self._sizes.results()) if self._sizes else (),
            tuple(sorted(self._servers, key=lambda s: (s.name, s.depth))),
            self._coverage,
            self._samples,
            _analyze(texts, o.contexts[0], self._environment),
            self._warnings(texts),
            peak_memory(),
        )

    def _warnings(self, texts: Sequence[TextResult]) -> tuple[str, ...]:
        busy = self._others.note()
        return (*([busy] if busy else []), *contradictions(texts))


def _analyze(
    texts: Sequence[TextResult], context: int, environment: Environment
) -> Analysis | None:
    chosen = [t for t in texts if (t.kind, t.context) == (ALL, context)]
    stock = environment.device == "CPU" and environment.kernels == STOCK
    return analyze(chosen, stock_kernels=stock)


def _tokenize(model: BenchModel, options: BenchOptions, n_ctx: int) -> Prompts:
    """The prompts of all kinds as token ids; RequestError if one does not fit."""
    prompts: dict[str, list[list[int]]] = {}
    for kind in options.kinds:
        prompts[kind] = [model.tokenize(text) for text in texts_of(kind, model.write_chat)]
    for name, text in options.own.items():
        prompts[name] = [model.tokenize(text)]
    most = n_ctx - (options.tokens or FULL.tokens) - max(options.contexts) - 1
    for kind, of_kind in prompts.items():
        for prompt in of_kind:
            if not 0 < len(prompt) <= most:
                raise RequestError(
                    f"a prompt of {kind} has {len(prompt)} tokens, expected 1 to {most}: shorten it"
                )
    return prompts


def _measure_coverage(
    model: BenchModel, runs: InterleavedRuns, variant: Hashable
) -> dict[int, float]:
    with model.session(Setting(1)) as session:
        assert session.head is not None
        if session.head.layout == "none":
            return {}
        return coverage(session.head.draft_ids().tolist(), runs.tokens(variant))


def _variant(depth: int | str) -> Variant:
    if depth == AUTO:
        return Variant(Setting(AUTO_MAX_DEPTH), AUTO)
    if depth == LOOKUP:
        return Variant(Setting(0, lookup=LOOKUP_TOKENS), 0, name=LOOKUP)
    if depth == BOTH:
        return Variant(Setting(AUTO_MAX_DEPTH, lookup=LOOKUP_TOKENS), AUTO, name=BOTH)
    return Variant(Setting(int(depth)), int(depth))


def _repeat(tokens: Sequence[int], n: int) -> list[int]:
    """The first n tokens of the endless repetition of `tokens`."""
    times = n // max(1, len(tokens)) + 1
    return (list(tokens) * times)[:n]


def _text(model: BenchModel, token: int) -> str:
    return model.piece(token).decode(errors="replace") or f"<{token}>"
