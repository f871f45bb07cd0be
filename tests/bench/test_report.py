"""The HTML report: its content, and its rendering in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.bench.report.page import render_report
from mtp_gguf.bench.result import ALL, PlannedPart, library_notes
from mtp_gguf.cli.bench_table import bench_table, markdown
from support import bench_records as records
from support.browser import Browser

PAGE = render_report(records.result())
_VOID = {"meta", "input", "br"}


class _Balanced(HTMLParser):
    """Every element is closed where it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_one_file_that_asks_for_nothing() -> None:
    parser = _Balanced()
    parser.feed(PAGE)
    assert not parser.open
    assert not {"script", "link", "img", "iframe", "object", "base"} & parser.seen
    assert not re.search(r"(?i)https?:|//[a-z]|@import|\bsrc=|\bhref=(?!\"#)", PAGE)
    assert set(re.findall(r"url\(([^)]*)\)", PAGE)) == {f"#p{i}" for i in range(1, 6)}
    assert len(PAGE) < 60_000


def test_text_from_outside_is_escaped() -> None:
    assert records.HOSTILE not in PAGE
    assert PAGE.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 10


def test_figures_and_the_time_stay_in_one_line() -> None:
    """A space between a number and its unit, or a hyphen of a date, is no place for a break."""
    cards = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", PAGE))
    analysis = records.result().analysis
    assert analysis
    assert cards[f"speedup of depth {analysis.best_drafting}"] == f"{analysis.gain:.2f}\u00a0×"
    assert all(re.fullmatch(r"[\d.]+(%|\u00a0\S+)(, [\d.]+\u00a0×)?", v) for v in cards.values())
    assert f"<time>{records.result().environment.when}</time>" in PAGE
    assert "time { white-space: nowrap; }" in PAGE


def test_other_libraries_on_both_sides_are_said() -> None:
    """In the page and in the terminal; not if both sides run the same ones."""
    whole = records.result()
    kernels = whole.environment.kernels
    for others, said in ((kernels, False), ("other", True)):
        servers = tuple(replace(server, kernels=others) for server in whole.servers)
        result = replace(whole, servers=servers)
        note = f"llama-server runs other kernels and MTPLlama {kernels} kernels"
        assert (note in render_report(result)) is said
        assert [note in line for line in library_notes(result)] == [True] * said


def test_a_cost_that_was_noise_is_no_negative_speedup() -> None:
    whole = records.result()
    assert whole.analysis
    analysis = replace(whole.analysis, speedups={**whole.analysis.speedups, "drafting": 0.94})
    page = render_report(replace(whole, analysis=analysis))
    assert "not faster" in page
    assert "-6%" not in page


def test_warnings_are_in_the_report_the_table_and_the_json() -> None:
    warning = f"other programs used {records.HOSTILE} of 2 processors"
    result = replace(records.result(), warnings=(warning,))
    shown = escape(warning[:1].upper() + warning[1:])
    assert f'<p class="note">{shown}.</p>' in render_report(result)
    assert f"warning: {warning}" in [*bench_table(replace(result, texts=()))]
    assert result.to_json()["warnings"] == (warning,)


def test_parts_without_data_are_left_out() -> None:
    bare = replace(
        records.result(),
        analysis=None,
        texts=(),
        servers=(),
        sizes=(),
        cycles=(),
        prefill=None,
        coverage={},
        samples=(),
    )
    page = render_report(bare)
    for heading in (
        "Cost of each depth",
        "The bottleneck",
        "A prompt of",
        "Speed by depth",
        "The source of each token",
        "Acceptance",
        "FastMTP",
        "Context length",
    ):
        assert heading in PAGE
        assert heading not in page


# What a browser is asked: boxes, colors and text of what it has drawn.
_MEASURE = """(() => {
  const box = (e) => { const b = e.getBoundingClientRect();
    return {left: b.left, right: b.right, width: b.width, height: b.height}; };
  const all = (s) => [...document.querySelectorAll(s)];
  const style = (e, k) => getComputedStyle(e)[k];
  const wrong = all(".wrong");
  const was = wrong[0].querySelector(".was");
  document.querySelectorAll("details").forEach((d) => d.open = true);
  return {
    width: innerWidth,
    page: document.documentElement.scrollWidth,
    charts: Object.fromEntries(all(".chart").map((c) => [c.id, {...box(c),
      bars: [...c.querySelectorAll(".bar")].map(box),
      tracks: [...c.querySelectorAll(".track")].map(box),
      whiskers: [...c.querySelectorAll(".whisker")].map(box),
      lines: [...c.querySelectorAll(".line")].map(box),
      marks: [...c.querySelectorAll(".mark")].map(box),
      labels: [...c.querySelectorAll(".label")].map((e) => ({...box(e), text: e.textContent})),
      values: [...c.querySelectorAll(".value")].map((e) => ({...box(e), text: e.textContent})),
      fills: [...new Set([...c.querySelectorAll(".bar")].map((e) => style(e, "fill")))],
    }])),
    origins: all(".texts [class^=o]").map((e) => [e.className, e.textContent,
      style(e, "color"), style(e, "textDecorationStyle")]),
    keys: all(".key").map((k) => [...k.querySelectorAll("li")].map((e) => e.textContent)),
    keyFills: all(".key").map((k) => [...k.querySelectorAll("rect")].map((e) => style(e, "fill"))),
    barFills: Object.fromEntries(all(".chart").map((c) => [c.id,
      [...c.querySelectorAll(".bar")].map((e) => style(e, "fill"))])),
    wrong: wrong.length, before: style(was, "display"),
    ground: style(document.body, "backgroundColor"), ink: style(document.body, "color"),
    small: Math.min(...all("main *").map((e) => parseFloat(style(e, "fontSize")))),
  };
})()"""

