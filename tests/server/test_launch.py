"""A server from its start to its end: waiting, its log, signals, exit codes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from server.conftest import Files
from server.serving import serving
from server.stand_in import write_stand_in


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
