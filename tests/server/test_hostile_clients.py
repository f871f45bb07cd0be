"""What a network may send to llama-server: no crash, no hang, and others are answered meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from support.models import Files
from support.real_server import Server, busy_slots
from support.serving import PATIENCE, wait_for

pytestmark = [pytest.mark.server, pytest.mark.thorough]

LEVELS = 10_000
DEEP_LIST = "[" * LEVELS + "]" * LEVELS
DEEP_OBJECT = '{"a":' * LEVELS + "1" + "}" * LEVELS
PROMPT = [5 + n * n % 200 for n in range(300)]
KEY, WRONG = "right-5f1c", "wrong"
MIB = 1 << 20
MOST_BODY = 100 * MIB  # that llama-server reads
MESSAGES = [{"role": "user", "content": "a"}]


class Network:
    """A server, as its clients see it."""

    def __init__(self, port: int, key: str | None = None) -> None:
        self.port = port
        self.key = {} if key is None else {"Authorization": f"Bearer {key}"}

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        """Status and text of an answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            text = body if isinstance(body, str) else json.dumps(body)
            connection.request("POST", path, text, self.key | headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE)

    def check_alive(self) -> None:
        """An answer to a request that has nothing to do with what goes on."""
        status, text = self.post("/completion", {"prompt": PROMPT, "n_predict": 2})
        assert status == 200, text
        assert json.loads(text)["tokens_predicted"] == 2


@contextlib.contextmanager
def network(server: Server, files: Files, *passed: object) -> Iterator[Network]:
    """A server that answers a request at the end, too, and ends by itself when asked to."""
    with server.running(files("plain"), *passed, options=("--no-draft",)) as client:
        found = Network(client.port)
        yield found
        found.check_alive()


def test_slow_clients(server: Server, files: Files) -> None:
    """More of them than slots or threads, who send a part of a request and wait."""
    begins = [
        b"POST /completion HT",
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nX-A: ",
        b'POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{"prompt"',
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    ]
    with network(server, files, "--parallel", 2) as net:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(net.connect()) for _ in range(100)]
            for client, begin in zip(clients, itertools.cycle(begins)):
                client.sendall(begin)
            for _ in range(3):
                net.check_alive()
            for client in clients[::2]:
                client.sendall(b"a")
            net.check_alive()
        net.check_alive()


def test_large_bodies(server: Server, files: Files) -> None:
    """One of 100 MB is read while others are answered; a larger one is refused unread."""
    frame = '{"prompt": "a", "n_predict": 1, "unknown": "%s"}'
    largest = frame % ("a" * (MOST_BODY - len(frame) + 2))
    many = json.dumps({"prompt": [7] * MIB, "n_predict": 1})
    text = json.dumps({"prompt": "ab " * MIB, "n_predict": 1})
    with (
        network(server, files) as net,
        ThreadPoolExecutor(4) as pool,
    ):
        bodies = [largest, many, text]
        answers = [pool.submit(net.post, "/completion", body) for body in bodies]
        net.check_alive()
        assert [answer.result()[0] for answer in answers] == [200, 400, 400]
        assert net.post("/completion", "x" * (MOST_BODY + 1))[0] == 413
        for length in ("-1", "99999999999999999999999", "1e9", "0x10"):
            with net.connect() as client:
                head = f"POST /completion HTTP/1.1\r\nContent-Length: {length}\r\nHost: localhost"
                client.sendall(f"{head}\r\n\r\n".encode() + b'{"prompt": "a"}')
                client.shutdown(socket.SHUT_WR)
                client.recv(100)


