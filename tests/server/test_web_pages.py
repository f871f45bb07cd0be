"""Which web pages may use a llama-server, by the names that they and the server have."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from support.models import Files
from support.real_server import SETTINGS, running
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


def test_without_a_key(patched_server: Path, files: Files, free_port: int) -> None:
    """A page of another site, also one whose name DNS moved here, can neither ask nor read."""
    with running(patched_server, files("plain"), free_port, options=["--no-draft"]) as client:
        for name in ("localhost", "LOCALHOST", "127.0.0.1", "[::1]", "192.168.1.5"):
            assert answered(free_port, Host=name)
            assert answered(free_port, Host=f"{name}:{free_port}")
            own = f"http://{name}:{free_port}"
            assert answered(free_port, Host=f"{name}:{free_port}", Origin=own)
        for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173"):
            assert answered(free_port, Origin=origin)
        for name in ("evil.example", "localhost.evil.example", "evil.example:8080", "1.evil", "[x"):
            assert not answered(free_port, Host=name)
            assert not answered(free_port, Host=name, Origin=f"http://{name}")
        for origin in (EVIL, "null", "http://localhost.evil.example", "http://192.168.1.5"):
            assert not answered(free_port, Origin=origin)
        preflight, _ = ask(free_port, "OPTIONS", Origin=EVIL)
        assert preflight.getheader("Access-Control-Allow-Origin") is None
        for method, path in (("GET", "/health"), ("GET", "/props"), ("OPTIONS", "/completion")):
            assert ask(free_port, method, path, Host="evil.example")[0].status == 403
        _, text = ask(free_port, Host="evil.example")
        assert "Host evil.example is not allowed (see --allowed-hosts)" in text
        _, text = ask(free_port, Origin=EVIL)
        assert f"Origin {EVIL} is not allowed (see --cors-origins)" in text
    assert not any("pages of any site" in line for line in client.run.lines)


def test_names_that_the_user_allows(patched_server: Path, files: Files, free_port: int) -> None:
    options = ("--allowed-hosts", "box.lan, Box", "--cors-origins", f"{APP}, localhost")
    with running(patched_server, files("plain"), free_port, *options, options=["--no-draft"]):
        for name in ("localhost", "box.lan:8080", "box"):
            assert answered(free_port, Host=name, Origin=f"http://{name}")
            assert answered(free_port, Host=name, Origin=APP)
            assert answered(free_port, Host=name, Origin="http://localhost:3000")
            assert not answered(free_port, Host=name, Origin=EVIL)
        assert not answered(free_port, Host="evil.example")


def test_a_key_allows_every_page_that_has_it(
    patched_server: Path, files: Files, free_port: int
) -> None:
    options = ["--no-draft", "--api-key", "k"]
    with running(patched_server, files("plain"), free_port, options=options):
        page = {"Host": "box.lan", "Origin": EVIL}
        assert answered(free_port, Authorization="Bearer k", **page)
        assert ask(free_port, **page)[0].status == 401


def test_a_router_asks_its_servers_as_itself(
    patched_server: Path, files: Files, tmp_path: Path, free_port: int
) -> None:
    """They have another address than the page that asks it."""
    (tmp_path / "models").mkdir()
    os.symlink(files("plain"), tmp_path / "models" / "tiny.gguf")
    options = ("--models-dir", tmp_path / "models", "--port", free_port, *SETTINGS)
    with subprocess.Popen(
        [str(word) for word in (patched_server, *options)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as router:
        try:
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                try:
                    if ask(free_port, "GET", "/health")[0].status == 200:
                        break
                except OSError:
                    time.sleep(0.05)
            body = json.dumps(json.loads(BODY) | {"model": "tiny"})
            answer, text = ask(
                free_port, body=body, Host="192.168.1.5", Origin="http://192.168.1.5"
            )
            assert answer.status == 200, text
        finally:
            router.send_signal(signal.SIGINT)


def test_what_is_no_request_is_the_clients_fault(
    patched_server: Path, files: Files, free_port: int
) -> None:
    with running(patched_server, files("plain"), free_port, options=["--no-draft"]):
        for body in ("", "{", "prompt=hello", "[]", '{"n_predict": 1}'):
            answer, text = ask(free_port, body=body)
            assert answer.status == 400, body
            assert json.loads(text)["error"]["type"] == "invalid_request_error"
