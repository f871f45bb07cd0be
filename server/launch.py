"""Runs a llama-server as a child process: log, health, signals, exit code."""

import http.client
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import BinaryIO

from mtp_gguf.gguf_tools.errors import ServerError

LOG_LINES = 25

_POLL_SECONDS = 0.2
_WAIT_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
# A stock llama-server goes on while it writes an answer whose web page was closed. A second signal
# ends it.
GRACE_SECONDS = 10.0
# Windows sends Ctrl-C to every process of the console by itself, and has no SIGHUP.
_FORWARDED = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name) and (sys.platform != "win32" or name == "SIGTERM")
]


class RunningServer:
    """A llama-server in its own process group, so that it receives each signal once, from us.

    While it loads, only the last lines of its log are kept, for error messages. From `show_log` on,
    its output goes to `log`. Leaving the context manager kills the server.
    """

    def __init__(
        self,
        command: Sequence[str],
        health: str,
        log: BinaryIO,
        *,
        forward: bool = True,
        environment: Mapping[str, str] | None = None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """Start the server.

        Args:
            command: program and arguments.
            health: URL that answers 200 when the server is ready.
            log: receives the output after `show_log`.
            forward: pass signals on to the server. Otherwise they are only deferred until it is
                started.
            environment: the server's variables; None: those of this process.
            grace: seconds that it may take to end after a signal, before a second one is sent.

        """
        self._health = health
        self._opener = _local_opener()
        self._log = log
        self._shown = False
        self._tail: deque[bytes] = deque(maxlen=LOG_LINES)
        self._tail_lock = threading.Lock()
        self.signalled = False
        self._insistence: threading.Timer | None = None
        self._grace = grace
        self._started = False
        self._early: list[int] = []
        # Set before the start, since a signal in between would leave an orphaned server.
        self._handlers = {
            number: signal.signal(number, self._forward)
            for number in _FORWARDED
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores SIGHUP on purpose
        }
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            self._restore_handlers()
            raise ServerError(f"{command[0]}: cannot be run: {error.strerror}") from None
        self._started = True
        for number in self._early:
            self._signal(number)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        if not forward:
            self._restore_handlers()
            if self._early:
                self._process.kill()
                self.wait()
                raise KeyboardInterrupt

    def __enter__(self) -> "RunningServer":
        return self

    def wait_until_ready(self, waiting: Callable[[float], None]) -> bool:
        """Wait until the model is loaded; False if the server exits first.

        waiting: called with the seconds since the start, several times a second.
        """
        began = time.monotonic()
        while self._process.poll() is None:
            if self._is_healthy():
                return True
            waiting(time.monotonic() - began)
            time.sleep(_POLL_SECONDS)
        return False

    def has_page(self, url: str) -> bool:
        """Whether the server has a web page at `url`."""
        # llama-server has its page compressed only.
        return "text/html" in self._header("Content-Type", url, {"Accept-Encoding": "gzip"})

    def answers_any_site(self) -> bool:
        """Whether it lets web pages of any site read its answers."""
        site = "https://site.invalid"
        allowed = self._header("Access-Control-Allow-Origin", self._health, {"Origin": site})
        return allowed in ("*", site)

    def show_log(self) -> None:
        """Write the server's output to the log from now on."""
        with self._tail_lock:
            self._shown = True

    def wait(self) -> int:
        """Wait for the exit of the server; its code, or 128 plus the number of the signal."""
        code = None
        while code is None:
            # A signal that arrives right before waitpid(), or in another thread, does not interrupt
            # it. With a time limit its handler runs within a second, not after the server's end.
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_WAIT_SECONDS)
        self._reader.join(timeout=1.0)  # a child of the server may hold the pipe open
        return 128 - code if code < 0 else code

    def last_lines(self) -> list[str]:
        """The last lines that the server printed while loading."""
        with self._tail_lock:
            return [line.decode(errors="replace").rstrip() for line in self._tail]

    def __exit__(self, *_: object) -> None:
        self._restore_handlers()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._insistence is not None:
            self._insistence.cancel()

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.signalled = True
        if self._started:
            self._signal(number)
        else:
            self._early.append(number)

    def _signal(self, number: int) -> None:
        self._process.send_signal(number)
        if self._insistence is None:
            self._insistence = threading.Timer(self._grace, self._insist, [number])
            self._insistence.daemon = True
            self._insistence.start()

    def _insist(self, number: int) -> None:
        if self._process.poll() is None:
            said = f"llama-server goes on {self._grace:.0f} s after the signal: sent it again"
            self._log.write(f"mtp-gguf: {said}\n".encode())
            self._log.flush()
            self._process.send_signal(number)

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._tail_lock:
                    if not self._shown:
                        self._tail.append(line)
                        continue
                self._log.write(line)
                self._log.flush()

    def _header(self, name: str, url: str, headers: dict[str, str]) -> str:
        """A header of the answer to a request with `headers`; "" if there is none."""
        try:
            request = urllib.request.Request(url, headers=headers)
            with self._opener.open(request, timeout=_ANSWER_SECONDS) as answer:
                return str(answer.headers.get(name, ""))
        except (OSError, http.client.HTTPException):
            return ""

    def _is_healthy(self) -> bool:
        try:
            with self._opener.open(self._health, timeout=_ANSWER_SECONDS) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException):  # URLError and its children are OSErrors
            return False


def _local_opener() -> urllib.request.OpenerDirector:
    """An opener for this machine: no proxies, and self-signed certificates are accepted."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
