"""What a bench found, as it stands in the JSON; shapes and units are on the fields."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .costs import CycleCosts, PrefillCosts
    from .spread import Spread
    from .verdict import Verdict

FORMAT = 3
ALL = "all"  # the kind that sums up the others

# Where a bench is: a result is written after each part, and stays when no other follows.
RUNNING, STOPPED, DONE = "running", "stopped", "done"
# Where a part of it is, beside DONE; SHORT: texts of fewer rounds than planned.
PLANNED, SHORT, LEFT_OUT = "planned", "fewer rounds", "left out"


@dataclass(frozen=True)
class TextResult:
    """One kind of text at one depth. Times are milliseconds of a cycle; rest: all but the parts.

    kind: the set's name, "all" for their sum. context: tokens before the prompts. acceptance: by
    position, of what was verified. limit_tok_s: tokens over the time of verification alone, which
    is what free drafts would give.
    """

    kind: str
    context: int
    fastmtp_size: int
    rows: int
    depth: int | str
    tokens: int
    tok_s: Spread
    tokens_per_cycle: float
    acceptance: tuple[float, ...]
    draft_ms: float
    verify_ms: float
    rollback_ms: float
    rest_ms: float
    limit_tok_s: float


@dataclass(frozen=True)
class ServerResult:
    """llama-server on the same file and prompts.

    ours: our own session at that depth, in turn with it; times: its speed over the server's, round
    by round. Both None where there was no room for two copies of the model. note: why the server
    did not run, "" when it did.
    """

    name: str
    version: str
    depth: int
    tok_s: Spread | None
    acceptance: float | None
    ours: Spread | None = None
    times: Spread | None = None
    note: str = ""


@dataclass(frozen=True)
class TextToken:
    """A token of the sample, for the report. rejected: the text of the draft in its place."""

    text: str
    origin: int
    rejected: str | None


@dataclass(frozen=True)
class Sample:
    """A text as it was written at one depth."""

    kind: str
    depth: int | str
    prompt: str
    tokens: tuple[TextToken, ...]


@dataclass(frozen=True)
class PlannedPart:
    """A line of the plan. state: DONE, PLANNED, SHORT, or LEFT_OUT for want of time."""

    what: str
    seconds: float
    state: str


@dataclass(frozen=True)
class BenchResult:
    """All of a bench, or what there is of it.

    state: RUNNING, STOPPED (by the user) or DONE. plan: what was to be measured, needed seconds
    beside it. budget_s: None without one. whole_s: what everything in full would take, 0 before
    that is known. sizes: texts at the best depth, by size of the draft vocabulary, the default
    among them. coverage: by rows, the share of the written tokens that the draft vocabulary's
    first rows have.
    """

    state: str
    environment: dict[str, Any]
    model: dict[str, Any]
    budget_s: float | None = None
    whole_s: float = 0.0
    seconds: float = 0.0
    plan: tuple[PlannedPart, ...] = ()
    cycles: tuple[CycleCosts, ...] = ()
    prefill: PrefillCosts | None = None
    texts: tuple[TextResult, ...] = ()
    sizes: tuple[TextResult, ...] = ()
    servers: tuple[ServerResult, ...] = ()
    coverage: dict[int, float] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    verdict: Verdict | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain objects, lists, numbers and text."""
        return {"format": FORMAT, **asdict(self)}
