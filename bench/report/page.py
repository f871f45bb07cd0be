"""The HTML report of a benchmark. All text from models and files is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from mtp_gguf.gguf_tools.profile import AUTO, FROM_TEXT

from ..analysis import sentence_of
from ..result import (
    ALL,
    BOTH,
    DONE,
    LOOKUP,
    PLANNED,
    SHORT,
    SKIPPED,
    STOPPED,
    Analysis,
    BenchResult,
    Sample,
    SampleToken,
    ServerResult,
    TextResult,
    library_notes,
)
from ..stats import Stats
from .bars import Part, Row, bars

_DEEPEST_STYLE = 5  # drafts beyond this position share a style
_COMPARISON = (
    " Each llama-server was measured interleaved with MTPLlama at the same depth; the factor "
    "after its speed is how many times as fast MTPLlama was."
)
_CYCLE_PARTS = ("verify", "draft", "rollback", "rest")

# Fills 1 to 5: solid, rising lines, dots, falling lines, a grid, so that color is not needed.
PATTERNS = """<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>
<pattern id="p1" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" style="fill:var(--c1)"/></pattern>
<pattern id="p2" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" style="fill:var(--c2)"/><path d="M-2 2L2 -2M0 8L8 0M6 10L10 6" style="stroke:var(--ground);stroke-width:1.6"/></pattern>
<pattern id="p3" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" style="fill:var(--c3)"/><circle cx="3" cy="3" r="1.3" style="fill:var(--ground)"/></pattern>
<pattern id="p4" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" style="fill:var(--c4)"/><path d="M-2 6L2 10M0 0L8 8M6 -2L10 2" style="stroke:var(--ground);stroke-width:1.6"/></pattern>
<pattern id="p5" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" style="fill:var(--c5)"/><path d="M0 3H6M3 0V6" style="stroke:var(--ground);stroke-width:1"/></pattern>
</defs></svg>"""  # noqa: E501  (SVG)


def render_report(result: BenchResult) -> str:
    """The whole HTML page of a benchmark."""
    style = (resources.files(__package__) / "style.css").read_text(encoding="utf-8")
    texts = result.texts
    first = result.cycles[0].context if result.cycles else 0
    contexts = list(dict.fromkeys(t.context for t in texts))
    main = [t for t in texts if t.context == (contexts or [first])[0]]
    name = escape(result.model.file)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{name}: drafting benchmark</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{style}</style></head><body>{PATTERNS}<main>",
        f"<h1>{name}: drafting benchmark</h1>",
        _where(result),
        _state(result),
        _warnings(result),
        _summary(result),
        _speeds(main, result),
        _limits(result.analysis),
        _samples(result.samples),
        _acceptance(main),
        _time(main),
        _break_even(result, main),
        _contexts(texts, contexts),
        _sizes(result),
        _numbers(result),
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _where(result: BenchResult) -> str:
    e = result.environment
    words = [
        f"{e.cpu}, {e.device}, {_count(e.threads, 'thread')}, {e.kernels} kernels",
        ", ".join(f"{name} {version}" for name, version in e.versions.items()),
    ]
    if amount := result.amount:
        words.append(
            f"{_count(amount.prompts, 'prompt')} of each kind, answers of {amount.tokens} tokens, "
            f"{_count(amount.rounds, 'round')}"
        )
    when = f"<time>{escape(e.when)}</time>"
    return f'<p class="soft">{escape("; ".join(words))}; {when}</p>'


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _state(result: BenchResult) -> str:
    """The skipped measurements; empty if there are none."""
    parts: dict[str, list[str]] = {}
    for part in result.plan:
        parts.setdefault(part.state, []).append(part.what)
    notes = []
    if result.state != DONE and PLANNED in parts:
        state = "was stopped" if result.state == STOPPED else "is still running"
        notes.append(f"This benchmark {state}; not measured: {'; '.join(parts[PLANNED])}.")
    if SHORT in parts:
        notes.append(f"Fewer rounds than planned: {'; '.join(parts[SHORT])}.")
    if SKIPPED in parts:
        notes.append(f"Skipped to fit the budget: {'; '.join(parts[SKIPPED])} (--budget, --full).")
    return "".join(f'<p class="note">{escape(text)}</p>' for text in notes)


_DEPTH_LABELS = {
    0: "no drafting",
    LOOKUP: "lookup alone",
    BOTH: "depth auto and lookup",
}


def _depth_label(depth: int | str) -> str:
    return _DEPTH_LABELS.get(depth, f"depth {depth}")


def _summary(result: BenchResult) -> str:
    text = _paragraph("summary", sentence) if (sentence := sentence_of(result)) else ""
    analysis = result.analysis
    if not analysis:
        return text
    auto = next((t for t in result.texts if t.kind == ALL and t.depth == AUTO), None)
    best = f"depth {analysis.best_drafting}"
    figures = [
        ("no drafting", f"{analysis.plain_tok_s:.1f} tok/s"),
        (f"best fixed depth: {analysis.best_drafting}", f"{analysis.tok_s:.1f} tok/s"),
        (f"speedup of {best}", f"{analysis.gain:.2f} ×"),
        (f"speed of {best}, compared with free drafts", f"{analysis.share_reached:.0%}"),
    ]
    if auto:
        speedup = auto.tok_s.median / analysis.plain_tok_s
        figures.insert(
            1, ("depth auto (the default)", f"{auto.tok_s.median:.1f} tok/s, {speedup:.2f} ×")
        )
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(_unbroken(value))}</dd></div>"
        for name, value in figures
    )
    return f'{text}<dl class="figures">{cells}</dl>'


def _unbroken(value: str) -> str:
    """A number with its unit, or several after commas, with no line break between the two."""
    return value.replace(" ", "\u00a0").replace(",\u00a0", ", ")


def _warnings(result: BenchResult) -> str:
    return "".join(_paragraph("note", f"{warning}.") for warning in result.warnings)


def _paragraph(kind: str, sentence: str) -> str:
    text = escape(sentence[:1].upper() + sentence[1:])
    return f'<p class="{kind}">{text}</p>'


def _section(title: str, text: str, *content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{''.join(content)}</section>"


def _figure(svg: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{svg}{below}</figure>"


def _key(names: Iterable[str]) -> str:
    items = "".join(
        f'<li><svg aria-hidden="true"><rect width="100%" height="100%" class="f{i}"/></svg>'
        f"{escape(name)}</li>"
        for i, name in enumerate(names, 1)
    )
    return f'<ul class="key">{items}</ul>'


def _speeds(main: Sequence[TextResult], result: BenchResult) -> str:
    totals = [t for t in main if t.kind == ALL]
    if not totals:
        return ""
    rows = []
    for t in totals:
        text = f"{t.tok_s.median:.1f} tok/s"
        limit: tuple[float, str] | None = None
        if t.depth != 0:
            limit = (t.limit_tok_s, f"with free drafts: {t.limit_tok_s:.1f} tok/s")
            text += f", limit {t.limit_tok_s:.1f}"
        label = _depth_label(t.depth)
        part = Part(t.tok_s.median, "f1", label)
        rows.append(Row(label, text, [part], (t.tok_s.low, t.tok_s.high), limit))
    for server in result.servers:
        if not server.tok_s:
            continue
        factor = f", MTPLlama {server.times.median:.2f} ×" if server.times else ""
        rows.append(
            Row(
                f"{server.name}, {_depth_label(server.depth)}",
                f"{server.tok_s.median:.1f} tok/s{factor}",
                [Part(server.tok_s.median, "f2", server.version)],
                (server.tok_s.low, server.tok_s.high),
            )
        )
    plain = next((t.tok_s.median for t in totals if t.depth == 0), None)
    line = None if plain is None else (plain, f"no drafting: {plain:.1f} tok/s")
    return _section(
        "Speed by depth",
        "Tokens per second over all texts. The solid mark is the limit: the speed of the depth if "
        "drafts cost nothing. The dashed line is no drafting."
        + (_COMPARISON if any(s.times for s in result.servers) else "")
        + "".join(f" {sentence}" for sentence in library_notes(result)),
        _figure(bars("speed", "Tokens per second by depth, with the limit", rows, line)),
        _key(["MTPLlama", "llama-server"]) if result.servers else "",
    )


def _limits(analysis: Analysis | None) -> str:
    if not analysis:
        return ""
    labels = {
        "verification": "a batch at the cost of one token",
        "drafting": "free drafts",
        "acceptance": "all drafts accepted",
    }
    rows = [
        Row(
            labels[name],
            f"{times - 1:.0%} faster" if times > 1 else "not faster",
            [Part(max(times - 1, 0.0), f"f{i}", name)],
        )
        for i, (name, times) in enumerate(analysis.speedups.items(), 1)
    ]
    return _section(
        "The bottleneck",
        f"How much faster depth {analysis.best_drafting} would be if verification, drafting or "
        "rejected drafts cost nothing. The longest bar is the bottleneck.",
        _figure(bars("limits", "Speedup without one of the costs", rows)),
        _key(analysis.speedups),
    )


def _break_even(result: BenchResult, main: Sequence[TextResult]) -> str:
    if not result.cycles:
        return ""
    costs = result.cycles[0]
    one = costs.verify[0].median
    yields = {t.depth: t.tokens_per_cycle for t in main if t.kind == ALL}
    rows = []
    for depth, verify in enumerate(costs.verify):
        draft = costs.draft[depth - 1].median if depth and costs.draft else 0.0
        needed = (verify.median + draft) / one
        text = f"pays off from {needed:.2f} tokens" if depth else f"{one:.1f} ms"
        text += f", yields {yields[depth]:.2f}" if depth and depth in yields else ""
        rows.append(
            Row(
                (f"depth {depth}" if costs.draft else f"{depth} drafts") if depth else "one token",
                text,
                [
                    Part(verify.median, "f1", f"verify {depth + 1}: {verify.median:.2f} ms"),
                    Part(draft, "f2", f"draft {depth}: {draft:.2f} ms"),
                ],
            )
        )
    if costs.draft:
        title, parts = "Cost of each depth", ["verify", "draft"]
        text = (
            "A trunk batch of depth + 1 tokens and a chain of that many drafts. A depth pays off "
            "if a cycle yields more tokens than its cost in single tokens."
        )
    else:
        title, parts = "Cost of each batch", ["verify"]
        text = (
            "A trunk batch of a token and drafts from the text. It pays off if it yields more "
            "tokens than its cost in single tokens."
        )
    figure = bars("costs", f"{title}, in milliseconds", rows, (one, "1 token"))
    return _section(title, text, _figure(figure), _key(parts))


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    origins = {t.origin for s in samples for t in s.tokens}
    deepest = max(origins, default=0)
    names = '<li><span class="text-draft">the text</span></li>' if FROM_TEXT in origins else ""
    names += "".join(
        f'<li><span class="o{i}">draft {i}'
        f"{' and deeper' if i == _DEEPEST_STYLE < deepest else ''}</span></li>"
        for i in range(1, min(deepest, _DEEPEST_STYLE) + 1)
    )
    texts = "".join(
        f"<h3>{escape(s.kind)}</h3>"
        f'<div class="text" lang=""><span class="prompt">{escape(s.prompt)}</span>'
        f"{''.join(map(_token, s.tokens))}</div>"
        for s in samples
    )
    return _section(
        "The source of each token",
        f"Generated with {_depth_label(samples[0].depth)}. Underlined tokens are accepted drafts, "
        "plain ones were sampled from the trunk. A dotted line above marks a token that replaced a "
        "rejected draft: point at it, or move to it with the Tab key, to see the draft. Drafts "
        "from the text continue an earlier occurrence of the text's last tokens.",
        f'<ul class="key"><li>trunk</li>{names}</ul>'
        '<input type="checkbox" id="rejected"> '
        '<label for="rejected">show rejected drafts in the text</label><br>'
        '<input type="checkbox" id="numbers"> '
        '<label for="numbers">number the drafts</label>'
        '<p><a class="skip" href="#after-texts">skip the texts</a></p>'
        f'<div class="texts">{texts}</div><span id="after-texts" tabindex="-1"></span>',
    )


def _token(token: SampleToken) -> str:
    text = escape(token.text)
    if token.origin == FROM_TEXT:
        return f'<span class="text-draft" data-draft="t">{text}</span>'
    if origin := token.origin:
        style = f"o{min(origin, _DEEPEST_STYLE)}"
        return f'<span class="{style}" data-draft="{origin}">{text}</span>'
    if token.rejected is None:
        return text
    was = escape(token.rejected).replace("\n", "↵")
    return (
        f'<span class="wrong" tabindex="0" aria-label="{text}, instead of the draft {was}">'
        f'<span class="was">{was}</span>{text}</span>'
    )


def _deepest(main: Sequence[TextResult]) -> int:
    return max((int(t.depth) for t in main if isinstance(t.depth, int)), default=0)


def _acceptance(main: Sequence[TextResult]) -> str:
    deepest = _deepest(main)
    total = next((t for t in main if t.depth == deepest and t.kind == ALL), None)
    kinds = [t for t in main if t.depth == deepest and t.kind != ALL]
    if not deepest or total is None or not total.acceptance:
        return ""
    rows = []
    for i, share in enumerate(total.acceptance):
        by_kind = {t.kind: t.acceptance[i] for t in kinds if i < len(t.acceptance)}
        text = f"{share:.0%}"
        whisker = None
        if len(by_kind) > 1:
            lowest, highest = (
                min(by_kind, key=by_kind.__getitem__),
                max(by_kind, key=by_kind.__getitem__),
            )
            whisker = (by_kind[lowest], by_kind[highest])
            text += f" ({lowest} {by_kind[lowest]:.0%}, {highest} {by_kind[highest]:.0%})"
        rows.append(Row(f"draft {i + 1}", text, [Part(share, "f1")], whisker))
    return _section(
        "Acceptance by position",
        f"Share of accepted drafts by position in a chain of {deepest}, over all texts; drafts "
        "after a rejected one count as rejected. The whisker spans the kinds of text.",
        _figure(bars("acceptance", "Share of drafts accepted, by position", rows, (1.0, "all"))),
    )


def _cycle_parts(text: TextResult) -> tuple[float, ...]:
    """Milliseconds of the parts of a cycle, in the order of _CYCLE_PARTS."""
    return text.verify_ms, text.draft_ms, text.rollback_ms, text.rest_ms


def _time(main: Sequence[TextResult]) -> str:
    rows = []
    for t in main:
        if t.kind != ALL:
            continue
        parts = _cycle_parts(t)
        total = sum(parts)
        per_token = total / t.tokens_per_cycle if t.tokens_per_cycle else total
        rows.append(
            Row(
                _depth_label(t.depth),
                f"{total:.1f} ms for {t.tokens_per_cycle:.2f} tokens, {per_token:.1f} each",
                [
                    Part(ms, f"f{i}", f"{name}: {ms:.2f} ms")
                    for i, (name, ms) in enumerate(zip(_CYCLE_PARTS, parts, strict=True), 1)
                ],
            )
        )
    if not rows:
        return ""
    return _section(
        "Time of a cycle",
        "One cycle drafts, verifies the drafts with the trunk, and rolls the rejected ones back.",
        _figure(bars("time", "Milliseconds of one cycle by part", rows)),
        _key(_CYCLE_PARTS),
    )


def _contexts(texts: Sequence[TextResult], contexts: Sequence[int]) -> str:
    if len(contexts) < 2:
        return ""
    rows = [
        Row(
            f"{t.context} tokens before, " + (f"depth {t.depth}" if t.depth else "plain"),
            f"{t.tok_s.median:.1f} tok/s",
            [Part(t.tok_s.median, "f1" if t.depth else "f4")],
            (t.tok_s.low, t.tok_s.high),
        )
        for t in texts
        if t.kind == ALL
    ]
    return _section(
        "Context length",
        "Speed by the number of tokens before the prompts.",
        _figure(bars("contexts", "Tokens per second by length of context", rows)),
    )


def _sizes(result: BenchResult) -> str:
    coverage = result.coverage
    out = []
    if coverage:
        rows = [
            Row(f"{size:,} tokens", f"{share:.1%}", [Part(share, "f1")])
            for size, share in coverage.items()
        ]
        out.append(
            _figure(
                bars(
                    "coverage",
                    "Share of the text that a draft vocabulary covers",
                    rows,
                    (1.0, "all"),
                ),
                "Share of the tokens of these texts that the first rows of the draft vocabulary "
                "contain. Other tokens cannot be drafted.",
            )
        )
    sized = [t for t in result.sizes if t.kind == ALL]
    if len(sized) > 1:
        depth = sized[0].depth
        rows = [
            Row(
                f"{t.rows:,} rows" + ("" if t.fastmtp_size else ", the default"),
                f"{t.tok_s.median:.1f} tok/s, drafts {t.draft_ms:.1f} ms",
                [Part(t.tok_s.median, "f3")],
                (t.tok_s.low, t.tok_s.high),
            )
            for t in sorted(sized, key=lambda t: t.rows)
        ]
        out.append(
            _figure(
                bars("sizes", f"Tokens per second at depth {depth} by rows of the head", rows),
                f"Speed at depth {depth} by the size of the draft vocabulary.",
            )
        )
    if not out:
        return ""
    text = "A smaller draft vocabulary makes drafts cheaper and covers fewer tokens."
    return _section("Draft vocabulary (FastMTP)", text, *out)


def _numbers(result: BenchResult) -> str:
    tables = []
    for costs in result.cycles:
        n = len(costs.verify)
        rows = []
        for name, parts in (("trunk batch", costs.verify), ("drafts", costs.draft)):
            if parts:
                rows += [
                    [name, *(f"{c.median:.2f}" for c in parts)],
                    ["± half the interquartile range", *(f"{c.half_range:.2f}" for c in parts)],
                ]
        if costs.draft:
            rollback = costs.rollback
            rows.append(["rollback", f"{rollback.median:.3f} ± {rollback.half_range:.3f}"])
        title = f"Milliseconds after {costs.context} tokens"
        tables.append(_table(title, ["tokens", *map(str, range(1, n + 1))], rows))
    tables.append(
        _table(
            "Texts",
            [
                "kind",
                "context",
                "rows",
                "depth",
                "tok/s",
                "±",
                "tokens per cycle",
                "limit",
                *(f"{name}, ms" for name in _CYCLE_PARTS),
                "from text",
                "accepted",
            ],
            [
                [
                    t.kind,
                    str(t.context),
                    str(t.rows),
                    str(t.depth),
                    f"{t.tok_s.median:.1f}",
                    f"{t.tok_s.half_range:.1f}",
                    f"{t.tokens_per_cycle:.2f}",
                    f"{t.limit_tok_s:.1f}",
                    *(f"{ms:.2f}" for ms in _cycle_parts(t)),
                    f"{t.text_share:.0%}",
                    " ".join(f"{a:.0%}" for a in t.acceptance),
                ]
                for t in (*result.texts, *result.sizes)
            ],
        )
    )
    if compared := [s for s in result.servers if s.tok_s]:
        tables.append(_servers(compared))
    notes = "".join(
        f"<p>{escape(s.name)}, depth {s.depth}: {escape(s.note)}</p>"
        for s in result.servers
        if s.note
    )
    prefill = ""
    if p := result.prefill:
        prefill = (
            f"A prompt of {p.tokens} tokens: {p.plain.median:.0f} ± {p.plain.half_range:.0f} ms"
        )
        if p.trunk and p.head:
            both = p.trunk.median + p.head.median
            prefill += (
                f" without the head, {both:.0f} ± {p.trunk.half_range:.0f} ms with it, of which "
                f"{p.head.median:.1f} ms are the head's"
            )
        prefill = f"<p>{prefill}.</p>"
    sha256 = escape(result.model.sha256 or "not computed")
    digest = f'<p class="soft scroll">sha256 {sha256}, {result.model.size:,} bytes</p>'
    body = "".join([*tables, prefill, notes, digest])
    return (
        "<section><h2>All figures</h2><details><summary>Tables and checksum</summary>"
        f"{body}</details></section>"
    )


def _servers(servers: Sequence[ServerResult]) -> str:
    def cells(stats: Stats | None, form: str) -> list[str]:
        if stats is None:
            return ["", ""]
        return [format(stats.median, form), f"{stats.half_range:.2f}"]

    return _table(
        "llama-server, interleaved with MTPLlama at the same depth",
        ["server", "depth", "tok/s", "±", "MTPLlama", "±", "times as fast", "±", "accepted"],
        [
            [
                s.name,
                str(s.depth),
                *cells(s.tok_s, ".1f"),
                *cells(s.ours, ".1f"),
                *cells(s.times, ".2f"),
                "" if s.acceptance is None else f"{s.acceptance:.0%}",
            ]
            for s in servers
        ],
    )


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<h3>{escape(title)}</h3><div class="scroll" tabindex="0"><table><thead><tr>{top}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )
