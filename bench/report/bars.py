"""Rows of horizontal bars as SVG.

Lengths are percentages and the text is not scaled, so that one drawing is readable on a wide
screen, on a phone and on paper. Fills are classes of style.css; they differ in pattern too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_ROW = 46  # px: a line of text, a bar, a gap
_TEXT = 14
_BAR = 20
_BAR_HEIGHT = 16


@dataclass(frozen=True)
class Part:
    """A segment of a bar, in the chart's unit. fill: a class of style.css. title: on hover."""

    value: float
    fill: str
    title: str = ""


@dataclass(frozen=True)
class Row:
    """One labelled bar. whisker: low and high. mark: a limit and its title."""

    label: str
    text: str
    parts: Sequence[Part]
    whisker: tuple[float, float] | None = None
    mark: tuple[float, str] | None = None


def bars(name: str, title: str, rows: Sequence[Row], line: tuple[float, str] | None = None) -> str:
    """An SVG of these rows, scaled so that the longest bar or mark reaches the right edge.

    name: an id, unique in the page. line: a value to compare all bars with, and its title.
    """
    most = max(
        [sum(p.value for p in r.parts) for r in rows]
        + [r.mark[0] for r in rows if r.mark]
        + [r.whisker[1] for r in rows if r.whisker]
        + ([line[0]] if line else []),
        default=0.0,
    )
    scale = 99.5 / most if most > 0 else 0.0
    out = [
        f'<svg class="chart" id="{name}" role="img" aria-labelledby="{name}-t" width="100%" '
        f'height="{len(rows) * _ROW}"><title id="{name}-t">{escape(title)}</title>'
    ]
    for i, row in enumerate(rows):
        y = i * _ROW
        out.append(f'<text class="label" x="0" y="{y + _TEXT}">{escape(row.label)}</text>')
        out.append(f'<text class="value" x="100%" y="{y + _TEXT}">{escape(row.text)}</text>')
        top = y + _BAR
        out.append(f'<rect class="track" x="0" y="{top}" width="100%" height="{_BAR_HEIGHT}"/>')
        at = 0.0
        for part in row.parts:
            if part.value <= 0:
                continue
            width = part.value * scale
            title_element = f"<title>{escape(part.title)}</title>" if part.title else ""
            out.append(
                f'<rect class="bar {part.fill}" x="{at:.2f}%" y="{top}" width="{width:.2f}%" '
                f'height="{_BAR_HEIGHT}">{title_element}</rect>'
            )
            at += width
        if row.whisker:
            low, high = (value * scale for value in row.whisker)
            middle = top + _BAR_HEIGHT / 2
            ends = f'x1="{low:.2f}%" x2="{high:.2f}%" y1="{middle}" y2="{middle}"'
            # The halo keeps the whisker visible on every fill, light or dark.
            out.append(f'<line class="halo" {ends}/><line class="whisker" {ends}/>')
        if row.mark:
            out.append(_upright("mark", row.mark[0] * scale, top - 2, _BAR_HEIGHT + 4, row.mark[1]))
        if line:
            out.append(_upright("line", line[0] * scale, top - 4, _BAR_HEIGHT + 8, line[1]))
    return "".join([*out, "</svg>"])


def _upright(kind: str, x: float, top: float, height: float, title: str) -> str:
    return (
        f'<line class="{kind}" x1="{x:.2f}%" x2="{x:.2f}%" y1="{top}" y2="{top + height}">'
        f"<title>{escape(title)}</title></line>"
    )
