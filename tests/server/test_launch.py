"""A server from its start to its end: waiting, its log, signals, exit codes."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conversions import spawn

from server.conftest import Files
from server.stand_in import write_stand_in

PATIENCE = 20.0  # seconds that a busy machine may take to start two interpreters


class Serving:
    """A running `mtp-gguf serve`, with its standard error line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def until(self, words: str) -> str:
        """Read on to the line that has these words."""
        deadline = time.monotonic() + PATIENCE
        while (line := self._queue.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words!r} not in {self.lines}")

    def end(self) -> int:
        """Wait for the end; the exit code."""
        code = self.process.wait(PATIENCE)
        while (line := self._queue.get(timeout=PATIENCE)) is not None:
            self.lines.append(line)
        return code


@contextmanager
def serving(server: Path, model: Path, port: int, *passed: object) -> Iterator[Serving]:
    process = spawn(
        "serve", model, "--llama-server", server, "--port", port, "--", *passed,
        start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            yield Serving(process)
        finally:
            if process.poll() is None:
                process.kill()
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()


@pytest.fixture
def server(tmp_path: Path) -> Path:
    return write_stand_in(tmp_path / "a 'server'")


def test_waits_for_health_and_hands_on_the_log(server: Path, files: Files, free_port: int) -> None:
    with serving(server, files("plain"), free_port, "--load", 0.6) as run:
        run.until("loading model.gguf")
        run.until(f"ready: http://127.0.0.1:{free_port}")
        assert not any("stand-in" in line for line in run.lines if "a 'server'" not in line)
        run.process.send_signal(signal.SIGTERM)
        run.until(f"stand-in: signal {int(signal.SIGTERM)}")
        assert run.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_server_once_and_its_exit_code_comes_back(
    number: signal.Signals, server: Path, files: Files, free_port: int
) -> None:
    with serving(server, files("plain"), free_port, "--end", 9) as run:
        run.until("ready")
        # As a terminal does on Ctrl-C: to the whole group, in which the server is not.
        os.killpg(run.process.pid, number)
        assert run.end() == 9
        assert sum("stand-in: signal" in line for line in run.lines) == 1


def test_a_signal_while_loading_ends_the_wait(server: Path, files: Files, free_port: int) -> None:
    with serving(server, files("plain"), free_port, "--load", 60, "--end", 3) as run:
        run.until("loading")
        time.sleep(0.5)  # the stand-in's handlers are to be in place
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 3
        assert not any("before it was ready" in line for line in run.lines)


def test_dying_at_load_shows_the_end_of_the_log(server: Path, files: Files, free_port: int) -> None:
    with serving(server, files("plain"), free_port, "--die", 7) as run:
        assert run.end() == 7
    text = "\n".join(run.lines)
    assert "loading: line 99" in text
    assert "loading: line 80" in text
    assert "loading: line 10" not in text
    assert run.lines[-1] == "mtp-gguf: llama-server ended with code 7 before it was ready"


def test_a_server_killed_by_a_signal_gives_the_shells_code(
    server: Path, files: Files, free_port: int
) -> None:
    with serving(server, files("plain"), free_port) as run:
        run.until("ready")
        run.process.send_signal(signal.SIGHUP)  # the stand-in has no handler for it
        assert run.end() == 128 + signal.SIGHUP


def test_no_proxy_is_asked(
    server: Path, files: Files, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(server, files("plain"), free_port) as run:
        run.until("ready")
        run.process.terminate()
        assert run.end() == 0
