"""JSON that is nested so deep that recursion would overflow the stack: a server refuses it."""

from __future__ import annotations

import itertools
import json
import signal
import zlib
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.native.sessions.session_file import check_session
from support.models import Files
from support.real_server import Server, post
from support.session_files import SessionFile, version_1

pytestmark = pytest.mark.server

LEVELS = 400_000
LISTS, OBJECTS = "[" * LEVELS + "]" * LEVELS, '{"a":' * LEVELS + "1" + "}" * LEVELS
MESSAGE = '"messages": [{"role": "user", "content": "a"}]'
BODIES = [
    ("/completion", '{"prompt": %s}'),
    ("/completion", '{"prompt": "a", "n_predict": 1, "json_schema": %s}'),
    ("/completion", '{"prompt": "a", "n_predict": 1, "logit_bias": %s}'),
    ("/completion", '{"prompt": "a", "n_predict": 1, "unknown": %s}'),
    ("/v1/chat/completions", '{"max_tokens": 1, "messages": %s}'),
    ("/v1/chat/completions", '{"max_tokens": 1, "tools": %s, ' + MESSAGE + "}"),
    ("/v1/chat/completions", '{"max_tokens": 1, "chat_template_kwargs": %s, ' + MESSAGE + "}"),
    ("/v1/messages", '{"max_tokens": 1, "system": %s, ' + MESSAGE + "}"),
    ("/v1/responses", '{"input": %s}'),
    ("/tokenize", '{"content": %s}'),
    ("/apply-template", '{"messages": %s}'),
    ("/detokenize", '{"tokens": %s}'),
    ("/infill", '{"input_extra": %s}'),
    ("/lora-adapters", '{"scale": %s}'),
]
# The text of a message, which is JSON of its own.
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": LISTS}}
CALLED = {
    "messages": [{"role": "assistant", "tool_calls": [CALL]}, {"role": "user", "content": ""}]
}


def test_requests(server: Server, files: Files) -> None:
    with server.running(files("plain"), options=["--no-draft"]) as client:
        for path, body in BODIES:
            for value in (LISTS, OBJECTS):
                status, found = post(client.port, path, body % value)
                message = found["error"]["message"]
                assert status == 400, (path, body, message)
                assert "expected JSON of at most 256 levels, found more" in message
        # a template may take it as text
        post(client.port, "/v1/chat/completions", CALLED)
        quoted = json.dumps("[" * 300 + '\\"[')  # brackets of a text are no levels
        deepest = f'{{"prompt": {quoted}, "n_predict": 1, "unknown": {"[" * 255 + "]" * 255}}}'
        assert post(client.port, "/completion", deepest)[0] == 200
        deeper = deepest.replace("]", "]]").replace("[[", "[[[")
        assert post(client.port, "/completion", deeper)[0] != 200
        client.complete([5, 6, 7])


def test_session_files(server: Server, files: Files, tmp_path: Path) -> None:
    """Before a server starts, and while it runs: JSON of old files, and where new ones have some.

    llama-server reads none of it, nor does it take a file with more fields, or one of Python.
    """
    empty = '"n_tokens": 1, "extra": {}, "sections": []'
    old = (f'{{"identity": {OBJECTS}, {empty}}}', f'{{"identity": {LISTS}, {empty}}}', LISTS)
    forged = {f"old-{n}": version_1(header.encode()) for n, header in enumerate(old)}
    one = SessionFile(sections=[[128, 4, 0, 1], [192, 1, 0, 1]], body=bytes(14 + 65))
    for program, text in itertools.product((1, 2), (OBJECTS, LISTS)):
        numbers = {"program": program}
        new = one.with_header(numbers=numbers, extra=text.encode(), identity=[(b"a", b"b")])
        for section, size in zip(new.sections, (4, 1), strict=True):
            section[2] = zlib.crc32(bytes(size))
        forged[f"new-{program}-{text[0] == '['}"] = new.data()
    folder = tmp_path / "sessions"
    folder.mkdir()

    def write(when: str) -> None:
        for name, data in forged.items():
            path = folder / f"{when}-{name}.session"
            path.write_bytes(data)
            if name.startswith("new-2"):  # nobody reads what it adds
                assert check_session(path).is_of_server
                continue
            with pytest.raises(FormatError, match=r"version: expected 2, found 1|extra: expected"):
                check_session(path)

    write("before")
    options = ("--no-draft", "--session-dir", folder)
    with server.running(files("plain"), options=options) as client:
        client.complete([5 + n * n % 200 for n in range(300)])
        write("while")
        client.complete([7 + n * 3 % 150 for n in range(300)])
        assert client.run.process.poll() is None
    assert client.run.process.returncode not in (-signal.SIGSEGV, 139)
