"""`generate` on a terminal and in a pipe: the text, and the source of each token."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import pytest

from support.commands import invoke
from support.terminals import on_a_terminal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", ""], "--prompt: expected 1 to 255 tokens, found 0"),
        (["-p", "a b " * 400], "expected 1 to 255 tokens, found .*; shorten it, or raise --ctx"),
        (["-p", "a", "--ctx", "-5"], "--ctx.*: Input should be greater"),
        (["-p", "a", "--ctx", "99999999999"], "--ctx.*: Input should be less"),
        (["-p", "a", "--temp", "-1"], "--temp.*: Input should be greater"),
        (["-p", "a", "--temp", "nan"], "--temp.*: Input should be"),
        (["-p", "a", "--depth", "autos"], "expected 0 to 16 or auto, found 'autos'"),
    ],
)
def test_invalid_arguments(dial: Any, arguments: list[str], message: str) -> None:
    done = invoke("generate", dial("tiny", hit=0.9), "-c", "256", "-t", "1", *arguments)
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert re.search(message, said)
    assert not done.stdout


@pytest.mark.parametrize("environment", [{"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_the_terminal_shows_who_wrote_what(dial: Any, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", "from mtp_gguf.cli.app import main; main()"]
    command += ["generate", str(dial("tiny", hit=1.0)), "-p", "def f", "-n", "30", "-t", "1"]
    command += ["-c", "256", "--depth", "2"]
    ours = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    seen = on_a_terminal(command, env=ours | environment)
    assert ("\x1b[4;38;5;" in seen) == ("NO_COLOR" not in environment)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", seen).splitlines()
    at = lines.index("source      tokens  accepted")
    trunk, first, second = (line.split() for line in lines[at + 1 :])
    assert trunk == ["trunk", "10"]
    assert first == ["draft", "1", "10", "100%"]
    assert second == ["draft", "2", "10", "100%"]
    assert max(map(len, lines[at:])) <= 40
