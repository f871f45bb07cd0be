"""A hub on loopback: as much of its API as huggingface_hub needs to download a model.

Small files are sent directly. Weights are redirected to another path, as to the hub's CDN, and sent
in ranges. `requests` lists all requests.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from struct import pack
from threading import Event
from urllib.parse import unquote, urlsplit

from support.loopback import Loopback

COMMIT_LENGTH = 40
_PIECE = 1 << 14  # bytes that a limited connection sends at once
WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True)
class Asked:
    """One request: `path` without the query, `range` as the header has it, or empty."""

    method: str
    path: str
    range: str
    token: str


class _Handler(BaseHTTPRequestHandler):
    """Answers one request after the other on a connection."""

    served: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Keep quiet; `requests` has it all."""

    def _answer(self) -> None:
        hub = self.served
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        hub.requests.append(Asked(self.command, path, self.headers.get("Range", ""), token))
        trouble = hub.trouble() if path.startswith("/cdn/") else ""
        if trouble.isdecimal():
            self._send(int(trouble), {"Retry-After": "1"}, b"")
        elif trouble == "reset":
            self.close_connection = True
            # With a linger time of zero, close() sends a reset.
            self.connection.setsockopt(SOL_SOCKET, SO_LINGER, pack("ii", 1, 0))
            self.connection.close()
        elif hub.fault:
            self._refuse(hub.fault, "", "out of order")
        elif match := re.fullmatch(r"/cdn/([^/]+)/(.+)", path):
            self._content(hub.revisions[match[1]] / match[2], {})
        elif hub.kind != "model" and path == f"/api/{hub.kind}s/{hub.model}":
            self._json({"id": hub.model, "sha": hub.commit("main"), "siblings": [], "tags": []})
        elif hub.kind != "model" or not path.removeprefix("/api/models").startswith(
            f"/{hub.model}"
        ):
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif hub.token and token and token != hub.token:
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif hub.token and not token:
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif hub.gated and path.startswith(f"/{hub.model}"):
            self._refuse(403, "GatedRepo", "Access to this model is restricted")
        else:
            self._model(path.removeprefix("/api/models").removeprefix(f"/{hub.model}"))

    def _model(self, rest: str) -> None:
        """Answer what is asked of the model: its info, its tree, or a file of it."""
        match = re.fullmatch(r"(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", rest)
        verb, name, file = match.groups() if match else (None, None, None)
        revision = self.served.revision(name or "main")
        if revision is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {name}")
            return
        folder = self.served.revisions[revision]
        commit = self.served.commit(revision)
        if verb in (None, "revision"):
            siblings = [_sibling(name, path) for name, path in _files(folder)]
            siblings += [{"rfilename": name, "size": 1} for name in self.served.claimed]
            info = {"id": self.served.model, "sha": commit, "siblings": siblings}
            self._json({**info, "private": False, "gated": False, "tags": []})
        elif verb == "tree":
            self._json([_tree_entry(name, path) for name, path in _files(folder)])
        else:
            self._file(folder / str(file), f"{revision}/{file}", commit)

    def _file(self, path: Path, where: str, commit: str) -> None:
        headers = {"X-Repo-Commit": commit}
        if not path.is_file():
            self._refuse(404, "EntryNotFound", "Entry not found", headers)
        elif path.suffix in WEIGHTS:
            headers |= {
                "Location": f"{self.served.cdn}/{where}",
                "X-Linked-Size": str(path.stat().st_size),
                "X-Linked-ETag": f'"{_digest(path)}"',
            }
            self._send(302, headers, b"")
        else:
            self._content(path, headers)

    def _content(self, path: Path, headers: dict[str, str]) -> None:
        def read(start: int, stop: int) -> bytes:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)

        self._part(path.stat().st_size, read, {**headers, "ETag": f'"{_digest(path)}"'})

    def _part(self, size: int, read: Callable[[int, int], bytes], headers: dict[str, str]) -> None:
        """Send the range that is asked for."""
        headers = {**headers, "Accept-Ranges": "bytes"}
        status, start, stop = 200, 0, size
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(match[1]), min(int(match[2] or size - 1) + 1, size)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            status = 206
        self._send(status, headers, read(start, stop))

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _refuse(
        self, status: int, code: str, text: str, headers: dict[str, str] | None = None
    ) -> None:
        errors = {"X-Error-Code": code, "X-Error-Message": text} if code else {}
        self._send(status, {**(headers or {}), **errors, "X-Error-Message": text}, b"")

    def _send(self, status: int, headers: dict[str, str], data: bytes) -> None:
        hub = self.served
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if hub.stalls and self.path.startswith("/cdn/") and len(data) > hub.cut_after:
            self.wfile.write(data[: hub.cut_after])
            hub.stalled.set()
            hub.proceed.wait(60)
            self.close_connection = True
            return
        if hub.cuts and self.path.startswith("/cdn/"):
            hub.cuts -= 1
            data = data[: hub.cut_after]
            self.close_connection = True
        if self.path.startswith("/cdn/") and hub.bytes_per_second:
            self._slowly(data, hub.bytes_per_second)
        else:
            self.wfile.write(data)

    def _slowly(self, data: bytes, rate: float) -> None:
        """Send no faster than this, as a server that limits each connection."""
        began = time.monotonic()
        for at in range(0, len(data), _PIECE):
            time.sleep(max(0.0, at / rate - (time.monotonic() - began)))
            self.wfile.write(data[at : at + _PIECE])


