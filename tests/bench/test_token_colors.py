"""Tokens on a terminal: colored by who wrote them, never where nobody would see colors."""

from __future__ import annotations

import io
import re

import pytest

from mtp_gguf.native import token_colors
from mtp_gguf.native.token_colors import RESET, TokenText, legend, style


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


def test_legend_names_all_positions() -> None:
    assert strip(legend(3)) == "written by: trunk draft 1 draft 2 draft 3"


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