Look = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "report.html").write_text(PAGE, "utf-8")
    return tmp_path / "report.html"


@pytest.fixture
def look(browser: Any, page: Path) -> Look:
    """Opens the page in a headless browser of a width and gives what was measured there."""

    def measured(width: int, **media: str) -> dict[str, Any]:
        browser.open(page, width, **media)
        seen: dict[str, Any] = browser.js(_MEASURE)
        return seen

    return measured


@pytest.mark.parametrize("width", [1280, 390])
def test_drawn_in_a_browser(look: Look, width: int) -> None:
    seen = look(width)
    assert seen["width"] == width
    assert seen["page"] <= width, "the page scrolls sideways"
    assert seen["small"] >= 11
    charts = seen["charts"]
    names = {"speed", "limits", "acceptance", "time", "costs", "contexts", "coverage", "sizes"}
    assert names == set(charts)
    for chart in charts.values():
        # All is drawn, inside the page, and no label runs into its value.
        assert chart["height"] > 0
        assert all(bar["width"] > 0 for bar in chart["bars"] if bar["height"])
        for part in ("bars", "marks", "labels", "values"):
            assert all(box["left"] >= -1 and box["right"] <= width + 1 for box in chart[part])
        for label, value in zip(chart["labels"], chart["values"], strict=True):
            assert label["right"] < value["left"], (label["text"], value["text"])
    speed = charts["speed"]
    # Lengths are the numbers': 48, 50, 61, 57 tokens per second, limits at 1.2 times that.
    assert speed["bars"][0]["width"] / speed["bars"][2]["width"] == pytest.approx(48 / 61, 0.01)
    track = speed["tracks"][0]
    assert speed["bars"][2]["right"] < speed["marks"][1]["left"] + 2 <= track["right"] + 2
    # depths 0 to 3, "auto" and one server: the limits are those of our drafts alone
    assert len(speed["marks"]) == 4
    assert len(speed["bars"]) == 6
    # The limit of a depth stands where 1.2 times its speed is.
    for bar, mark in zip(speed["bars"][1:4], speed["marks"][:3], strict=True):
        drawn = (mark["left"] + mark["width"] / 2 - bar["left"]) / bar["width"]
        assert drawn == pytest.approx(1.2, 0.02)
    # 81, 64 and 47 % of all drafts were accepted by position; whiskers span the kinds of text.
    acceptance = charts["acceptance"]
    kinds = ("chat 71%, code 91%", "chat 60%, code 70%", "chat 40%, code 50%")
    shares = (0.81, 0.64, 0.47)
    expected = [f"{share:.0%} ({kind})" for share, kind in zip(shares, kinds, strict=True)]
    assert [value["text"] for value in acceptance["values"]] == expected
    for bar, share in zip(acceptance["bars"], shares, strict=True):
        assert bar["width"] / acceptance["tracks"][0]["width"] == pytest.approx(share, 0.02)
    assert acceptance["whiskers"][0]["left"] < acceptance["bars"][0]["right"]
    assert acceptance["whiskers"][0]["right"] > acceptance["bars"][0]["right"]
    # Depth 2: 38 ms of verification, 4 of drafting, 0.1 of rollback, 0.4 of the rest.
    time = charts["time"]
    assert time["values"][2]["text"] == "42.5 ms for 2.40 tokens, 17.7 each"
    verify, draft = time["bars"][2 + 4 : 2 + 6]
    assert verify["width"] / draft["width"] == pytest.approx(38 / 4, 0.02)
    # Depth 2 costs 38 + 4 ms where a token costs 20: it must give 2.1 tokens, and gives 2.4.
    costs = charts["costs"]
    assert costs["values"][0]["text"] == "20.0 ms"
    assert costs["values"][2]["text"] == "pays off from 2.10 tokens, yields 2.40"
    assert costs["values"][8]["text"] == "pays off from 5.40 tokens"
    verify, draft = costs["bars"][1 + 2 : 1 + 4]
    assert verify["width"] / draft["width"] == pytest.approx(38 / 4, 0.02)
    prices = charts["limits"]
    assert [v["text"] for v in prices["values"]] == ["31% faster", "12% faster", "25% faster"]
    widths = [bar["width"] for bar in prices["bars"]]
    assert [w / widths[0] for w in widths] == pytest.approx([1, 12 / 31, 25 / 31], 0.02)
    # The longest bar wears the first pattern, and the key names it so.
    assert seen["keys"][1] == ["verification", "drafting", "acceptance"]
    for chart_name in ("speed", "sizes", "contexts"):
        for bar, whisker in zip(
            charts[chart_name]["bars"], charts[chart_name]["whiskers"], strict=True
        ):
            assert whisker["left"] == pytest.approx(bar["left"] + 0.97 * bar["width"], abs=2)
            assert whisker["right"] == pytest.approx(bar["left"] + 1.02 * bar["width"], abs=2)
    coverage = charts["coverage"]
    widths = [bar["width"] for bar in coverage["bars"]]
    assert widths[0] / widths[1] == pytest.approx(0.81 / 0.993, 0.02)
    assert len(charts["time"]["fills"]) == 4
    assert all("url" in fill for fill in charts["time"]["fills"]), "a pattern, not a hue alone"


