"""Text on a terminal, each token colored by its source: the trunk, or the draft's position.

Not all readers and terminals can distinguish colors, so drafts are underlined as well.
"""

import codecs
import os
from collections.abc import Mapping, Sequence
from typing import IO

from mtp_gguf.gguf_tools.profile import FROM_TEXT

from .stop_strings import StopStrings

# Colors of drafts 1, 2, 3, … and of all deeper ones: the nearest colors of the 256-color palette to
# those of the report (bench/report/style.css) that are legible on light and dark backgrounds.
COLORS = (32, 172, 70, 134, 168)
TEXT_COLOR = 109  # drafts from the text
RESET = "\x1b[0m"
# Generated text may contain control codes (C0, DEL and C1); a terminal shows them escaped.
_CODES = (*range(32), *range(127, 160))
_SHOWN = {code: f"\\x{code:02x}" for code in _CODES if chr(code) not in "\n\t"}


def wanted(stream: IO[str]) -> bool:
    """Whether to color: on a terminal, unless it is dumb or NO_COLOR (no-color.org) is set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def style(origin: int, *, dimmed: bool = False) -> str:
    """Return the escape sequence before a token.

    origin: 0 for the trunk, i for the i-th draft, FROM_TEXT for a draft from the text.
    """
    codes = ["2"] if dimmed else []
    if origin:
        color = TEXT_COLOR if origin == FROM_TEXT else COLORS[min(origin, len(COLORS)) - 1]
        codes += ["4", "38", "5", str(color)]
    return f"\x1b[{';'.join(codes)}m" if codes else ""


def styled(text: str, origin: int, *, colored: bool, terminal: bool, dimmed: bool = False) -> str:
    """Return text as it is printed, in the style of its origin if `colored`.

    terminal: escape control characters other than line breaks and tabs.
    """
    if terminal:
        text = text.translate(_SHOWN)
    before = style(origin, dimmed=dimmed) if colored else ""
    if not before or not text:
        return text
    # A line break inside a style would paint the rest of the line on some terminals.
    return "\n".join(f"{before}{line}{RESET}" if line else "" for line in text.split("\n"))


def table(
    generated: Mapping[int, int],
    acceptance: Sequence[float],
    text_acceptance: float | None = None,
    *,
    colored: bool,
) -> str:
    """Return a narrow table of tokens by source, which is also the legend of the colors.

    generated: number of tokens by origin. acceptance: by position of the head's draft.
    text_acceptance: of drafts from the text; None if there were none.
    """
    lines = ["source      tokens  accepted", f"trunk       {generated.get(0, 0):6}"]

    def line(name: str, origin: int, accepted: float | None) -> str:
        before, after = (style(origin), RESET) if colored else ("", "")
        share = "" if accepted is None else f"{accepted:10.0%}"
        return f"{before}{name}{after}{'':{12 - len(name)}}{generated.get(origin, 0):6}{share}"

    for i in range(1, max(generated, default=0) + 1):
        lines.append(line(f"draft {i}", i, acceptance[i - 1] if i <= len(acceptance) else None))
    if text_acceptance is not None:
        lines.append(line("the text", FROM_TEXT, text_acceptance))
    return "\n".join(lines)


class TokenText:
    """Decode the bytes of tokens to text; a character may be spread over several tokens.

    terminal: escape control characters other than line breaks and tabs. stops: the text ends before
    the first of these strings.
    """

    def __init__(self, *, colored: bool, terminal: bool, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._colored = colored
        self._terminal = terminal
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether the text has ended at one of `stops`."""
        return self._stops.found

    def add(self, piece: bytes, origin: int) -> str:
        """Return the text to print now; a character belongs to the token that completes it."""
        return self._styled(self._stops.add(self._decoder.decode(piece), origin))

    def end(self) -> str:
        """Return an incomplete character, and what might have become a stop string."""
        rest = self._stops.add(self._decoder.decode(b"", final=True), 0)
        return self._styled([*rest, *self._stops.end()])

    def _styled(self, parts: Sequence[tuple[str, int]]) -> str:
        return "".join(
            styled(text, origin, colored=self._colored, terminal=self._terminal)
            for text, origin in parts
        )
