"""Points over two axes as SVG, scaled and styled like the bars of the report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_HEIGHT = 320  # px of the drawing area
_BOTTOM = 40  # px for the labels of the axis below it
_LEFT, _RIGHT = 12.0, 88.0  # per cent of the width between which points lie


@dataclass(frozen=True)
class Point:
    """A labelled point; error: half the length of its upright whisker."""

    x: float
    y: float
    label: str
    error: float = 0.0


def scatter(name: str, title: str, points: Sequence[Point], x_format: str, y_format: str) -> str:
    """An SVG of these points, with a logarithmic upright axis if all values are positive.

    name: an id, unique in the page. x_format, y_format: of str.format, for the ends of the axes.
    """
    xs, ys = [p.x for p in points], [p.y for p in points]
    log = min(ys) > 0
    low_x, high_x = min(xs), max(xs)
    low_y, high_y = min(ys), max(ys)

    def across(x: float) -> float:
        share = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        return _LEFT + share * (_RIGHT - _LEFT)

    def up(y: float) -> float:
        y = max(y, low_y / 2) if log else y
        ends = [math.log(v) if log else v for v in (low_y, high_y, y)]
        share = (ends[2] - ends[0]) / (ends[1] - ends[0]) if ends[1] > ends[0] else 0.5
        return _HEIGHT * (0.92 - 0.84 * share)

    out = [
        f'<svg class="chart" id="{name}" role="img" aria-labelledby="{name}-t" width="100%" '
        f'height="{_HEIGHT + _BOTTOM}"><title id="{name}-t">{escape(title)}</title>'
        f'<rect class="track" x="0" y="0" width="100%" height="{_HEIGHT}"/>'
    ]
    for y in dict.fromkeys((low_y, high_y)):
        out.append(f'<line class="line" x1="0" x2="100%" y1="{up(y):.1f}" y2="{up(y):.1f}"/>')
        out.append(f'<text x="4" y="{up(y) - 4:.1f}">{escape(y_format.format(y))}</text>')
    for x in dict.fromkeys((low_x, high_x)):
        out.append(
            f'<text class="label" text-anchor="middle" x="{across(x):.2f}%" y="{_HEIGHT + 20}">'
            f"{escape(x_format.format(x))}</text>"
        )
    for p in points:
        at, y, label = f"{across(p.x):.2f}%", up(p.y), escape(p.label)
        ends = f'y1="{up(p.y - p.error):.1f}" y2="{up(p.y + p.error):.1f}"'
        out.append(f'<line class="whisker" x1="{at}" x2="{at}" {ends}/>')
        out.append(
            f'<circle class="f1" cx="{at}" cy="{y:.1f}" r="6"><title>{label}</title></circle>'
            f'<text text-anchor="middle" x="{at}" y="{y - 12:.1f}">{label}</text>'
        )
    return "".join([*out, "</svg>"])
