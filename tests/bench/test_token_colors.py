"""Colored tokens: styles, the table of sources, and characters split across tokens."""

from __future__ import annotations

import colorsys
import io
import re
from importlib import resources

import pytest

from mtp_gguf.cli import token_colors
from mtp_gguf.cli.token_colors import COLORS, RESET, TokenText, style, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def strip(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_each_origin_has_its_own_style() -> None:
    styles = [style(i) for i in range(7)]
    assert styles[0] == ""
    assert len(set(styles)) == 6  # the fifth and all deeper drafts share one
    assert all(s.startswith("\x1b[4;") for s in styles[1:])


def test_text_is_what_was_written() -> None:
    pieces = [(b"def", 0), (b" f(", 1), (b"x):\n    ", 2), (b"\xf0\x9f", 1), (b"\x98\x80", 2)]
    for colored in (False, True):
        text = TokenText(colored=colored, terminal=colored)
        shown = "".join(text.add(*piece) for piece in pieces) + text.end()
        assert strip(shown) == "def f(x):\n    😀"
        assert (shown != strip(shown)) == colored


def test_no_style_spans_a_line() -> None:
    shown = TokenText(colored=True, terminal=True).add(b"a\n\nb", 1)
    assert shown == f"{style(1)}a{RESET}\n\n{style(1)}b{RESET}"


def test_a_terminal_is_not_commanded() -> None:
    piece = "\x1b]0;t\x07 \x9b31m\r\x7f\t\n é".encode()
    shown = TokenText(colored=False, terminal=True).add(piece, 0)
    assert shown == "\\x1b]0;t\\x07 \\x9b31m\\x0d\\x7f\t\n é"
    assert TokenText(colored=False, terminal=False).add(piece, 0) == piece.decode()


def test_a_character_that_never_ends() -> None:
    text = TokenText(colored=False, terminal=False)
    assert text.add(b"\xf0\x9f", 1) == ""
    assert text.end() == "\ufffd"


def test_the_table_of_who_wrote_what() -> None:
    """Narrow enough for 40 columns; a position that nothing came of has its line, too."""
    written, accepted = {0: 27, 1: 25, 3: 1000}, (0.93, 0.85, 0.5, 0.1)
    plain = [
        "source      tokens  accepted",
        "trunk           27",
        "draft 1         25       93%",
        "draft 2          0       85%",
        "draft 3       1000       50%",
    ]
    assert table(written, accepted, colored=False).splitlines() == plain
    colored = table(written, accepted, colored=True)
    assert strip(colored).splitlines() == plain
    for i in (1, 2, 3):
        assert f"{style(i)}draft {i}{RESET}" in colored
    assert table({}, (), colored=False).splitlines()[1] == "trunk            0"
    from_text = table({0: 4, -1: 90}, (), 0.75, colored=True).splitlines()
    assert [strip(line) for line in from_text[1:]] == [
        "trunk            4",
        "the text        90       75%",
    ]
    assert from_text[-1].startswith(f"{style(-1)}the text{RESET}")


def test_the_colors_are_those_of_the_report() -> None:
    """Each is as near in hue to its own of the report as to none of the others."""

    def hue(red: int, green: int, blue: int) -> float:
        return colorsys.rgb_to_hsv(red / 255, green / 255, blue / 255)[0]

    def of_palette(n: int) -> tuple[int, int, int]:  # the cube of xterm's 256 colors
        levels = (0, 95, 135, 175, 215, 255)
        return levels[(n - 16) // 36], levels[(n - 16) // 6 % 6], levels[(n - 16) % 6]

    css = (resources.files("mtp_gguf.bench.report") / "style.css").read_text("utf-8")
    report = {}
    for i, digits in re.findall(r"--c([1-5]): #([0-9a-f]{6})", css.split("@media")[0]):
        report[int(i)] = hue(*bytes.fromhex(digits))
    for i, color in enumerate(COLORS, 1):
        mine = hue(*of_palette(color))
        away = {j: min(abs(mine - h), 1 - abs(mine - h)) for j, h in report.items()}
        assert min(away, key=lambda j: away[j]) == i
        assert away[i] < 0.06


@pytest.mark.parametrize(
    ("environment", "colored"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_when(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], colored: bool) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert token_colors.wanted(Terminal()) is colored
    assert token_colors.wanted(io.StringIO()) is False
