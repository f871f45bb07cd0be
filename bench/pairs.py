"""Each setting of a benchmark beside no drafting, in the units that people compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtp_gguf.gguf_tools.text import human_bytes, printable

if TYPE_CHECKING:
    from .result import BenchResult

_COLUMNS = (
    "text",
    "context",
    "depth",
    "plain tok/s",
    "drafted tok/s",
    "ratio",
    "accepted by position",
    "mean accepted length",
)


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


def markdown(result: BenchResult) -> Iterator[str]:
    """Yield the pairs as a table for an issue, below a line on file, versions and machine."""
    e = result.environment
    versions = ", ".join(f"{name} {version}" for name, version in e.versions.items())
    memory = f", {human_bytes(result.peak_bytes)} of memory" if result.peak_bytes else ""
    yield _cell(
        f"{result.model.file} ({human_bytes(result.model.size)}) on {e.cpu}, {e.device}, "
        f"{e.threads} threads{memory}; {versions}, {e.kernels} kernels, {e.system}"
    )
    yield ""
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|{' --- |' * len(_COLUMNS)}"
    for pair in pairs_of(result):
        cells = (
            pair.kind,
            str(pair.context),
            str(pair.depth),
            f"{pair.plain_tok_s:.1f}",
            f"{pair.tok_s:.1f}",
            f"{pair.ratio:.2f}",
            " ".join(f"{rate:.0%}" for rate in pair.acceptance),
            f"{pair.accepted_length:.2f}",
        )
        yield f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """A text that Markdown shows as it is."""
    for special in "\\`|<>*_[]":
        text = text.replace(special, f"\\{special}")
    return printable(text)
