"""What a bench or tune will measure and what a bench found, as lines for a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .progress import duration

if TYPE_CHECKING:
    from mtp_gguf.bench.plan import Plan
    from mtp_gguf.bench.result import BenchResult, ServerResult, TextResult
    from mtp_gguf.bench.spread import Spread


def plan_lines(plan: "Plan", budget: float | None) -> Iterator[str]:
    """What will be measured, about how long each part takes, and what is left out."""
    amount = plan.amount
    within = "" if budget is None else f", to end within {duration(budget)}"
    if budget is not None and plan.seconds > budget:
        within = f", more than the {duration(budget)} of --budget: nothing else can be left out"
    yield (
        f"plan: about {duration(plan.seconds)}{within}; {_count(amount.prompts, 'prompt')} of each "
        f"kind, answers of {amount.tokens} tokens, {_count(amount.rounds, 'round')}"
    )
    for what, seconds in plan.lines(plan.kept):
        yield f"  {duration(seconds):>9}  {what}"
    for what, _ in plan.lines(plan.left_out):
        yield f"  {'left out':>9}  {what}"
    if plan.whole > 1.2 * plan.seconds:
        yield f"everything in full would take about {duration(plan.whole)} (--full)"


def left_out_lines(result: "BenchResult") -> Iterator[str]:
    """What the time was too short for."""
    for part in result.plan:
        if part.state == "left out":
            yield f"   left out  {part.what}"


def stopped_line(result: "BenchResult") -> str:
    """What a stopped bench lacks, for the end of a sentence."""
    missing = [part.what for part in result.plan if part.state == "planned"]
    short = [f"fewer rounds of {p.what}" for p in result.plan if p.state == "fewer rounds"]
    return f"not measured: {'; '.join(missing + short)}" if missing + short else "all was measured"


def bench_table(result: "BenchResult") -> Iterator[str]:
    """Line by line: costs, texts, llama-server, what was left out, the verdict."""
    machine = result.environment
    llama = machine["versions"]["llama-cpp-python"]
    yield f"{result.model['file']} on {machine['cpu']}, {machine['device']}"
    yield f"threads {machine['threads']}, llama-cpp-python {llama}, {machine['kernels']} kernels"
    for costs in result.cycles:
        yield ""
        yield f"ms after {costs.context} tokens"
        yield "trunk, batch of  " + _numbers(range(1, len(costs.verify) + 1), "7d")
        yield "                 " + _numbers((c.median for c in costs.verify), "7.2f")
        yield "               ± " + _numbers(map(_apart, costs.verify), "7.2f")
        yield "drafts, chain of " + _numbers(range(1, len(costs.draft) + 1), "7d")
        yield "                 " + _numbers((c.median for c in costs.draft), "7.2f")
        yield "               ± " + _numbers(map(_apart, costs.draft), "7.2f")
        yield f"rollback {costs.rollback.median:.3f} ± {_apart(costs.rollback):.3f}"
    if prefill := result.prefill:
        both = prefill.trunk.median + prefill.head.median
        yield (
            f"prompt of {prefill.tokens}: {prefill.plain.median:.0f} ± {_apart(prefill.plain):.0f} "
            f"without the head, {both:.0f} ± {_apart(prefill.trunk):.0f} with it "
            f"({prefill.head.median:.1f} the head)"
        )
    for context in dict.fromkeys(text.context for text in result.texts):
        yield from _texts([t for t in result.texts if t.context == context], context)
    if result.sizes:
        yield ""
        yield f"draft vocabularies, at depth {result.sizes[0].depth}"
        yield "   rows   tok/s    ±  tokens a cycle  drafts, ms  accepted by position"
        yield from (_size(text) for text in result.sizes if text.kind == "all")
    if result.servers:
        yield ""
        yield "llama-server, in turn with our session at the same depth"
        yield "depth   tok/s    ±  ours    ±  times as fast  accepted"
    name = ""
    for server in result.servers:
        if server.name != name:
            name = server.name
            yield name
        yield _server(server)
    if left_out := list(left_out_lines(result)):
        yield ""
        yield f"in {duration(result.budget_s or 0)} (--budget, --full) there was no time for"
        yield from left_out
    if result.verdict:
        verdict = result.verdict
        yield ""
        yield (
            f"free drafts would give {verdict.limit_tok_s:.1f} tok/s at depth "
            f"{verdict.best_drafting}; {verdict.share_reached:.0%} of that is reached"
        )
        times = verdict.without
        yield (
            f"times as fast if a batch cost as much as a token {times['verification']:.2f}, "
            f"if drafts cost nothing {times['drafting']:.2f}, "
            f"if all were right {times['acceptance']:.2f}"
        )
        yield verdict.sentence


def _texts(texts: "Sequence[TextResult]", context: int) -> Iterator[str]:
    """All texts by depth, then the speeds of each kind."""
    whole = {t.depth: t for t in texts if t.kind == "all"}
    plain = whole.get(0)
    yield ""
    yield f"texts after {context} tokens" if context else "texts"
    yield "depth   tok/s    ±  times 0  tokens a cycle  limit  accepted by position"
    for depth, t in whole.items():
        times = f"{t.tok_s.median / plain.tok_s.median:9.2f}" if plain else " " * 9
        yield (
            f"{depth!s:>5}{t.tok_s.median:8.1f} {_apart(t.tok_s):4.1f}{times}"
            f"{t.tokens_per_cycle:16.2f}{t.limit_tok_s:7.1f}  {_accepted(t)}"
        ).rstrip()
    kinds = [kind for kind in dict.fromkeys(t.kind for t in texts) if kind != "all"]
    if len(kinds) < 2:
        return
    speeds = {(t.kind, t.depth): t.tok_s.median for t in texts}
    yield "tok/s" + "".join(f"{kind[:12]:>14}" for kind in kinds)
    for depth in whole:
        yield f"{depth!s:>5}" + "".join(f"{speeds[kind, depth]:14.1f}" for kind in kinds)


def _size(text: "TextResult") -> str:
    return (
        f"{text.rows:7}{text.tok_s.median:8.1f} {_apart(text.tok_s):4.1f}"
        f"{text.tokens_per_cycle:16.2f}{text.draft_ms:12.2f}  {_accepted(text)}"
    ).rstrip()


def _server(server: "ServerResult") -> str:
    if server.tok_s is None:
        return f"{server.depth:5}  {server.note}"
    line = f"{server.depth:5}{server.tok_s.median:8.1f} {_apart(server.tok_s):4.1f}"
    if server.ours and server.times:
        line += f" {server.ours.median:5.1f} {_apart(server.ours):4.1f}{server.times.median:15.2f}"
    else:
        line += "  measured alone: no room for both".ljust(26)
    return line + (f"{server.acceptance:10.0%}" if server.acceptance is not None else "")


def _apart(spread: "Spread") -> float:
    """Half of what lies between the quarter points, or the extremes of less than four."""
    return (spread.high - spread.low) / 2


def _accepted(text: "TextResult") -> str:
    return " ".join(f"{share:.0%}" for share in text.acceptance)


def _numbers(values: "Iterable[float]", form: str) -> str:
    return "".join(format(value, form) for value in values)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
