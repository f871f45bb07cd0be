"""A signal ends llama-server at once, whatever it is doing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from support import preloading
from support.models import Files
from support.real_server import Client, Server, busy_slots, chunks_of, opened, post, stop
from support.serving import PATIENCE, wait_for

pytestmark = pytest.mark.server

ENDLESS = {"prompt": [5, 6, 7], "n_predict": 100_000, "ignore_eos": True}


def test_the_handler_of_a_signal_takes_no_locks(
    server: Server, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It interrupts a thread that may hold them, rarely enough to be missed otherwise."""
    library = preloading.build("handler_locks", tmp_path)
    with monkeypatch.context() as preloaded:
        preloaded.setenv("LD_PRELOAD", str(library))
        with server.running(files("ids")) as client:
            client.complete([5, 6, 7])
    assert not [line for line in client.run.lines if "takes a lock" in line]


def ask(client: Client, headers: dict[str, str], **body: Any) -> Any:
    return opened(client.port, "/completion", ENDLESS | body, headers)


def streamed(client: Client, headers: dict[str, str], begun: Event) -> list[dict[str, Any]]:
    events = []
    with ask(client, headers, stream=True) as answer:
        for event in chunks_of(answer):
            events.append(event)
            begun.set()
    return events


def test_requests_under_way_end(server: Server, files: Files) -> None:
    """Streams, one of them to be resumed later as the page asks for it, and a whole answer."""
    passed = ("--parallel", 3, "--context-shift", "--slots")
    with server.started(files("ids"), *passed) as client, ThreadPoolExecutor(3) as pool:
        begun = [Event(), Event()]
        streams = [
            pool.submit(streamed, client, {}, begun[0]),
            pool.submit(streamed, client, {"X-Conversation-Id": "resumed"}, begun[1]),
        ]
        whole = pool.submit(post, client.port, "/completion", ENDLESS)
        assert all(stream.wait(PATIENCE) for stream in begun)
        wait_for(lambda: busy_slots(client.port) == 3)
        stop(client.run)
        for stream in streams:
            assert not stream.result()[-1]["stop"]
        status, refused = whole.result()
        assert (status, refused["error"]["message"]) == (503, "the server is stopping")
    assert not [line for line in client.run.lines if "signal" in line or "interrupt" in line]