def deep_requests() -> Iterator[tuple[str, str]]:
    """Each field that takes JSON, on each path."""
    fields = {
        "/v1/chat/completions": (
            *("messages", "tools", "tool_choice", "response_format", "json_schema", "stop"),
            *("chat_template_kwargs", "logit_bias", "grammar_triggers", "lora", "grammar"),
        ),
        "/completion": (
            *("prompt", "json_schema", "response_format", "logit_bias", "grammar", "samplers"),
        ),
        "/v1/responses": ("input",),
        "/v1/messages": ("messages", "system"),
        "/v1/embeddings": ("input",),
        "/rerank": ("query", "documents"),
        "/infill": ("input_extra",),
        "/tokenize": ("content",),
        "/detokenize": ("tokens",),
        "/apply-template": ("messages",),
        "/lora-adapters": ("scale",),
    }
    whole = {"prompt": "a", "messages": MESSAGES, "max_tokens": 1, "n_predict": 1}
    for deep in (DEEP_LIST, DEEP_OBJECT):
        for path, names in fields.items():
            for name in names:
                yield path, json.dumps({**whole, name: "DEEP"}).replace('"DEEP"', deep)


def nested_texts() -> Iterator[tuple[str, Any]]:
    """Levels that JSON does not count: in grammars, patterns, references and texts of JSON."""
    completion = {"prompt": "a", "n_predict": 1}
    for count in (200, LEVELS, 20 * LEVELS):
        groups = "(" * count + '"a"' + ")" * count
        yield "/completion", {**completion, "grammar": f"root ::= {groups}"}
        rules = "\n".join(f"r{n} ::= r{n + 1}" for n in range(count))
        yield "/completion", {**completion, "grammar": f'root ::= r0\n{rules}\nr{count} ::= "a"'}
        pattern = "^" + "(" * count + "a" + ")" * count + "$"
        schema = {"type": "string", "pattern": pattern}
        yield "/completion", {**completion, "json_schema": schema}
        chat = {"max_tokens": 1, "messages": MESSAGES}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        yield "/v1/chat/completions", {**chat, "tools": [tool]}
        function = {"name": "f", "arguments": "[" * count + "]" * count}
        called = {"id": "1", "type": "function", "function": function}
        turn = {"role": "assistant", "tool_calls": [called]}
        yield "/v1/chat/completions", {**chat, "messages": [turn, *MESSAGES]}
    chain: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(LEVELS)}
    chain[f"d{LEVELS}"] = {"type": "null"}
    yield "/completion", {**completion, "json_schema": {"$ref": "#/$defs/d0", "$defs": chain}}


def test_deep_requests(server: Server, files: Files) -> None:
    with network(server, files) as net:
        for path, body in deep_requests():
            status, text = net.post(path, body)
            assert 400 <= status <= 501, (path, body[:80])
            assert status != 400 or "at most 256 levels, found more" in text, text
        for path, value in nested_texts():
            status, _ = net.post(path, value)
            assert status in (200, 400, 500), (path, str(value)[:80])
            net.check_alive()


def test_cancelled_streams(server: Server, files: Files) -> None:
    """Slots are free again although nobody reads what they would write."""
    with network(server, files, "--parallel", 2) as net:
        body = json.dumps(
            {"prompt": PROMPT, "n_predict": 100_000, "stream": True, "ignore_eos": True}
        )
        head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        for n in range(20):
            with net.connect() as client:
                client.sendall(f"{head}\r\n{body}".encode())
                if n % 2:
                    client.recv(500)
        net.check_alive()
        wait_for(lambda: not busy_slots(net.port))


PATHS = ["/completion", "/v1/chat/completions", "/slots", "/props", "/tokenize"]
STRANGE: list[dict[str, str]] = [
    {},
    {"Authorization": f"Bearer {WRONG}"},
    {"Authorization": f"Bearer {KEY}x"},
    {"Authorization": KEY[:-1]},
    {"X-Api-Key": "x" * 5000},
    {"Authorization": "Bearer "},
]


