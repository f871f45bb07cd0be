"""A web server on loopback that serves ranges of files, and misbehaves on request."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

from support.loopback import Loopback


@dataclass(frozen=True)
class Asked:
    """One request: its path with the query, its range as (first, last), its token."""

    path: str
    range: tuple[int, int] | None
    authorization: str


# Handles a request and returns true, or returns false to leave it to the server.
Behaviour = Callable[["Handler"], bool]


class Handler(BaseHTTPRequestHandler):
    """Answers range requests correctly."""

    served: Web
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing; `asked` has all requests."""

    @property
    def name(self) -> str:
        return urlsplit(self.path).path.lstrip("/")

    def do_GET(self) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        self.range = (int(match[1]), int(match[2])) if match else None
        token = self.headers.get("Authorization", "")
        self.served.asked.append(Asked(self.path, self.range, token))
        if not self.served.behaviour(self):
            self.give()

    def data(self) -> bytes:
        return (self.served.folder / self.name).read_bytes()

    def give(self, *, etag: str = '"1"', cut: int | None = None) -> bool:
        """The range asked for; cut: bytes after which the connection drops."""
        if not (self.served.folder / self.name).is_file():
            return self.answer(404)
        data = self.data()
        first, last = self.range or (0, len(data) - 1)
        if first >= len(data):
            return self.answer(416)
        part = data[first : last + 1]
        where = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return self.answer(206, {"Content-Range": where, "ETag": etag}, part, cut)

    def answer(
        self,
        status: int,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        cut: int | None = None,
    ) -> bool:
        """Answer as stated; True, as a behaviour says that it has answered."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        body = body if cut is None else body[:cut]
        self.served.sent += len(body)
        self.wfile.write(body)
        if cut is not None:
            self.close_connection = True
        return True


@dataclass
class Web(Loopback):
    """Serves a folder. Use it in a `with`. behaviour: asked first, for every request."""

    handler = Handler

    folder: Path
    behaviour: Behaviour = lambda _: False
    asked: list[Asked] = field(default_factory=list)
    sent: int = 0

    def url(self, name: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{name}"
