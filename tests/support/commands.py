"""Runs `mtp-gguf`, in this process or as a subprocess, and checks how it refuses input."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from mtp_gguf.cli import app

# A child ignores what its parent ignores: SIGHUP under nohup, SIGINT in a shell's background.
HEARS_SIGNALS = """import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
UNWRITABLE = Path("/proc")  # a folder in which not even root can create a file
MAIN = "import sys; from mtp_gguf.cli import main; sys.argv[0] = 'mtp-gguf'; main()"


def all_commands() -> dict[str, Any]:
    """Every command by its name, those of `fastmtp` included."""
    group = typer.main.get_command(app)
    context = typer.Context(group)
    found: dict[str, Any] = {}
    for name in group.list_commands(context):  # type: ignore[attr-defined]
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {f"{name} {each}": c for each, c in inner.items()} if inner else {name: command}
    assert found, "no command was found, so nothing would be tested"
    return found


def invoke(*arguments: object, input: str | None = None) -> Result:  # noqa: A002
    """Run `mtp-gguf ARGUMENTS` in this process. input: on its standard input."""
    return CliRunner().invoke(app, [str(a) for a in arguments], input=input)


def succeed(*arguments: object) -> str:
    """Run `mtp-gguf ARGUMENTS`, which must succeed, and return its output."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def refused(folder: Path, *arguments: object, words: tuple[str, ...] = (), code: int = 1) -> str:
    """Run what must fail with one sentence that has the words, and leave `folder` as it is."""
    before = held(folder)
    result = invoke(*arguments)
    message = check_refusal(result.exit_code, result.stderr, *words, code=code)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert held(folder) == before
    return message


def held(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, hidden files included."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}


def check_refusal(exit_code: int | None, stderr: str, *words: str, code: int = 1) -> str:
    """Hold exit code and standard error to what was promised; the message in one line."""
    assert exit_code == code, stderr
    assert "Traceback" not in stderr
    if code != 2:
        assert stderr.startswith("mtp-gguf: "), stderr
        assert stderr.count("\n") == 1, stderr
    message = re.sub(r"[\s│]+", " ", stderr)  # usage errors come in a box, wrapped
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"
    return message


@contextmanager
def deadline(seconds: int, *, computing: bool = False) -> Iterator[None]:
    """Fail if the block takes longer, or computes longer; no OSError, which commands report."""
    timer, number = signal.ITIMER_REAL, signal.SIGALRM
    if computing:
        timer, number = signal.ITIMER_PROF, signal.SIGPROF
    before = signal.signal(number, lambda *_: pytest.fail(f"longer than {seconds} s"))
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


def run_python(code: str, *words: object, timeout: float = 180, **options: Any) -> str:
    """Run a Python program in a process of its own, which must succeed; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def spawn(*arguments: object, prelude: str = "", **options: Any) -> subprocess.Popen[str]:
    """Start `mtp-gguf ARGUMENTS` as a process of its own, after the Python code of `prelude`.

    It hears signals, whatever this process ignores.
    """
    command = [sys.executable, "-c", f"{HEARS_SIGNALS}\n{prelude}\n{MAIN}", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **{**pipes, **options})
