"""The page: from the JSON of a bench to HTML. Text from models and files is escaped, always."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from mtp_gguf.gguf_tools.errors import RequestError

from .bars import Part, Row, bars

_FORMAT = 3  # bench/result.py
_ALL = "all"
_DEEPEST_STYLE = 5
_TIMES = (
    " Each llama-server took turns with our session at its depth; how many times as fast ours was "
    "stands beside it."
)
_FILLS = 5
_PARTS = {"verify_ms": "verify", "draft_ms": "draft", "rollback_ms": "undo", "rest_ms": "rest"}

# Fills 1 to 5: plain, rising lines, dots, falling lines, a grid; told apart without any color.
_PATTERNS = """<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>
<pattern id="p1" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" style="fill:var(--c1)"/></pattern>
<pattern id="p2" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" style="fill:var(--c2)"/><path d="M-2 2L2 -2M0 8L8 0M6 10L10 6" style="stroke:var(--ground);stroke-width:1.6"/></pattern>
<pattern id="p3" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" style="fill:var(--c3)"/><circle cx="3" cy="3" r="1.3" style="fill:var(--ground)"/></pattern>
<pattern id="p4" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" style="fill:var(--c4)"/><path d="M-2 6L2 10M0 0L8 8M6 -2L10 2" style="stroke:var(--ground);stroke-width:1.6"/></pattern>
<pattern id="p5" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" style="fill:var(--c5)"/><path d="M0 3H6M3 0V6" style="stroke:var(--ground);stroke-width:1"/></pattern>
</defs></svg>"""  # noqa: E501  (SVG)


def render_report(record: Mapping[str, Any]) -> str:
    """The whole HTML of a bench's JSON; RequestError when it is of another format."""
    if record.get("format") != _FORMAT:
        found = record.get("format")
        raise RequestError(f"format: expected a bench of format {_FORMAT}, found {found!r}")
    style = (resources.files(__package__) / "style.css").read_text(encoding="utf-8")
    texts: list[dict[str, Any]] = record["texts"]
    first = record["cycles"][0]["context"] if record["cycles"] else 0
    contexts = list(dict.fromkeys(t["context"] for t in texts))
    main = [t for t in texts if t["context"] == (contexts or [first])[0]]
    name = escape(record["model"]["file"])
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{name}: how it drafts</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{style}</style></head><body>{_PATTERNS}<main>",
        f"<h1>{name}: how it drafts here</h1>",
        _where(record),
        _state(record),
        _verdict(record.get("verdict")),
        _speeds(main, record),
        _prices(record.get("verdict")),
        _samples(record["samples"]),
        _acceptance(main),
        _time(main),
        _break_even(record, main),
        _contexts(texts, contexts),
        _sizes(record),
        _numbers(record),
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _where(record: Mapping[str, Any]) -> str:
    e = record["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
    words = [
        f"{e['cpu']}, {e['device']}, {_count(e['threads'], 'thread')}, {e['kernels']} kernels",
        versions,
        f"{_count(e['prompts'], 'prompt')} of each kind, answers of "
        f"{e['tokens']} tokens, {_count(e['rounds'], 'round')}",
        str(e["when"]),
    ]
    return f'<p class="soft">{escape("; ".join(words))}</p>'


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _state(record: Mapping[str, Any]) -> str:
    """What a bench lacks; nothing where it was measured in full."""
    of: dict[str, list[str]] = {}
    for part in record["plan"]:
        of.setdefault(part["state"], []).append(part["what"])
    said = []
    if record["state"] != "done" and "planned" in of:
        why = "This bench was stopped" if record["state"] == "stopped" else "This bench still runs"
        said.append(f"{why}; not measured: {'; '.join(of['planned'])}.")
    if short := of.get("fewer rounds"):
        said.append(f"Fewer rounds than planned: {'; '.join(short)}.")
    if left_out := of.get("left out"):
        said.append(f"There was no time for: {'; '.join(left_out)} (--budget, --full).")
    return "".join(f'<p class="note">{escape(text)}</p>' for text in said)


def _verdict(verdict: Mapping[str, Any] | None) -> str:
    if not verdict:
        return ""
    figures = [
        ("no drafting", f"{verdict['plain_tok_s']:.1f} tok/s"),
        (f"depth {verdict['best_drafting']}", f"{verdict['tok_s']:.1f} tok/s"),
        ("drafting is", f"{verdict['gain']:.2f} x"),
        ("of the limit, free drafts", f"{verdict['share_reached']:.0%}"),
    ]
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in figures)
    sentence = str(verdict["sentence"])
    said = escape(sentence[:1].upper() + sentence[1:])
    return f'<p class="verdict">{said}</p><dl class="figures">{cells}</dl>'


