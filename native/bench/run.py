"""A whole bench: what is measured, in which order, and how the parts become one result."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError
from mtp_gguf.gguf_tools.machine import this_machine
from mtp_gguf.gguf_tools.profile import AUTO_MAX_DEPTH, identify
from mtp_gguf.gguf_tools.shards import shard_paths

from .costs import PREFILL_TOKENS, CycleCosts, cycle_costs, prefill_costs
from .model import BenchModel, Setting
from .prompts import CHAT, SETS
from .result import BenchResult, Sample, ServerResult, TextResult, TextToken
from .server import running
from .spread import Spread, spread
from .texts import Written, trace, write
from .verdict import judge

if TYPE_CHECKING:
    from mtp_gguf.gguf_tools.server.find import LlamaServer

Progress = Callable[[float, str], None]  # share done, what is going on

COST_DEPTH = 8  # batches of 1 to 9 tokens, chains of 1 to 8 drafts
ALL = "all"  # the kind that sums up the others
SAMPLE_TOKENS = 160
_FILLER = (
    "The keeper wrote down what the sea did. He wrote the hour, the wind, the colour of the water "
    "and the ships that passed, and when there was no ship he wrote that too. "
)


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    kinds: built-in prompt sets. own: prompts of the user's, as one more set of that name. depths:
    numbers and "auto". sizes: rows of the draft vocabulary beside the default, 0 all, -1 the whole
    vocabulary. contexts: tokens before the prompts. tokens: of each answer. rounds: of everything.
    """

    kinds: Sequence[str] = tuple(SETS)
    own: dict[str, str] = field(default_factory=dict)
    depths: Sequence[int | str] = (0, 1, 2, 3, 4, 6, "auto")
    sizes: Sequence[int] = ()
    contexts: Sequence[int] = (0,)
    tokens: int = 128
    rounds: int = 3
    prompts_per_kind: int = 3
    threads: int = 2
    gpu_layers: int = 0
    head: Path | None = None
    servers: Sequence[LlamaServer] = ()
    server_depths: Sequence[int] = (0, 1, 2, 3)

    @property
    def max_depth(self) -> int:
        """The deepest that texts are drafted at."""
        return max(AUTO_MAX_DEPTH, *(d for d in self.depths if isinstance(d, int)))


def run_bench(path: Path, options: BenchOptions, progress: Progress) -> BenchResult:
    """Measure a file. Raises what loading raises, RequestError for contexts that do not fit."""
    return _Bench(path, options, progress).run()


