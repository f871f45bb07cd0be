"""The life of a server process: startup, log, signals, exit codes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.server.launch import RunningServer
from support.models import Files
from support.serving import PATIENCE, serving, wait_for
from support.stand_in_server import write_stand_in

Launch = Callable[..., RunningServer]


@pytest.fixture
def server(tmp_path: Path) -> Path:
    return write_stand_in(tmp_path / "a 'server'")


@pytest.fixture
def launch(server: Path, free_port: int) -> Launch:
    """Starts the server from this process, with options of its own."""
    command = [str(server), "--port", str(free_port)]

    def start(*words: object, log: io.BytesIO | None = None, **how: Any) -> RunningServer:
        url = f"http://127.0.0.1:{free_port}/health"
        return RunningServer([*command, *map(str, words)], url, log or io.BytesIO(), **how)

    return start


@pytest.fixture
def terminated() -> Iterator[None]:
    """SIGTERM does nothing to this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def test_waits_for_health_and_hands_on_the_log(server: Path, files: Files, free_port: int) -> None:
    with serving(server, files("plain"), free_port, "--load", 0.6) as run:
        run.until("loading model.gguf")
        run.until(f"ready: http://127.0.0.1:{free_port}")
        assert not any(line.startswith("stand-in: ") for line in run.lines)
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_ends_the_wait(
    number: signal.Signals, server: Path, files: Files, tmp_path: Path, free_port: int
) -> None:
    armed = tmp_path / "armed"
    passed = ("--load", 600, "--end", 3, "--armed", armed)
    with serving(server, files("plain"), free_port, *passed) as run:
        run.until("loading")
        wait_for(armed.exists)
        run.process.send_signal(number)
        assert run.end() == 3
        assert not any("before it was ready" in line for line in run.lines)


@pytest.mark.usefixtures("terminated")
def test_a_signal_in_the_moment_of_the_start_is_handed_on(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def start_and_signal(*words: Any, **named: Any) -> subprocess.Popen[bytes]:
        process = start(*words, **named)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    with launch("--load", PATIENCE) as run:
        assert not run.wait_until_ready(lambda _: None)
        assert run.wait() in (0, 128 + signal.SIGTERM)  # before or after it listens to signals


@pytest.mark.usefixtures("terminated")
def test_a_signal_in_another_thread_is_handed_on(launch: Launch) -> None:
    """It interrupts nothing that the thread does which hands it on."""
    sender = threading.Timer(
        0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    )
    with launch(grace=PATIENCE) as run:
        assert run.wait_until_ready(lambda _: None)
        sender.start()
        began = time.monotonic()
        assert run.wait() == 0
        assert time.monotonic() - began < PATIENCE / 2


def test_signals_that_stay_ours(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the server is started, and in the moment of its start: it ends, we are interrupted."""
    handler = signal.getsignal(signal.SIGINT)
    children: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def started(*words: Any, **named: Any) -> subprocess.Popen[bytes]:
        children.append(start(*words, **named))
        if len(children) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", started)

    def interrupt() -> None:
        with launch("--load", PATIENCE, forward=False):
            assert signal.getsignal(signal.SIGINT) is handler
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(PATIENCE)

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    with pytest.raises(KeyboardInterrupt):
        launch("--load", PATIENCE, forward=False)
    assert signal.getsignal(signal.SIGINT) is handler
    assert len(children) == 2
    assert all(child.poll() is not None for child in children)


def test_a_server_that_goes_on_is_signalled_again(launch: Launch, tmp_path: Path) -> None:
    armed, log = tmp_path / "armed", io.BytesIO()
    words = ("--deaf", 1, "--end", 4, "--armed", armed)
    with launch(*words, log=log, grace=0.4) as run:
        run.show_log()
        wait_for(armed.exists)
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
        assert run.wait() == 4
        assert time.monotonic() - began >= 0.4
    lines = log.getvalue().decode().splitlines()
    assert sum("stand-in: signal" in line for line in lines) == 2
    assert [line for line in lines if "mtp-gguf" in line] == [
        "mtp-gguf: llama-server goes on 0 s after the signal: sent it again"
    ]


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


@pytest.mark.parametrize(
    ("passed", "told"),
    [((), False), (("--any-site",), True), (("--any-site", "--api-key", "k"), False)],
)
def test_a_server_for_the_pages_of_any_site_is_named(
    passed: tuple[str, ...], told: bool, server: Path, files: Files, free_port: int
) -> None:
    with serving(server, files("plain"), free_port, *passed, options=["--example"]) as run:
        run.until("ready")
        run.process.terminate()
        assert run.end() == 0
        assert any("answers web pages of any site" in line for line in run.lines) == told
        assert run.process.stdout is not None
        assert ("YOUR_KEY" in run.process.stdout.read()) == ("--api-key" in passed)


def test_no_proxy_is_asked(
    server: Path, files: Files, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(server, files("plain"), free_port) as run:
        run.until("ready")
        run.process.terminate()
        assert run.end() == 0
