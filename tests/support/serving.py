"""Runs `mtp-gguf serve` as a subprocess and reads its output while it runs."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.commands import spawn

PATIENCE = 60.0  # seconds that a busy machine may take


def wait_for(condition: Callable[[], object], expected: str = "it never came") -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, expected
        time.sleep(0.05)


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
def serving(
    server: Path, model: Path, port: int, *passed: object, options: Sequence[object] = ()
) -> Iterator[Serving]:
    """`serve` with these `options`, and with `passed` after the dashes; killed in the end."""
    process = spawn(
        "serve",
        model,
        "--llama-server",
        server,
        "--port",
        port,
        *options,
        "--",
        *passed,
        errors="replace",  # a token can be a part of a character
        start_new_session=True,
    )
    with process:
        try:
            yield Serving(process)
        finally:
            process.terminate()  # handed on; killing `serve` would leave the server behind
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()
