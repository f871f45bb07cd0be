"""What a bench found, as it stands in the JSON; shapes and units are on the fields."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .costs import CycleCosts, PrefillCosts
    from .spread import Spread
    from .verdict import Verdict

FORMAT = 1


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
    """llama-server on the same file and prompts. note: why it did not run, "" when it did."""

    name: str
    version: str
    depth: int
    tok_s: Spread | None
    acceptance: float | None
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
class BenchResult:
    """All of a bench.

    draft_ms: by rows of the head, of chains of 1, 2, … drafts. coverage: by
    rows, the share of the written tokens that the draft vocabulary's first rows have.
    """

    environment: dict[str, Any]
    model: dict[str, Any]
    cycles: tuple[CycleCosts, ...]
    draft_ms: dict[int, tuple[Spread, ...]]
    prefill: PrefillCosts
    texts: tuple[TextResult, ...]
    servers: tuple[ServerResult, ...]
    coverage: dict[int, float]
    samples: tuple[Sample, ...]
    verdict: Verdict | None
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain objects, lists, numbers and text."""
        return {"format": FORMAT, **asdict(self)}
