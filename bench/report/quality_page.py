"""The HTML page of `mtp-gguf quality`. All text from files is escaped."""

from collections.abc import Sequence
from html import escape
from importlib import resources

from ..quality import Candidate
from .page import PATTERNS
from .scatter import Point, scatter


def render_quality(reference: str, tokens: int, candidates: Sequence[Candidate]) -> str:
    """The page of these candidates, compared with `reference` on so many tokens."""
    style = (resources.files(__package__) / "style.css").read_text(encoding="utf-8")
    title = f"Quality compared with {reference}"
    divergence = [
        Point(c.nbytes / 1e9, c.divergence.mean.value, c.name, c.divergence.mean.error)
        for c in candidates
    ]
    top = [Point(c.nbytes / 1e9, 100 * c.divergence.same_top.value, c.name) for c in candidates]
    rows = "".join(
        f"<tr><td>{escape(c.name)}</td>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in c.cells())
        + "</tr>"
        for c in candidates
    )
    heads = "".join(f"<th>{escape(head)}</th>" for head in ("file", *Candidate.HEADS))
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{style}</style></head><body>{PATTERNS}<main><h1>{escape(title)}</h1>",
            f'<p class="soft">{tokens} tokens</p>',
            "<h2>Size and mean KL divergence</h2>",
            scatter("divergence", "size and divergence", divergence, "{:.3g} GB", "{:.3g}"),
            "<h2>Size and agreement of the most likely token</h2>",
            scatter("top", "size and agreement", top, "{:.3g} GB", "{:.1f} %"),
            f'<h2>Numbers</h2><div class="scroll"><table><tr>{heads}</tr>{rows}</table></div>',
            "</main></body></html>",
        ]
    )