def test_tokens_show_their_source(look: Look) -> None:
    seen = look(800)
    by_class = {name: (text, color, line) for name, text, color, line in seen["origins"]}
    assert by_class["o1"][0] == records.HOSTILE
    assert by_class["o2"][0] == "(left"
    assert len({color for _, color, _ in by_class.values()}) == 3
    assert len({line for _, _, line in by_class.values()}) == 3, "told apart without color"
    assert (seen["wrong"], seen["before"]) == (2, "none")


def test_light_and_dark(look: Look) -> None:
    def brightness(color: str) -> float:
        return sum(map(float, re.findall(r"[\d.]+", color)[:3])) / 3

    light = look(800)
    dark = look(800, prefers_color_scheme="dark")
    assert brightness(light["ground"]) > 200
    assert brightness(light["ink"]) < 100
    assert brightness(dark["ground"]) < 60
    assert brightness(dark["ink"]) > 200


def test_the_table_of_servers() -> None:
    """Each median is followed by half the distance of its quartiles."""
    cells = ["llama-server", "2", "38.2", "0.96", "60.0", "1.50", "1.57", "0.04", "70%"]
    assert "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" in PAGE
    assert "38.2 tok/s, MTPLlama 1.57 ×" in PAGE


def test_missing_parts_are_named() -> None:
    assert "Skipped to fit the budget: llama-server: depth 3" in PAGE
    assert "This benchmark" not in PAGE
    parts = (PlannedPart("texts", 1.0, "planned"), PlannedPart("costs", 1.0, "fewer rounds"))
    for state, words in (("running", "is still running"), ("stopped", "was stopped")):
        page = render_report(replace(records.result(), state=state, plan=parts))
        assert f"This benchmark {words}; not measured: texts." in page
        assert "Fewer rounds than planned: costs." in page
        assert "Skipped to fit" not in page


def test_keys_name_the_patterns_that_bars_wear(look: Look) -> None:
    """Swapped patterns would make every chart wrong."""
    seen = look(800)
    patterns = [f'url("#p{i}")' for i in range(1, 6)]
    for fills in seen["keyFills"]:
        assert fills == patterns[: len(fills)]
    # verify, draft, rollback, rest of each depth, in the order of the key; depth 0 has two of them
    assert seen["barFills"]["time"][2:6] == patterns[:4]
    assert seen["barFills"]["costs"][1:3] == patterns[:2]
    assert seen["barFills"]["speed"] == [patterns[0]] * 5 + [patterns[1]]
    assert seen["barFills"]["acceptance"] == [patterns[0]] * 3
    assert seen["barFills"]["contexts"][:2] == [patterns[3], patterns[0]]


def _focus(browser: Any) -> str:
    """Where the keyboard is: an id, else a class, else the element's name."""
    at: str = browser.js(
        "(e => e.id || e.className || e.tagName.toLowerCase())(document.activeElement)"
    )
    return at


