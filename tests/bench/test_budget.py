"""The values of --budget."""

from __future__ import annotations

import pytest
import typer

from mtp_gguf.cli.options import parse_budget


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, 300), ("90", 90), ("90s", 90), ("1.5m", 90), (" 5 M ", 300), ("2h", 7200)],
)
def test_times(text: str | None, seconds: float) -> None:
    assert parse_budget(text, full=False) == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "-1m", "1d", "m", "1e3", "169h", "٣m"])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a time such as"):
        parse_budget(text, full=False)


def test_everything_has_no_budget() -> None:
    assert parse_budget(None, full=True) is None
    with pytest.raises(typer.BadParameter, match="contradict"):
        parse_budget("5m", full=True)
