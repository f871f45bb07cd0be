"""The result of a benchmark, which is also the layout of bench.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mtp_gguf.gguf_tools.profile import AUTO

if TYPE_CHECKING:
    from .environment import Environment, MeasuredFile
    from .plan import Amount
    from .stats import Stats

FORMAT = 4
# Depths that are names: what drafts. "auto" is the head alone, as the numbers are.
LOOKUP, BOTH = "lookup", "auto+lookup"
NAMED = (AUTO, LOOKUP, BOTH)

ALL = "all"  # the kind that sums up all others

# State of a benchmark. A result is written after each part, so a file can say RUNNING for ever.
RUNNING, STOPPED, DONE = "running", "stopped", "done"
# State of one part, besides DONE. SHORT: texts that were measured for fewer rounds than planned.
PLANNED, SHORT, SKIPPED = "planned", "fewer rounds", "skipped"


@dataclass(frozen=True)
class CycleCosts:
    """Milliseconds after `context` tokens.

    verify[i]: a trunk batch of i + 1 tokens with all logits. draft[i]: a chain of i + 1 drafts
    after one row was fed; empty without a head. rollback: of rejected drafts.
    """

    context: int
    verify: tuple[Stats, ...]
    draft: tuple[Stats, ...]
    rollback: Stats


@dataclass(frozen=True)
class PrefillCosts:
    """Milliseconds of a prompt: without a head (plain), and the trunk's and the head's with one.

    The latter two are None for a model that has none.
    """

    tokens: int
    plain: Stats
    trunk: Stats | None = None
    head: Stats | None = None


@dataclass(frozen=True)
class Limits:
    """What the machine does at most with the threads of the benchmark, and what the model reaches.

    read: bytes of the file a second. products: of two 8-bit integers a second, by the widest
    instruction that our kernels use. of_read: the share at which single tokens read the weights.
    of_products: the share at which a prompt multiplies; None if no prompt was measured.
    """

    read: float
    products: float
    of_read: float = 0.0
    of_products: float | None = None


@dataclass(frozen=True)
class TextResult:
    """One kind of text at one depth. Times are milliseconds per cycle.

    kind: name of the prompt set, or ALL. depth: a number, or a name of NAMED. context: tokens
    before the prompts. rows: size of the draft vocabulary that was used; fastmtp_size: size that
    was asked for, 0 for the file's own.
    acceptance: by position, over all verified drafts. rest_ms: what is in no other part.
    limit_tok_s: tokens over the time of verification alone, which is the speed with free drafts.
    text_share: the share of the generated tokens that were drafted from the text.
    """

    kind: str
    context: int
    fastmtp_size: int
    rows: int
    depth: int | str
    tokens: int
    tok_s: Stats
    tokens_per_cycle: float
    acceptance: tuple[float, ...]
    draft_ms: float
    verify_ms: float
    rollback_ms: float
    rest_ms: float
    limit_tok_s: float
    text_share: float = 0.0


@dataclass(frozen=True)
class ServerResult:
    """llama-server with the same file, prompts and depth, interleaved with our own session.

    ours: tokens per second of our session; times: its speed over the server's, by round. Both are
    None if the memory did not hold two copies of the model. note: why the server did not run, or
    empty. kernels: those of the server, named as in Machine.
    """

    name: str
    version: str
    depth: int
    tok_s: Stats | None
    acceptance: float | None
    ours: Stats | None = None
    times: Stats | None = None
    note: str = ""
    kernels: str = ""

    def differs_from(self, kernels: str) -> str:
        """A sentence if the comparison is also one of libraries; our session ran on `kernels`."""
        if self.times is None or self.kernels in ("", kernels):
            return ""
        return (
            f"{self.name} runs {self.kernels} kernels and MTPLlama {kernels} kernels, so the "
            "factor compares the libraries, too."
        )


@dataclass(frozen=True)
class Analysis:
    """The best depth and what limits it.

    best: the fastest depth, 0 for no drafting. best_drafting: the fastest depth above 0. gain: its
    speed over that of no drafting. limit_tok_s: its speed if drafts cost nothing; share_reached:
    the part of that which is reached. speedups: how many times as fast it would be with free
    "verification" (a batch for the cost of one token), free "drafting", or perfect "acceptance".
    bottleneck: the one of the three with the largest speedup.
    """

    best: int | str
    best_drafting: int | str
    plain_tok_s: float
    tok_s: float
    gain: float
    limit_tok_s: float
    share_reached: float
    speedups: dict[str, float]
    bottleneck: str
    sentence: str


@dataclass(frozen=True)
class SampleToken:
    """One token of a sample text. rejected: text of the wrong draft that it replaced, or None.

    origin: 0 for a token sampled from the trunk, i for the i-th draft of a chain, -1 for a draft
    from the text.
    """

    text: str
    origin: int
    rejected: str | None


@dataclass(frozen=True)
class Sample:
    """A text generated at one depth, token by token."""

    kind: str
    depth: int | str
    prompt: str
    tokens: tuple[SampleToken, ...]


@dataclass(frozen=True)
class PlannedPart:
    """One line of the plan. seconds: estimated. state: DONE, PLANNED, SHORT or SKIPPED."""

    what: str
    seconds: float
    state: str


@dataclass(frozen=True)
class Pair:
    """One kind of text at one depth, and the same without drafts.

    ratio: of the medians of both speeds. acceptance: by position. accepted_length: mean tokens of
    a cycle, the trunk's own included.
    """

    kind: str
    context: int
    depth: int | str
    plain_tok_s: float
    tok_s: float
    ratio: float
    acceptance: tuple[float, ...]
    accepted_length: float


@dataclass(frozen=True)
class BenchResult:
    """Everything that a benchmark has measured so far.

    state: RUNNING, STOPPED (by the user) or DONE. amount: prompts, tokens and rounds of the plan;
    None before there is a plan. budget_s: None if unlimited. whole_s: estimated seconds of a
    run without a budget. sizes: texts at the best depth by size of the draft vocabulary, the
    file's own size included. peak_bytes: the most memory of this process so far. coverage: by
    number of rows, the share of the generated tokens that the first rows of the draft
    vocabulary contain. warnings: sentences, why the figures are unreliable.
    """

    state: str
    environment: Environment
    model: MeasuredFile
    amount: Amount | None = None
    budget_s: float | None = None
    whole_s: float = 0.0
    seconds: float = 0.0
    plan: tuple[PlannedPart, ...] = ()
    cycles: tuple[CycleCosts, ...] = ()
    prefill: PrefillCosts | None = None
    limits: Limits | None = None
    texts: tuple[TextResult, ...] = ()
    sizes: tuple[TextResult, ...] = ()
    servers: tuple[ServerResult, ...] = ()
    coverage: dict[int, float] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    analysis: Analysis | None = None
    warnings: tuple[str, ...] = ()
    peak_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The result as plain objects, lists, numbers and text."""
        pairs = [asdict(pair) for pair in pairs_of(self)]
        return {"format": FORMAT, **asdict(self), "pairs": pairs}


def pairs_of(result: BenchResult) -> tuple[Pair, ...]:
    """A pair for each text and depth that was also measured without drafts."""
    plain = {(t.kind, t.context): t.tok_s.median for t in result.texts if t.depth == 0}
    return tuple(
        Pair(
            t.kind,
            t.context,
            t.depth,
            plain[t.kind, t.context],
            t.tok_s.median,
            t.tok_s.median / plain[t.kind, t.context],
            t.acceptance,
            t.tokens_per_cycle,
        )
        for t in result.texts
        if t.depth != 0 and plain.get((t.kind, t.context))
    )


def library_notes(result: BenchResult) -> list[str]:
    """One sentence for each server that was compared on other libraries than our session's."""
    kernels = result.environment.kernels
    found = (server.differs_from(kernels) for server in result.servers)
    return [note for note in dict.fromkeys(found) if note]