class _Bench:
    def __init__(self, path: Path, options: BenchOptions, progress: Progress) -> None:
        self.path = path
        self.options = options
        self._progress = progress
        self._done = 0
        self._title = ""
        o = options
        n_prompts = o.prompts_per_kind * len(o.kinds) + len(o.own)
        runs = len(o.contexts) * len(o.depths) + len(o.sizes)
        self._steps = (o.rounds + 1) * (len(o.contexts) + len(o.sizes) + 1)
        self._steps += o.rounds * runs * n_prompts
        self._steps += sum(len(o.server_depths) * o.rounds * n_prompts for _ in o.servers)

    def _step(self) -> None:
        self._done += 1
        self._progress(min(1.0, self._done / self._steps), self._title)

    def _begin(self, title: str) -> None:
        self._title = title
        self._progress(min(1.0, self._done / self._steps), title)

    def run(self) -> BenchResult:
        o = self.options
        longest = max(o.contexts, default=0)
        n_ctx = max(2048, longest + 1024) + o.tokens + 64
        self._begin("loading")
        with BenchModel(
            self.path, n_ctx=n_ctx, threads=o.threads, gpu_layers=o.gpu_layers, head=o.head
        ) as model:
            self.prompts = self._tokenize(model, n_ctx)
            main, deep = Setting(o.max_depth), Setting(max(o.max_depth, COST_DEPTH))
            filler = _repeat(model.tokenize(_FILLER), PREFILL_TOKENS)
            cycles = []
            for context in o.contexts:
                self._begin(f"costs at {context} tokens")
                before = _repeat(filler, max(context, 16))
                cycles.append(cycle_costs(model, deep, before, o.rounds * 3, self._third))
            rows = {0: self._rows(model, main)}
            draft_ms = {rows[0]: cycles[0].draft}
            for size in o.sizes:
                self._begin("costs of a draft vocabulary")
                setting = replace(main, fastmtp_size=size)
                rows[size] = self._rows(model, setting)
                of_size = cycle_costs(
                    model, replace(deep, fastmtp_size=size), filler[:16], o.rounds * 3, self._third
                )
                draft_ms[rows[size]] = of_size.draft
            self._begin("prompts with and without the head")
            prefill = prefill_costs(model, main, filler, o.rounds, self._step)
            texts, written = self._texts(model, main, rows)
            coverage = self._coverage(model, main, written)
            samples = self._samples(model, main, texts)
            environment = self._environment(model)
        servers = self._servers()
        plain_costs = [s.median for s in cycles[0].verify]
        whole = [t for t in texts if (t.kind, t.context, t.fastmtp_size) == (ALL, o.contexts[0], 0)]
        return BenchResult(
            environment,
            self._about_model(),
            tuple(cycles),
            draft_ms,
            prefill,
            tuple(texts),
            tuple(servers),
            coverage,
            samples,
            judge(whole, plain_costs),
        )

    def _third(self) -> None:
        """Rounds of costs are short: three of them are a step."""
        self._thirds = getattr(self, "_thirds", 0) + 1
        if self._thirds % 3 == 0:
            self._step()

    def _rows(self, model: BenchModel, setting: Setting) -> int:
        with model.session(setting) as session:
            assert session.head is not None
            return session.head.n_draft_vocab

    def _tokenize(self, model: BenchModel, n_ctx: int) -> dict[str, list[list[int]]]:
        """Prompts by kind, as token ids."""
        out: dict[str, list[list[int]]] = {}
        for kind in self.options.kinds:
            texts = SETS[kind][: self.options.prompts_per_kind]
            if kind == CHAT and model.write_chat:
                texts = tuple(map(model.write_chat, texts))
            out[kind] = [model.tokenize(text) for text in texts]
        for name, text in self.options.own.items():
            out[name] = [model.tokenize(text)]
        most = n_ctx - self.options.tokens - max(self.options.contexts, default=0) - 1
        for kind, prompts in out.items():
            for prompt in prompts:
                if not 0 < len(prompt) <= most:
                    raise RequestError(
                        f"a prompt of {kind} has {len(prompt)} tokens, expected 1 to {most}: "
                        "shorten it"
                    )
        return out

    def _texts(
        self, model: BenchModel, main: Setting, rows: dict[int, int]
    ) -> tuple[list[TextResult], Counter[int]]:
        """Every depth at every context, and every size at the best depth; depths take turns."""
        o = self.options
        out: list[TextResult] = []
        written: Counter[int] = Counter()
        for context in o.contexts:
            before = _repeat(model.tokenize(_FILLER), context)
            runs: dict[int | str, dict[str, list[list[Written]]]] = {d: {} for d in o.depths}
            with model.session(Setting(0)) as plain, model.session(main) as with_head:
                for i in range(o.rounds):
                    for kind, prompts in self.prompts.items():
                        self._begin(f"{kind}, round {i + 1} of {o.rounds}")
                        for j, prompt in enumerate(prompts):
                            # Depths take turns at going first, so that no one profits.
                            for depth in _rotated(o.depths, i + j):
                                wanted: Any = depth
                                session = with_head if depth else plain
                                did = write(model, session, before + prompt, o.tokens, wanted)
                                rounds = runs[depth].setdefault(kind, [[] for _ in range(o.rounds)])
                                rounds[i].append(did)
                                if i == 0 and depth == o.depths[0]:
                                    written.update(did.tokens)
                                self._step()
            for depth, kinds in runs.items():
                out += self._sum_up(kinds, context, 0, rows[0], depth)
        drafting = [t for t in out if t.kind == ALL and t.depth not in (0, "auto")]
        if not drafting:
            return out, written
        best: Any = max(drafting, key=lambda t: t.tok_s.median).depth
        for size in o.sizes:
            sized: dict[str, list[list[Written]]] = {}
            with model.session(replace(main, fastmtp_size=size)) as session:
                for i in range(o.rounds):
                    self._begin(f"{rows[size]} draft tokens, round {i + 1} of {o.rounds}")
                    for kind, prompts in self.prompts.items():
                        for prompt in prompts:
                            did = write(model, session, prompt, o.tokens, best)
                            sized.setdefault(kind, [[] for _ in range(o.rounds)])[i].append(did)
                            self._step()
            out += self._sum_up(sized, 0, size, rows[size], best)
        return out, written

    def _sum_up(
        self,
        kinds: dict[str, list[list[Written]]],
        context: int,
        size: int,
        rows: int,
        depth: int | str,
    ) -> list[TextResult]:
        """A result for each kind, and one for all of them where there are several."""
        rounds = self.options.rounds
        every = [[w for runs in kinds.values() for w in runs[i]] for i in range(rounds)]
        return [
            _text_result(kind, context, size, rows, depth, runs)
            for kind, runs in [*kinds.items(), (ALL, every)]
        ]

    def _coverage(
        self, model: BenchModel, main: Setting, written: Counter[int]
    ) -> dict[int, float]:
        """Share of the written tokens that the first rows of the draft vocabulary have."""
        with model.session(main) as session:
            assert session.head is not None
            if session.head.layout == "none":
                return {}
            ids = session.head.draft_ids().tolist()
        total = written.total()
        out: dict[int, float] = {}
        covered, at = 0, 0
        sizes = sorted({max(1, len(ids) >> shift) for shift in range(8)})
        for size in sizes:
            covered += sum(written[token] for token in ids[at:size])
            at = size
            out[size] = covered / total if total else 0.0
        return out

    def _samples(
        self, model: BenchModel, main: Setting, texts: Sequence[TextResult]
    ) -> tuple[Sample, ...]:
        """The first text of each kind at the best drafting depth, token by token."""
        drafting = [t for t in texts if t.kind == ALL and t.depth not in (0, "auto")]
        if not drafting:
            return ()
        depth: Any = max(drafting, key=lambda t: t.tok_s.median).depth
        out = []
        with model.session(main) as session:
            for kind, prompts in self.prompts.items():
                n = min(self.options.tokens, SAMPLE_TOKENS)
                tokens = trace(model, session, prompts[0], n, depth)
                shown = tuple(
                    TextToken(
                        _text(model, t.token),
                        t.origin,
                        None if t.rejected is None else _text(model, t.rejected),
                    )
                    for t in tokens
                )
                text = b"".join(map(model.piece, prompts[0])).decode(errors="replace")
                out.append(Sample(kind, depth, text, shown))
        return tuple(out)

    def _servers(self) -> list[ServerResult]:
        o = self.options
        out = []
        for server in o.servers:
            name = "llama-server, ours" if server.fastmtp else "llama-server"
            for depth in o.server_depths:
                if depth and not server.drafts:
                    continue
                self._begin(f"{name}, depth {depth}")
                try:
                    result = self._serve(server, name, depth)
                except MtpGgufError as error:
                    result = ServerResult(name, server.version, depth, None, None, str(error))
                out.append(result)
        return out

    def _serve(self, server: LlamaServer, name: str, depth: int) -> ServerResult:
        o = self.options
        longest = max(len(p) for prompts in self.prompts.values() for p in prompts)
        with running(
            server.path,
            self.path,
            depth=depth,
            threads=o.threads,
            n_ctx=longest + o.tokens + 64,
            gpu_layers=o.gpu_layers,
        ) as up:
            speeds: list[float] = []
            drafted = accepted = 0
            for _ in range(o.rounds):
                tokens, seconds = 0, 0.0
                for prompts in self.prompts.values():
                    for prompt in prompts:
                        did = up.complete(prompt, o.tokens)
                        tokens += did.tokens
                        seconds += did.tokens / did.tok_s if did.tok_s > 0 else 0.0
                        drafted += did.drafted
                        accepted += did.accepted
                        self._step()
                speeds.append(tokens / seconds if seconds else 0.0)
        share = accepted / drafted if drafted else None
        return ServerResult(name, server.version, depth, spread(speeds), share)

    def _environment(self, model: BenchModel) -> dict[str, Any]:
        machine = this_machine(model.device)
        packages = ("mtp-gguf", "llama-cpp-python", "numpy")
        return {
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "cpu": machine.cpu,
            "cores": machine.cores,
            "device": machine.device,
            "threads": self.options.threads,
            "gpu_layers": self.options.gpu_layers,
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "versions": {name: version(name) for name in packages},
            "tokens": self.options.tokens,
            "rounds": self.options.rounds,
        }

    def _about_model(self) -> dict[str, Any]:
        identity = identify(self.path)
        digest = hashlib.sha256()
        for shard in shard_paths(self.path):
            with shard.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
        return {
            "file": self.path.name,
            "size": identity.size,
            "fingerprint": identity.fingerprint,
            "sha256": digest.hexdigest(),
        }