@pytest.mark.parametrize("width", [1280, 390])
def test_by_keyboard(browser: Any, page: Path, width: int) -> None:
    browser.open(page, width)
    shown = 'getComputedStyle(document.querySelector(".was")).display'
    numbers = 'getComputedStyle(document.querySelector("[data-draft]"), "::before").content'
    browser.press("Tab")
    assert _focus(browser) == "rejected"
    assert browser.js(shown) == "none"
    browser.press(" ")
    assert browser.js(shown) == "inline"
    browser.press(" ")
    browser.press("Tab")
    assert _focus(browser) == "numbers"
    assert browser.js(numbers) == "none"
    browser.press(" ")
    assert browser.js(numbers) == '"1"'
    browser.press(" ")
    browser.press("Tab")
    assert _focus(browser) == "skip"
    # Each token that a draft was wrong at, with the draft beside it, where it can be seen.
    for i in range(2):
        browser.press("Tab")
        assert _focus(browser) == "wrong"
        assert (
            browser.js("[...document.querySelectorAll('.wrong')].indexOf(document.activeElement)")
            == i
        )
        ring = browser.js(
            "(s => [s.outlineStyle, s.outlineWidth])(getComputedStyle(document.activeElement))"
        )
        assert ring == ["solid", "3px"]
        left, right, top = browser.js(
            "(b => [b.left, b.right, b.top])"
            "(document.activeElement.querySelector('.was').getBoundingClientRect())"
        )
        assert 0 <= left < right <= width
        assert top >= 0
    browser.press("Tab")
    assert _focus(browser) == "summary"
    assert not browser.js('document.querySelector("details").open')
    browser.press("Enter")
    assert browser.js('document.querySelector("details").open')
    browser.press("Tab")
    assert _focus(browser) == "scroll"  # a table wider than the page is moved by arrows
    # Past the texts in one go.
    browser.open(page, width)
    for _ in range(3):
        browser.press("Tab")
    browser.press("Enter")
    browser.press("Tab")
    assert _focus(browser) == "summary"


def test_without_color(browser: Any, page: Path) -> None:
    """In two colors of the reader's own every fill and every kind of token still looks its own."""
    browser.open(page, 800, forced_colors="active", prefers_color_scheme="dark")
    white = "rgb(255, 255, 255)"
    style = "getComputedStyle(document.querySelector('{}'))['{}']"
    assert browser.js(style.format("#p2 rect", "fill")) == white
    assert browser.js(style.format(".chart text", "fill")) == white
    assert browser.js(style.format("body", "backgroundColor")) == "rgb(0, 0, 0)"
    # Each alone in one and the same place, on pictures whose bytes then differ by its look alone.
    browser.js(
        """document.body.innerHTML = document.querySelector("svg").outerHTML
           + [1,2,3,4,5].map((i) => `<svg><rect width=40 height=24 class=f${i} />`).join("</svg>")
           + "</svg>"
           + [1, 2, 3, 4, 5].map((i) => `<span class=o${i}>abc</span>`).join("")
           + "<span class=plain>abc</span><span class=wrong>abc</span>";
           for (const e of document.querySelectorAll("body > svg:not([aria-hidden]), span"))
             e.style.cssText = "position:fixed; left:20px; top:20px; visibility:hidden";"""
    )
    seen = []
    for i in range(12):
        browser.js(
            'document.querySelectorAll("body > svg:not([aria-hidden]), span")'
            f'.forEach((e, at) => e.style.visibility = at === {i} ? "visible" : "hidden")'
        )
        seen.append(browser.picture())
    assert len(set(seen)) == 12


def test_each_setting_beside_no_drafting() -> None:
    result = replace(records.result(), peak_bytes=1_234_000_000)
    pairs = result.to_json()["pairs"]
    drafted = [t for t in result.texts if t.depth != 0]
    assert [(p["kind"], p["context"], p["depth"]) for p in pairs] == [
        (t.kind, t.context, t.depth) for t in drafted
    ]
    assert {(p["context"], p["plain_tok_s"]) for p in pairs} == {(0, 48.0), (4096, 24.0)}
    assert all(p["ratio"] == p["tok_s"] / p["plain_tok_s"] for p in pairs)
    without_plain = replace(result, texts=tuple(drafted))
    assert without_plain.to_json()["pairs"] == []

    head, _, columns, rule, *rows = markdown(result)
    assert "708 MB" in head
    assert "1.23 GB of memory" in head
    assert "llama-cpp-python 0.3.36, stock kernels, Linux x86\\_64" in head
    assert len(rows) == len(pairs)
    bars = columns.count("|")
    assert all(re.sub(r"\\.", "", line).count("|") == bars for line in (rule, *rows))
    assert "| all | 0 | 2 | 48.0 | 61.0 | 1.27 | 81% 64% | 2.40 |" in rows
    assert not any("<script" in re.sub(r"\\.", "", line) for line in (head, *rows))


def test_markdown_of_hostile_names() -> None:
    result = records.result()
    texts = tuple(replace(t, kind="a|b\n\\|*c*") for t in result.texts if t.kind == ALL)
    _, _, columns, _, *rows = markdown(replace(result, texts=texts))
    for row in rows:
        assert re.sub(r"\\.", "", row).count("|") == columns.count("|")
        assert "\n" not in row
