"""How long a measurement may take, in a user's words."""

from __future__ import annotations

import pytest

from mtp_gguf.cli.options import parse_budget
from mtp_gguf.gguf_tools.errors import RequestError


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), (" 5 M ", 300), ("2h", 7200)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "-1m", "1d", "m", "1e3", "169h", "٣m"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(RequestError, match="--budget: expected a time such as"):
        parse_budget(text)
