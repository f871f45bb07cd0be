"""What a bench found, as a table for a terminal of 80 columns."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtp_gguf.native.bench.result import BenchResult, TextResult


def bench_table(result: "BenchResult") -> Iterator[str]:
    """Line by line: costs, texts, llama-server, the verdict."""
    machine = result.environment
    llama = machine["versions"]["llama-cpp-python"]
    yield f"{result.model['file']} on {machine['cpu']}, {machine['device']}"
    yield f"threads {machine['threads']}, llama-cpp-python {llama}"
    for costs in result.cycles:
        yield ""
        yield f"ms after {costs.context} tokens"
        yield "trunk, batch of  " + _numbers(range(1, len(costs.verify) + 1), "7d")
        yield "                 " + _numbers((c.median for c in costs.verify), "7.2f")
        yield "drafts, chain of " + _numbers(range(1, len(costs.draft) + 1), "7d")
        yield "                 " + _numbers((c.median for c in costs.draft), "7.2f")
        yield f"rollback {costs.rollback.median:.2f}"
    prefill = result.prefill
    both = prefill.trunk.median + prefill.head.median
    yield (
        f"prompt of {prefill.tokens}: {prefill.plain.median:.0f} without the head, {both:.0f} with "
        f"({prefill.head.median:.1f} for the head)"
    )
    yield ""
    yield "text      ctx   rows depth  tok/s    ±  a cycle  limit  accepted by position"
    for text in result.texts:
        yield _row(text)
    for server in result.servers:
        speed = f"{server.tok_s.median:.1f} tok/s" if server.tok_s else server.note
        share = f", {server.acceptance:.0%} of drafts accepted" if server.acceptance else ""
        yield f"{server.name}, depth {server.depth}: {speed}{share}"
    if result.verdict:
        verdict = result.verdict
        yield ""
        yield (
            f"free drafts would give {verdict.limit_tok_s:.1f} tok/s at depth "
            f"{verdict.best_drafting}; {verdict.share_reached:.0%} of that is reached"
        )
        yield verdict.sentence


def _row(text: "TextResult") -> str:
    apart = (text.tok_s.high - text.tok_s.low) / 2
    accepted = " ".join(f"{share:.0%}" for share in text.acceptance)
    return (
        f"{text.kind[:8]:8}{text.context:5}{text.rows:7}{text.depth!s:>6}"
        f"{text.tok_s.median:7.1f}{apart:5.1f}{text.tokens_per_cycle:9.2f}"
        f"{text.limit_tok_s:7.1f}  {accepted}"
    ).rstrip()


def _numbers(values: "Iterator[float] | range", form: str) -> str:
    return "".join(format(value, form) for value in values)
