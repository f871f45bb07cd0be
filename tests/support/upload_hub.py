"""A hub on loopback that also takes uploads, if the client has HF_HUB_DISABLE_XET set (Git LFS).

It has a model to download (see hub_server) and one repository that a client may create and fill.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from support.hub_server import COMMIT_LENGTH, Hub, _Handler

TARGET = "me/Tiny-MTP-GGUF"


class _UploadHandler(_Handler, BaseHTTPRequestHandler):
    served: UploadHub

    def do_GET(self) -> None:
        hub = self.served
        if re.fullmatch(rf"/api/models/{TARGET}(/revision/main)?(\?.*)?", self.path):
            self.see()
            if hub.created is None:
                self._refuse(404, "RepoNotFound", "Repository not found")
            else:
                self._json(hub.info())
            return
        if match := re.fullmatch(rf"/{TARGET}/resolve/main/(.+)", self.path):
            self.see()
            data = hub.stored[unquote(match[1])]
            self._part(len(data), lambda start, stop: data[start:stop], {})
            return
        super().do_GET()

    def do_POST(self) -> None:
        self.see()
        hub = self.served
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/api/repos/create":
            if hub.created is not None:
                self._json({**hub.place(), "error": "exists"}, 409)
                return
            hub.created = json.loads(body)
            self._json(hub.place())
        elif self.path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif self.path == f"/api/models/{TARGET}/preupload/main":
            self._json({"files": [_mode(file["path"]) for file in json.loads(body)["files"]]})
        elif self.path == f"/{TARGET}.git/info/lfs/objects/batch":
            objects = [
                {**wanted, "actions": {"upload": {"href": f"{hub.endpoint}/lfs/{wanted['oid']}"}}}
                for wanted in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects})
        elif self.path == f"/api/models/{TARGET}/commit/main":
            if hub.refused_commits > 0:
                hub.refused_commits -= 1
                self._refuse(403, "", "no right to write")
                return
            for line in body.splitlines():
                hub.commit_line(json.loads(line))
            oid = "c" * COMMIT_LENGTH
            url = f"{hub.endpoint}/{TARGET}/commit/{oid}"
            self._json({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})
        else:
            self._refuse(404, "", "not here")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        digest = sha256(data).hexdigest()
        assert self.path == f"/lfs/{digest}"
        self.served.objects[digest] = data
        self.served.received.append(digest)
        self._send(200, {}, b"")

    def see(self) -> None:
        self.served.tokens.add(self.headers.get("Authorization", "").removeprefix("Bearer "))


@dataclass
class UploadHub(Hub):
    """Use it in a `with`. created: what the client asked for, None before it does.

    stored: the files of the repository. received: digests of what was uploaded, in order.
    refused_commits: commits that are refused before others are taken.
    """

    handler = _UploadHandler

    created: dict[str, Any] | None = None
    stored: dict[str, bytes] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    refused_commits: int = 0

    def place(self) -> dict[str, object]:
        return {"url": f"{self.endpoint}/{TARGET}", "id": TARGET}

    def info(self) -> dict[str, object]:
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                **({"lfs": _lfs(data)} if name.endswith(".gguf") else {}),
            }
            for name, data in sorted(self.stored.items())
        ]
        return {"id": TARGET, "sha": "c" * COMMIT_LENGTH, "siblings": siblings, "tags": []}

    def commit_line(self, line: dict[str, Any]) -> None:
        """Carry out one line of a commit."""
        kind, value = line["key"], line["value"]
        if kind == "file":
            self.stored[value["path"]] = b64decode(value["content"])
        elif kind == "lfsFile":
            self.stored[value["path"]] = self.objects[value["oid"]]
        elif kind == "deletedFile":
            del self.stored[value["path"]]


def _mode(path: str) -> dict[str, object]:
    mode = "lfs" if path.endswith(".gguf") else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}


def _lfs(data: bytes) -> dict[str, object]:
    return {"sha256": sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