def test_wrong_keys(server: Server, files: Files) -> None:
    """Refused before anything is computed, however many they are, while the right key is served."""
    passed = ("--api-key", KEY, "--props")
    with server.running(files("plain"), *passed, options=("--no-draft",)) as client:
        net, stranger = Network(client.port, KEY), Network(client.port)

        def guess(number: int) -> int:
            body = {"prompt": PROMPT, "n_predict": 50}
            return stranger.post(PATHS[number % 5], body, **STRANGE[number % 6])[0]

        with ThreadPoolExecutor(8) as pool:
            guesses = [pool.submit(guess, n) for n in range(300)]
            net.check_alive()
            assert {answer.result() for answer in guesses} == {401}
        net.check_alive()


NAMES = [
    *("../x", "../../etc/passwd", "/etc/passwd", "a/../../x", "..", ".", "", "./x", "sub/x"),
    *("..\\x", "C:\\x", "C:x", "a\0b", "a\nb", "x" * 5000, "\u2215etc", "\uff0e\uff0e/x", "a/"),
    *("~", "con", "a|b", "a:b", "*", "%2e%2e%2fx", "\ud800"),
]


def test_names_of_slot_files(server: Server, files: Files, tmp_path: Path) -> None:
    """None leaves its folder, and no pipe or folder of that name holds the server up."""
    folder = tmp_path / "slots"
    folder.mkdir()
    outside = tmp_path / "x"
    outside.write_bytes(b"kept")
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "zeros").symlink_to("/dev/zero")
    path = "/slots/0?action="
    passed = ("--parallel", 1, "--slot-save-path", folder)
    with network(server, files, *passed) as net:
        net.check_alive()
        before = sorted(tmp_path.rglob("*"))
        for name in NAMES:
            for action in ("save", "restore"):
                body = json.dumps({"filename": name})
                status, text = net.post(path + action, body)
                if status == 200:  # a name like any other
                    assert os.sep not in name, text
                    (folder / name).unlink()
        for name in ("pipe", "folder", "loop", "zeros"):
            for action in ("save", "restore"):
                status, text = net.post(path + action, {"filename": name})
                assert status in (400, 500), (name, action, text)
                net.check_alive()
        for value in (None, 5, ["x"], {"a": 1}):
            assert net.post(path + "save", {"filename": value})[0] in (400, 500)
        for slot in ("99999999999", "x", "%00", "../0"):  # llama.cpp takes other numbers modulo 1
            status, text = net.post(f"/slots/{slot}?action=save", {"filename": "x"})
            assert status >= 400, (slot, text)
        assert sorted(tmp_path.rglob("*")) == before
        assert outside.read_bytes() == b"kept"


def test_pipes_and_links_in_the_folder_of_sessions(
    server: Server, files: Files, tmp_path: Path
) -> None:
    """At the start, and when they appear: the server does not wait for them or follow them far."""
    folder = tmp_path / "sessions"
    folder.mkdir()

    def strange(when: str) -> None:
        os.mkfifo(folder / f"{when}-pipe.session")
        os.mkfifo(folder / f".{when}-pipe.part")
        (folder / f"{when}-folder.session").mkdir()
        (folder / f".{when}-folder.part").mkdir()
        (folder / f"{when}-zeros.session").symlink_to("/dev/zero")
        (folder / f"{when}-loop.session").symlink_to(folder / f"{when}-loop.session")
        (folder / f"{when}-gone.session").symlink_to(tmp_path / "gone")
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as special:
            here = Path.cwd()
            os.chdir(folder)
            special.bind(f"{when}-socket.session")
            os.chdir(here)
        old = time.time() - 3600
        for path in folder.glob(".*.part"):
            os.utime(path, (old, old))

    strange("before")
    with network(server, files, "--parallel", 1, "--session-dir", folder) as net:
        for n in range(2):
            net.check_alive()
            assert net.post("/completion", {"prompt": [n, *PROMPT], "n_predict": 1})[0] == 200
        strange("while")
        for n in range(2, 5):
            assert net.post("/completion", {"prompt": [n, *PROMPT], "n_predict": 1})[0] == 200
    assert list(folder.glob("server-*.session"))
    assert len(list(folder.glob("*-*.session"))) >= 12
