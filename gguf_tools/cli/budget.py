"""How long a measurement may take: `90s`, `5m`, `1h`."""

import re

from ..errors import RequestError

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_LARGEST = 7 * 24 * 3600


def parse_budget(text: str) -> float:
    """Seconds; RequestError for what is no time."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([smh]?)", text.strip().lower(), re.ASCII)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= _LARGEST:
        raise RequestError(f"--budget: expected a time such as 90s, 5m or 1h; found {text!r}")
    return seconds
