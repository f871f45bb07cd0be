"""A web server on loopback, in its own thread for the duration of a `with`."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import ClassVar

from typing_extensions import Self


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that hangs up is nothing to be told of."""


class Loopback:
    """A kind of server adds `handler`, the class that answers and finds the server as `served`."""

    handler: ClassVar[type[BaseHTTPRequestHandler]]

    def __enter__(self) -> Self:
        bound = type("Bound", (self.handler,), {"served": self})
        self._server = _Server(("127.0.0.1", 0), bound)
        self._thread = Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)