@dataclass
class Hub(Loopback):
    """A server for one model, whose folder each revision names. Use it in a `with`.

    kind: "dataset" or "space" for what is not a model.
    token: the one that is let in; empty lets everybody in. gated: terms were not accepted.
    fault: a status to answer everything with. cut_after: bytes of a weights file after which the
    connection drops, `cuts` times. claimed: further files that its listing names.
    trouble: what happens to the next request for weights: "429", "503", "reset", or "" for nothing.
    bytes_per_second: the most that a connection gets of weights; 0 for no limit.
    stalls: it sends nothing after these bytes until `proceed` is set, and sets `stalled`.
    """

    handler = _Handler

    model: str
    revisions: dict[str, Path]
    kind: str = "model"
    token: str = ""
    gated: bool = False
    fault: int = 0
    cut_after: int = 0
    cuts: int = 0
    claimed: tuple[str, ...] = ()
    trouble: Callable[[], str] = str
    bytes_per_second: float = 0
    stalls: bool = False
    stalled: Event = field(default_factory=Event)
    proceed: Event = field(default_factory=Event)
    requests: list[Asked] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def cdn(self) -> str:
        """Where weights are; by another name of the host, so that the client sees another host."""
        return f"http://localhost:{self.port}/cdn"

    def commit(self, revision: str) -> str:
        """The commit that a branch or tag stands for."""
        return hashlib.sha1(revision.encode()).hexdigest()

    def revision(self, name: str) -> str | None:
        """The revision of this name or commit; None when there is none."""
        return next((r for r in self.revisions if name in (r, self.commit(r))), None)

    @property
    def weights_sent(self) -> int:
        """Bytes of weights that were asked for; each request for them must be for a range."""
        asked = [a for a in self.requests if a.path.startswith("/cdn/") and a.method == "GET"]
        ranges = [re.fullmatch(r"bytes=(\d+)-(\d+)", a.range) for a in asked]
        assert None not in ranges
        return sum(int(found[2]) + 1 - int(found[1]) for found in ranges if found)

    def fetched(self) -> list[str]:
        """Files whose content was asked for, by name, in order."""
        names = []
        for asked in self.requests:
            match = re.fullmatch(r".*/(?:resolve/[^/]+|cdn/[^/]+)/(.+)", asked.path)
            if match and asked.method == "GET" and match[1] not in names:
                names.append(match[1])
        return sorted(names)


def _files(folder: Path) -> list[tuple[str, Path]]:
    """The files of a revision with their names in the repository."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return sorted((path.relative_to(folder).as_posix(), path) for path in found)


def _sibling(name: str, path: Path) -> dict[str, object]:
    size, digest = path.stat().st_size, _digest(path)
    lfs = {"lfs": {"sha256": digest, "size": size, "pointerSize": 134}}
    weights = lfs if path.suffix in WEIGHTS else {}
    return {"rfilename": name, "size": size, "blobId": digest[:COMMIT_LENGTH], **weights}


def _tree_entry(name: str, path: Path) -> dict[str, object]:
    size = path.stat().st_size
    entry: dict[str, object] = {"type": "file", "path": name, "size": size}
    entry["oid"] = _digest(path)[:COMMIT_LENGTH]
    if path.suffix in WEIGHTS:
        entry["lfs"] = {"oid": _digest(path), "size": size, "pointerSize": 134}
    return entry


def _digest(path: Path) -> str:
    return _digest_of(path, path.stat().st_mtime_ns)


@cache
def _digest_of(path: Path, _changed: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 22):
            digest.update(data)
    return digest.hexdigest()
