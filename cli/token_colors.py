"""Text on a terminal, each token in the color of who wrote it: the trunk, or a draft and which.

Color alone says nothing to some readers and terminals: drafts are underlined as well.
"""

import codecs
import os
from collections.abc import Mapping, Sequence
from typing import IO

# Of drafts 1, 2, 3, …, and of all deeper ones: of the 256-color palette what comes nearest to the
# report's (bench/report/style.css), and reads on light and dark grounds.
COLORS = (32, 172, 70, 134, 168)
RESET = "\x1b[0m"
# What a model writes may command a terminal (C0, DEL and C1 codes): shown there, not obeyed.
_CODES = (*range(32), *range(127, 160))
_SHOWN = {code: f"\\x{code:02x}" for code in _CODES if chr(code) not in "\n\t"}


def wanted(stream: IO[str]) -> bool:
    """Whether to color: on a terminal, unless NO_COLOR (no-color.org) or a dumb one says no."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def style(origin: int) -> str:
    """What begins a token: origin 0 the trunk's own, i the draft's i-th."""
    if origin == 0:
        return ""
    return f"\x1b[4;38;5;{COLORS[min(origin, len(COLORS)) - 1]}m"


def table(written: Mapping[int, int], acceptance: Sequence[float], *, colored: bool) -> str:
    """Who wrote how many tokens, a line for each, and what the colors mean; narrow.

    written: tokens by origin. acceptance: by position of the draft.
    """
    lines = ["source      tokens  accepted", f"trunk       {written.get(0, 0):6}"]
    for i in range(1, max(written, default=0) + 1):
        before, after = (style(i), RESET) if colored else ("", "")
        share = f"{acceptance[i - 1]:10.0%}" if i <= len(acceptance) else ""
        name = f"draft {i}"
        lines.append(f"{before}{name}{after}{'':{12 - len(name)}}{written.get(i, 0):6}{share}")
    return "\n".join(lines)


class TokenText:
    """Bytes of tokens to text as it becomes whole: a character may lie across tokens.

    terminal: control characters other than line breaks and tabs are spelled out.
    """

    def __init__(self, *, colored: bool, terminal: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._colored = colored
        self._terminal = terminal

    def add(self, piece: bytes, origin: int) -> str:
        """What to write now; a character belongs to the token that completes it."""
        return self._styled(self._decoder.decode(piece), origin)

    def end(self) -> str:
        """What is left of a character that never became whole."""
        return self._decoder.decode(b"", final=True)

    def _styled(self, text: str, origin: int) -> str:
        if self._terminal:
            text = text.translate(_SHOWN)
        before = style(origin) if self._colored else ""
        if not before or not text:
            return text
        # A line break inside a style would paint the rest of the line on some terminals.
        return "\n".join(f"{before}{line}{RESET}" if line else "" for line in text.split("\n"))
