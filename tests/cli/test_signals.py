"""SIGTERM and SIGHUP act like Ctrl-C, only while a command runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from threading import Thread

import pytest

from mtp_gguf.cli.progress import stops_cleanly


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Under nohup and its like a process begins with SIGHUP ignored."""
    before = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])


@BOTH
def test_interrupts_once(number: int) -> None:
    with stops_cleanly():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        for again in (signal.SIGTERM, signal.SIGHUP):  # while cleaning up
            os.kill(os.getpid(), again)
    assert signal.getsignal(number) is signal.SIG_DFL


@BOTH
def test_leaves_what_others_decided(number: int) -> None:
    def theirs(_number: int, _frame: object) -> None:
        """Somebody's own way to stop."""

    for handler in (signal.SIG_IGN, theirs):
        before = signal.signal(number, handler)
        try:
            with stops_cleanly():
                assert signal.getsignal(number) is handler
            assert signal.getsignal(number) is handler
        finally:
            signal.signal(number, before)


def test_needs_the_main_thread_and_does_without() -> None:
    done = []

    def work() -> None:
        with stops_cleanly():
            done.append(signal.getsignal(signal.SIGTERM))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.SIG_DFL]


ENDING = """
import os, signal
from mtp_gguf.cli.progress import stops_cleanly

restore = signal.signal
with stops_cleanly():
    def interrupted(number, handler):
        signal.signal = restore
        os.kill(os.getpid(), signal.SIGTERM)
        return restore(number, handler)
    signal.signal = interrupted
"""


def test_a_signal_while_handlers_are_restored_ends_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
