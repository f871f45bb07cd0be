"""The plan of `bench` and `tune`, and the result of `bench`, as lines for a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mtp_gguf.bench.analysis import sentence_of
from mtp_gguf.bench.result import ALL, PLANNED, SHORT, SKIPPED, library_notes, pairs_of
from mtp_gguf.gguf_tools.machine.system import busy_machine
from mtp_gguf.gguf_tools.machine.text import duration, human_bytes, printable

if TYPE_CHECKING:
    from mtp_gguf.bench.plan import Plan
    from mtp_gguf.bench.result import BenchResult, ServerResult, TextResult

_PAIRED = (
    "text",
    "context",
    "depth",
    "plain tok/s",
    "drafted tok/s",
    "ratio",
    "accepted by position",
    "mean accepted length",
)


def plan_lines(plan: "Plan", budget: float | None) -> Iterator[str]:
    """Yield what will be measured, the estimated time of each part, and what is skipped."""
    amount = plan.amount
    within = "" if budget is None else f", within the budget of {duration(budget)}"
    if budget is not None and plan.seconds > budget:
        within = f", over the --budget of {duration(budget)}: nothing more can be skipped"
    yield (
        f"plan: about {duration(plan.seconds)}{within}; {_count(amount.prompts, 'prompt')} of each "
        f"kind, answers of {amount.tokens} tokens, {_count(amount.rounds, 'round')}"
    )
    for what, seconds in plan.lines(plan.planned):
        yield f"  {duration(seconds):>9}  {what}"
    for what, _ in plan.lines(plan.skipped):
        yield f"  {'skipped':>9}  {what}"
    if plan.whole > 1.2 * plan.seconds:
        yield f"measuring everything would take about {duration(plan.whole)} (--full)"
    if busy := busy_machine():
        yield f"note: {busy}"


def stopped_line(result: "BenchResult") -> str:
    """Return what a stopped benchmark did not measure, as the end of a sentence."""
    missing = [part.what for part in result.plan if part.state == PLANNED]
    short = [f"fewer rounds of {part.what}" for part in result.plan if part.state == SHORT]
    return f"not measured: {'; '.join(missing + short)}" if missing + short else "all was measured"


def bench_table(result: "BenchResult") -> Iterator[str]:
    """Yield the lines of the table: costs, texts, llama-server, skipped parts, the analysis."""
    e = result.environment
    yield f"{printable(result.model.file)} on {e.cpu}, {e.device}"
    llama = e.versions["llama-cpp-python"]
    yield f"threads {e.threads}, llama-cpp-python {llama}, {e.kernels} kernels"
    yield f"kernels: {result.model.kernels.text}"
    yield f"memory: {human_bytes(result.peak_bytes)} at most"
    for costs in result.cycles:
        yield ""
        yield f"ms after {costs.context} tokens"
        yield "trunk, batch of  " + _numbers(range(1, len(costs.verify) + 1), "7d")
        yield "                 " + _numbers((c.median for c in costs.verify), "7.2f")
        yield "               ± " + _numbers((c.half_range for c in costs.verify), "7.2f")
        if costs.draft:
            yield "drafts, chain of " + _numbers(range(1, len(costs.draft) + 1), "7d")
            yield "                 " + _numbers((c.median for c in costs.draft), "7.2f")
            yield "               ± " + _numbers((c.half_range for c in costs.draft), "7.2f")
            yield f"rollback {costs.rollback.median:.3f} ± {costs.rollback.half_range:.3f}"
    if prefill := result.prefill:
        plain, trunk, head = prefill.plain, prefill.trunk, prefill.head
        line = f"prompt of {prefill.tokens}: {plain.median:.0f} ± {plain.half_range:.0f}"
        if trunk and head:
            line += (
                f" without the head, {trunk.median + head.median:.0f} ± {trunk.half_range:.0f} "
                f"with it ({head.median:.1f} of that the head)"
            )
        yield line
    if limits := result.limits:
        yield ""
        yield (
            f"a single token reads weights and states at {limits.of_read:.0%} of the "
            f"{limits.read / 1e9:.1f} GB/s that these threads read at most"
        )
        if limits.of_products is not None:
            yield (
                f"the prompt multiplies at {limits.of_products:.0%} of the "
                f"{limits.products / 1e12:.2f} trillion products of bytes a second"
            )
    for context in dict.fromkeys(text.context for text in result.texts):
        yield from _texts([t for t in result.texts if t.context == context], context)
    if result.sizes:
        yield ""
        yield f"draft vocabularies, at depth {result.sizes[0].depth}"
        yield "   rows   tok/s    ±  tokens/cycle    drafts, ms  accepted by position"
        yield from (_size(text) for text in result.sizes if text.kind == ALL)
    if result.servers:
        yield ""
        yield "llama-server, interleaved with MTPLlama at the same depth"
        yield "depth   tok/s    ±  MTPLlama ±  times as fast accepted"
    name = ""
    for server in result.servers:
        if server.name != name:
            name = server.name
            yield name
        yield _server(server)
    yield from library_notes(result)
    if skipped := [part.what for part in result.plan if part.state == SKIPPED]:
        yield ""
        yield f"skipped to fit {duration(result.budget_s or 0)} (--budget, --full)"
        yield from (f"   {what}" for what in skipped)
    if analysis := result.analysis:
        speedups = analysis.speedups
        yield ""
        yield (
            f"with free drafts, depth {analysis.best_drafting} would reach "
            f"{analysis.limit_tok_s:.1f} tok/s; it reaches {analysis.share_reached:.0%} of that"
        )
        yield (
            f"it would be {speedups['verification']:.2f} times as fast if a batch cost as much as "
            f"one token, {speedups['drafting']:.2f} times if drafts were free, "
            f"{speedups['acceptance']:.2f} times if all drafts were accepted"
        )
    if sentence := sentence_of(result):
        if not result.analysis:
            yield ""
        yield sentence
    yield from (f"warning: {warning}" for warning in result.warnings)


def _texts(texts: "Sequence[TextResult]", context: int) -> Iterator[str]:
    """Yield the totals by depth, then the speed of each kind."""
    whole = {t.depth: t for t in texts if t.kind == ALL}
    plain = whole.get(0)
    yield ""
    yield f"texts after {context} tokens" if context else "texts"
    yield "depth        tok/s    ±  times 0  tokens/cycle    limit  from text  accepted by position"
    for depth, t in whole.items():
        times = f"{t.tok_s.median / plain.tok_s.median:9.2f}" if plain else " " * 9
        yield (
            f"{depth!s:<11}{t.tok_s.median:7.1f} {t.tok_s.half_range:4.1f}{times}"
            f"{t.tokens_per_cycle:16.2f}{t.limit_tok_s:7.1f}{t.text_share:11.0%}  {_accepted(t)}"
        ).rstrip()
    kinds = [kind for kind in dict.fromkeys(t.kind for t in texts) if kind != ALL]
    if len(kinds) < 2:
        return
    speeds = {(t.kind, t.depth): t.tok_s.median for t in texts}
    yield "tok/s      " + "".join(f"{kind[:12]:>14}" for kind in kinds)
    for depth in whole:
        yield f"{depth!s:<11}" + "".join(f"{speeds[kind, depth]:14.1f}" for kind in kinds)


def _size(text: "TextResult") -> str:
    return (
        f"{text.rows:7}{text.tok_s.median:8.1f} {text.tok_s.half_range:4.1f}"
        f"{text.tokens_per_cycle:16.2f}{text.draft_ms:12.2f}  {_accepted(text)}"
    ).rstrip()


def _server(server: "ServerResult") -> str:
    if server.tok_s is None:
        return f"{server.depth:5}  {server.note}"
    line = f"{server.depth:5}{server.tok_s.median:8.1f} {server.tok_s.half_range:4.1f}"
    if server.ours and server.times:
        line += (
            f" {server.ours.median:5.1f} {server.ours.half_range:4.1f}{server.times.median:15.2f}"
        )
    else:
        line += "  measured alone: both do not fit".ljust(26)
    return line + (f"{server.acceptance:10.0%}" if server.acceptance is not None else "")


def _accepted(text: "TextResult") -> str:
    if not text.acceptance:
        return "no drafts made" if text.depth != 0 and not text.text_share else ""
    return " ".join(f"{share:.0%}" for share in text.acceptance)


def _numbers(values: "Iterable[float]", form: str) -> str:
    return "".join(format(value, form) for value in values)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def markdown(result: "BenchResult") -> Iterator[str]:
    """Yield the pairs as a table for an issue, below a line on file, versions and machine."""
    e = result.environment
    versions = ", ".join(f"{name} {version}" for name, version in e.versions.items())
    memory = f", {human_bytes(result.peak_bytes)} of memory" if result.peak_bytes else ""
    yield _cell(
        f"{result.model.file} ({human_bytes(result.model.size)}) on {e.cpu}, {e.device}, "
        f"{e.threads} threads{memory}; {versions}, {e.kernels} kernels, {e.system}"
    )
    yield ""
    yield f"| {' | '.join(_PAIRED)} |"
    yield f"|{' --- |' * len(_PAIRED)}"
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
