"""How long a measurement may take: `90s`, `5m`, `1h`."""

import re
from typing import Annotated

import typer

from mtp_gguf.gguf_tools.errors import RequestError

Budget = Annotated[
    str, typer.Option(help="About how long to measure: 90s, 5m, 1h. What matters less goes.")
]
AnswerTokens = Annotated[
    int | None,
    typer.Option("-n", "--tokens", min=2, max=4096, help="Of each answer. Without: what fits."),
]

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_LARGEST = 7 * 24 * 3600


def parse_budget(text: str) -> float:
    """Seconds; RequestError for what is no time."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([smh]?)", text.strip().lower(), re.ASCII)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= _LARGEST:
        raise RequestError(f"--budget: expected a time such as 90s, 5m or 1h; found {text!r}")
    return seconds