def _text_result(
    kind: str,
    context: int,
    size: int,
    rows: int,
    depth: int | str,
    rounds: Sequence[Sequence[Written]],
) -> TextResult:
    every = [w for runs in rounds for w in runs]
    cycles = max(1, sum(w.stats.cycles for w in every))
    given = sum(w.stats.tokens for w in every)
    deepest = max((len(w.stats.drafted) for w in every), default=0)
    drafted = [sum(_at(w.stats.drafted, i) for w in every) for i in range(deepest)]
    accepted = [sum(_at(w.stats.accepted, i) for w in every) for i in range(deepest)]
    verify = sum(w.stats.verify_ms for w in every)
    draft = sum(w.stats.draft_ms for w in every)
    rollback = sum(w.stats.rollback_ms for w in every)
    seconds = sum(w.seconds for w in every)
    # The first token of a text is the prompt's; the others took the time.
    speeds = [
        sum(len(w.tokens) - 1 for w in runs) / max(1e-9, sum(w.seconds for w in runs))
        for runs in rounds
    ]
    return TextResult(
        kind,
        context,
        size,
        rows,
        depth,
        sum(len(w.tokens) for w in rounds[0]),
        spread(speeds),
        given / cycles,
        tuple(a / d for a, d in zip(accepted, drafted, strict=True) if d),
        draft / cycles,
        verify / cycles,
        rollback / cycles,
        max(0.0, seconds * 1e3 - verify - draft - rollback) / cycles,
        given * 1e3 / verify if verify else 0.0,
    )


def _at(values: Sequence[int], i: int) -> int:
    return values[i] if i < len(values) else 0


def _rotated(values: Sequence[int | str], by: int) -> list[int | str]:
    by %= len(values)
    return [*values[by:], *values[:by]]


def _repeat(tokens: Sequence[int], n: int) -> list[int]:
    """N tokens of a text that is said over and over."""
    times = n // max(1, len(tokens)) + 1
    return (list(tokens) * times)[:n]


def _text(model: BenchModel, token: int) -> str:
    return model.piece(token).decode(errors="replace") or f"<{token}>"


__all__ = ["ALL", "BenchOptions", "CycleCosts", "Spread", "run_bench"]