def _section(title: str, said: str, *content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(said)}</p>{''.join(content)}</section>"


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


def _speeds(main: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> str:
    whole = [t for t in main if t["kind"] == _ALL]
    if not whole:
        return ""
    rows = []
    for t in whole:
        speed = t["tok_s"]
        label = "no drafting" if t["depth"] == 0 else f"depth {t['depth']}"
        text = f"{speed['median']:.1f} tok/s"
        limit: tuple[float, str] | None = None
        if t["depth"] != 0:  # without drafts there are none to be had for free
            limit = (t["limit_tok_s"], f"free drafts: {t['limit_tok_s']:.1f} tok/s")
            text += f", limit {t['limit_tok_s']:.1f}"
        rows.append(
            Row(
                label,
                text,
                [Part(speed["median"], "f1", label)],
                (speed["low"], speed["high"]),
                limit,
            )
        )
    for server in record["servers"]:
        if not server["tok_s"]:
            continue
        speed = server["tok_s"]
        depth = f"depth {server['depth']}" if server["depth"] else "no drafting"
        rows.append(
            Row(
                f"{server['name']}, {depth}",
                f"{speed['median']:.1f} tok/s"
                + (f", ours {times['median']:.2f} ×" if (times := server["times"]) else ""),
                [Part(speed["median"], "f2", server["version"])],
                (speed["low"], speed["high"]),
            )
        )
    plain = next((t["tok_s"]["median"] for t in whole if t["depth"] == 0), None)
    line = None if plain is None else (plain, f"no drafting: {plain:.1f} tok/s")
    return _section(
        "Speed by depth",
        "Tokens per second over all texts. The solid mark is the limit: what the depth would give "
        "if drafts cost nothing. The dashed line is no drafting."
        + (_TIMES if any(s["times"] for s in record["servers"]) else ""),
        _figure(bars("speed", "Tokens per second by depth, with the limit", rows, line)),
        _key(["mtp-gguf", "llama-server"]) if record["servers"] else "",
    )


def _prices(verdict: Mapping[str, Any] | None) -> str:
    if not verdict:
        return ""
    said = {
        "verification": "a batch at the price of a token",
        "drafting": "drafts for nothing",
        "acceptance": "all drafts right",
    }
    rows = [
        Row(said[name], f"{times - 1:.0%} faster", [Part(times - 1, f"f{i}", name)])
        for i, (name, times) in enumerate(verdict["without"].items(), 1)
    ]
    return _section(
        "What holds it back",
        f"How much faster depth {verdict['best_drafting']} would be without the price of "
        "verification, of drafting, of wrong drafts. The longest bar is where most can be won.",
        _figure(bars("prices", "How much faster without one of the prices", rows)),
        _key(verdict["without"]),
    )


def _break_even(record: Mapping[str, Any], main: Sequence[Mapping[str, Any]]) -> str:
    if not record["cycles"]:
        return ""
    costs = record["cycles"][0]
    one = costs["verify"][0]["median"]
    given = {t["depth"]: t["tokens_per_cycle"] for t in main if t["kind"] == _ALL}
    rows = []
    for depth, verify in enumerate(costs["verify"]):
        draft = costs["draft"][depth - 1]["median"] if depth else 0.0
        needs = (verify["median"] + draft) / one
        text = f"pays from {needs:.2f} tokens" if depth else f"{one:.1f} ms"
        text += f", gives {given[depth]:.2f}" if depth and depth in given else ""
        rows.append(
            Row(
                f"depth {depth}" if depth else "one token",
                text,
                [
                    Part(verify["median"], "f1", f"verify {depth + 1}: {verify['median']:.2f} ms"),
                    Part(draft, "f2", f"draft {depth}: {draft:.2f} ms"),
                ],
            )
        )
    return _section(
        "What depth costs",
        "A batch of one token more than the depth, and its chain of drafts. A depth pays where its "
        "cycle gives more tokens than it costs times one token.",
        _figure(
            bars("costs", "Milliseconds of a batch and a chain by depth", rows, (one, "1 token"))
        ),
        _key(["verify", "draft"]),
    )


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return ""
    deepest = max((t["origin"] for s in samples for t in s["tokens"]), default=0)
    names = "".join(
        f'<li><span class="o{i}">draft {i}'
        f"{' and deeper' if i == _DEEPEST_STYLE < deepest else ''}</span></li>"
        for i in range(1, min(deepest, _DEEPEST_STYLE) + 1)
    )
    texts = "".join(
        f"<h3>{escape(s['kind'])}</h3>"
        f'<div class="text" lang=""><span class="prompt">{escape(s["prompt"])}</span>'
        f"{''.join(map(_token, s['tokens']))}</div>"
        for s in samples
    )
    return _section(
        "Who wrote each token",
        f"Written at depth {samples[0]['depth']}. Plain tokens are the trunk's own; underlined "
        "ones were drafted and accepted. Where a draft was wrong, the trunk's token has a "
        "dotted line above: point at it or go there with the Tab key to see the draft.",
        f'<ul class="key"><li>trunk</li>{names}</ul>'
        '<input type="checkbox" id="rejected"> '
        '<label for="rejected">show rejected drafts in the text</label><br>'
        '<input type="checkbox" id="numbers"> '
        '<label for="numbers">number the drafts</label>'
        '<p><a class="skip" href="#after-texts">go on behind the texts</a></p>'
        f'<div class="texts">{texts}</div><span id="after-texts" tabindex="-1"></span>',
    )


def _token(token: Mapping[str, Any]) -> str:
    text = escape(token["text"])
    if origin := token["origin"]:
        style = f"o{min(origin, _DEEPEST_STYLE)}"
        return f'<span class="{style}" data-draft="{origin}">{text}</span>'
    if token["rejected"] is None:
        return text
    was = escape(token["rejected"]).replace("\n", "↵")
    return (
        f'<span class="wrong" tabindex="0" aria-label="{text}, instead of the draft {was}">'
        f'<span class="was">{was}</span>{text}</span>'
    )


def _deepest(main: Sequence[Mapping[str, Any]]) -> int:
    return max((int(t["depth"]) for t in main if t["depth"] != "auto"), default=0)


def _acceptance(main: Sequence[Mapping[str, Any]]) -> str:
    deepest = _deepest(main)
    kinds = [t for t in main if t["depth"] == deepest and t["kind"] != _ALL]
    if not deepest or not kinds:
        return ""
    rows = [
        Row(
            f"draft {i + 1}, {t['kind']}",
            f"{t['acceptance'][i]:.0%}",
            [Part(t["acceptance"][i], f"f{k % _FILLS + 1}")],
        )
        for i in range(deepest)
        for k, t in enumerate(kinds)
        if i < len(t["acceptance"])
    ]
    return _section(
        "Acceptance by position",
        f"How often draft 1, 2, … of a chain of {deepest} was accepted, all drafts counted, those "
        "that stood behind a wrong one too.",
        _figure(bars("acceptance", "Share of drafts accepted, by position", rows, (1.0, "all"))),
        _key([t["kind"] for t in kinds][:_FILLS]),
    )


def _time(main: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for t in main:
        if t["kind"] != _ALL:
            continue
        total = sum(t[key] for key in _PARTS)
        label = "no drafting" if t["depth"] == 0 else f"depth {t['depth']}"
        per_token = total / t["tokens_per_cycle"] if t["tokens_per_cycle"] else total
        rows.append(
            Row(
                label,
                f"{total:.1f} ms for {t['tokens_per_cycle']:.2f} tokens, {per_token:.1f} each",
                [
                    Part(t[key], f"f{i}", f"{name}: {t[key]:.2f} ms")
                    for i, (key, name) in enumerate(_PARTS.items(), 1)
                ],
            )
        )
    if not rows:
        return ""
    return _section(
        "Where a cycle's time goes",
        "One cycle: drafting, verifying the drafts with the trunk, undoing what was wrong.",
        _figure(bars("time", "Milliseconds of one cycle by part", rows)),
        _key(_PARTS.values()),
    )


def _contexts(texts: Sequence[Mapping[str, Any]], contexts: Sequence[int]) -> str:
    if len(contexts) < 2:
        return ""
    rows = [
        Row(
            f"{t['context']} tokens before, " + (f"depth {t['depth']}" if t["depth"] else "plain"),
            f"{t['tok_s']['median']:.1f} tok/s",
            [Part(t["tok_s"]["median"], "f1" if t["depth"] else "f4")],
            (t["tok_s"]["low"], t["tok_s"]["high"]),
        )
        for t in texts
        if t["kind"] == _ALL
    ]
    return _section(
        "Context length",
        "Speed with more and more text before the prompts.",
        _figure(bars("contexts", "Tokens per second by length of context", rows)),
    )


def _sizes(record: Mapping[str, Any]) -> str:
    coverage: Mapping[str, float] = record["coverage"]
    out = []
    if coverage:
        rows = [
            Row(f"{int(size):,} tokens", f"{share:.1%}", [Part(share, "f1")])
            for size, share in coverage.items()
        ]
        out.append(
            _figure(
                bars("coverage", "Share of the text that a list covers", rows, (1.0, "all")),
                "Share of the tokens of these texts that the first rows of the list have: no draft "
                "of another token can be right.",
            )
        )
    sized = [t for t in record["sizes"] if t["kind"] == _ALL]
    if len(sized) > 1:
        depth = sized[0]["depth"]
        rows = [
            Row(
                f"{t['rows']:,} rows" + ("" if t["fastmtp_size"] else ", the default"),
                f"{t['tok_s']['median']:.1f} tok/s, drafts {t['draft_ms']:.1f} ms",
                [Part(t["tok_s"]["median"], "f3")],
                (t["tok_s"]["low"], t["tok_s"]["high"]),
            )
            for t in sorted(sized, key=lambda t: t["rows"])
        ]
        out.append(
            _figure(
                bars("sizes", f"Tokens per second at depth {depth} by rows of the head", rows),
                f"Speed at depth {depth} by the size of the draft vocabulary.",
            )
        )
    if not out:
        return ""
    said = "A shorter list makes drafts cheaper and leaves more tokens out."
    return _section("Draft vocabulary (FastMTP)", said, *out)


def _numbers(record: Mapping[str, Any]) -> str:
    tables = []
    for costs in record["cycles"]:
        n = len(costs["verify"])
        tables.append(
            _table(
                f"Milliseconds after {costs['context']} tokens",
                ["tokens", *map(str, range(1, n + 1))],
                [
                    ["trunk batch", *(f"{c['median']:.2f}" for c in costs["verify"])],
                    ["± quarter points", *(f"{_apart(c):.2f}" for c in costs["verify"])],
                    ["drafts", *(f"{c['median']:.2f}" for c in costs["draft"])],
                    ["± quarter points", *(f"{_apart(c):.2f}" for c in costs["draft"])],
                    [
                        "rollback",
                        f"{costs['rollback']['median']:.3f} ± {_apart(costs['rollback']):.3f}",
                    ],
                ],
            )
        )
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
                "tokens a cycle",
                "limit",
                *(f"{name}, ms" for name in _PARTS.values()),
                "accepted",
            ],
            [
                [
                    t["kind"],
                    str(t["context"]),
                    str(t["rows"]),
                    str(t["depth"]),
                    f"{t['tok_s']['median']:.1f}",
                    f"{_apart(t['tok_s']):.1f}",
                    f"{t['tokens_per_cycle']:.2f}",
                    f"{t['limit_tok_s']:.1f}",
                    *(f"{t[key]:.2f}" for key in _PARTS),
                    " ".join(f"{a:.0%}" for a in t["acceptance"]),
                ]
                for t in (*record["texts"], *record["sizes"])
            ],
        )
    )
    if compared := [s for s in record["servers"] if s["tok_s"]]:
        tables.append(_servers(compared))
    notes = [s for s in record["servers"] if s["note"]]
    said = "".join(
        f"<p>{escape(s['name'])}, depth {s['depth']}: {escape(s['note'])}</p>" for s in notes
    )
    p = record["prefill"]
    head = (
        ""
        if p is None
        else (
            f"<p>A prompt of {p['tokens']} tokens: {p['plain']['median']:.0f} ± "
            f"{_apart(p['plain']):.0f} ms without the head, "
            f"{p['trunk']['median'] + p['head']['median']:.0f} ± {_apart(p['trunk']):.0f} ms with "
            f"it, of which {p['head']['median']:.1f} ms are the head's.</p>"
        )
    )
    digest = escape(str(record["model"]["sha256"] or "not worked out"))
    proof = f'<p class="soft scroll">sha256 {digest}, {record["model"]["size"]:,} bytes</p>'
    body = "".join([*tables, head, said, proof])
    return (
        "<section><h2>The numbers</h2><details><summary>Tables, and what was measured</summary>"
        f"{body}</details></section>"
    )


def _servers(servers: Sequence[Mapping[str, Any]]) -> str:
    def both(spread: Mapping[str, float] | None, form: str) -> list[str]:
        return (
            ["", ""]
            if spread is None
            else [format(spread["median"], form), f"{_apart(spread):.2f}"]
        )

    return _table(
        "llama-server, in turn with our session at the same depth",
        ["server", "depth", "tok/s", "±", "ours", "±", "times as fast", "±", "accepted"],
        [
            [
                s["name"],
                str(s["depth"]),
                *both(s["tok_s"], ".1f"),
                *both(s["ours"], ".1f"),
                *both(s["times"], ".2f"),
                "" if s["acceptance"] is None else f"{s['acceptance']:.0%}",
            ]
            for s in servers
        ],
    )


def _apart(spread: Mapping[str, float]) -> float:
    return (spread["high"] - spread["low"]) / 2


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<h3>{escape(title)}</h3><div class="scroll" tabindex="0"><table><thead><tr>{top}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )
