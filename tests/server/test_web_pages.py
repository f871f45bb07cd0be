"""Which web pages may use a llama-server, by the names that they and the server have."""

from __future__ import annotations

import json
import os
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from support.models import Files
from support.real_server import Server
from support.serving import PATIENCE

pytestmark = pytest.mark.server

EVIL = "https://evil.example"
APP = "https://app.example"
BODY = json.dumps({"prompt": [5, 6, 7], "n_predict": 1})


def ask(
    port: int, method: str = "POST", path: str = "/completion", body: str = BODY, **headers: str
) -> tuple[HTTPResponse, str]:
    """Send a request with these headers; the answer and its body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request(method, path, body if method == "POST" else None, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def answered(port: int, **headers: str) -> bool:
    """Whether a request is answered, so that its page can read the answer."""
    answer, text = ask(port, **headers)
    if answer.status == 403:
        assert json.loads(text)["error"]["type"] == "permission_error"
        assert answer.getheader("Access-Control-Allow-Origin") is None or "Host" in text
        return False
    assert answer.status == 200, text
    assert answer.getheader("Access-Control-Allow-Origin") in (headers.get("Origin"), "")
    return True


def test_without_a_key(server: Server, files: Files) -> None:
    """A page of another site, also one whose name DNS moved here, can neither ask nor read."""
    with server.running(files("plain"), options=["--no-draft"]) as client:
        port = client.port
        for name in ("localhost", "LOCALHOST", "127.0.0.1", "[::1]", "192.168.1.5"):
            assert answered(port, Host=name)
            assert answered(port, Host=f"{name}:{port}")
            own = f"http://{name}:{port}"
            assert answered(port, Host=f"{name}:{port}", Origin=own)
        for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173"):
            assert answered(port, Origin=origin)
        for name in ("evil.example", "localhost.evil.example", "evil.example:8080", "1.evil", "[x"):
            assert not answered(port, Host=name)
            assert not answered(port, Host=name, Origin=f"http://{name}")
        for origin in (EVIL, "null", "http://localhost.evil.example", "http://192.168.1.5"):
            assert not answered(port, Origin=origin)
        preflight, _ = ask(port, "OPTIONS", Origin=EVIL)
        assert preflight.getheader("Access-Control-Allow-Origin") is None
        for method, path in (("GET", "/health"), ("GET", "/props"), ("OPTIONS", "/completion")):
            assert ask(port, method, path, Host="evil.example")[0].status == 403
        _, text = ask(port, Host="evil.example")
        assert "Host evil.example is not allowed (see --allowed-hosts)" in text
        _, text = ask(port, Origin=EVIL)
        assert f"Origin {EVIL} is not allowed (see --cors-origins)" in text
    assert not any("pages of any site" in line for line in client.run.lines)


def test_names_that_the_user_allows(server: Server, files: Files) -> None:
    options = ("--allowed-hosts", "box.lan, Box", "--cors-origins", f"{APP}, localhost")
    with server.running(files("plain"), *options, options=["--no-draft"]) as client:
        port = client.port
        for name in ("localhost", "box.lan:8080", "box"):
            assert answered(port, Host=name, Origin=f"http://{name}")
            assert answered(port, Host=name, Origin=APP)
            assert answered(port, Host=name, Origin="http://localhost:3000")
            assert not answered(port, Host=name, Origin=EVIL)
        assert not answered(port, Host="evil.example")


def test_a_key_allows_every_page_that_has_it(server: Server, files: Files) -> None:
    options = ["--no-draft", "--api-key", "k"]
    with server.running(files("plain"), options=options) as client:
        page = {"Host": "box.lan", "Origin": EVIL}
        assert answered(client.port, Authorization="Bearer k", **page)
        assert ask(client.port, **page)[0].status == 401


def test_a_router_asks_its_servers_as_itself(server: Server, files: Files, tmp_path: Path) -> None:
    """They have another address than the page that asks it."""
    os.symlink(files("plain"), tmp_path / "tiny.gguf")
    body = json.dumps(json.loads(BODY) | {"model": "tiny"})
    with server.router(tmp_path) as port:
        answer, text = ask(port, body=body, Host="192.168.1.5", Origin="http://192.168.1.5")
        assert answer.status == 200, text


def test_what_is_no_request_is_the_clients_fault(server: Server, files: Files) -> None:
    with server.running(files("plain"), options=["--no-draft"]) as client:
        for body in ("", "{", "prompt=hello", "[]", '{"n_predict": 1}'):
            answer, text = ask(client.port, body=body)
            assert answer.status == 400, body
            assert json.loads(text)["error"]["type"] == "invalid_request_error"
