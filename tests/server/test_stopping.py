"""A signal ends llama-server at once, whatever it is doing."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from support import preloading
from support.models import Files
from support.real_server import SETTINGS, Client, running
from support.serving import PATIENCE, serving

pytestmark = pytest.mark.server

ENDLESS = {"prompt": [5, 6, 7], "n_predict": 100_000, "ignore_eos": True}


def test_the_handler_of_a_signal_takes_no_locks(
    patched_server: Path,
    files: Files,
    tmp_path: Path,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It interrupts a thread that may hold them, rarely enough to be missed otherwise."""
    library = preloading.build("handler_locks", tmp_path)
    with monkeypatch.context() as preloaded:
        preloaded.setenv("LD_PRELOAD", str(library))
        with running(patched_server, files("ids"), free_port) as client:
            client.complete([5, 6, 7])
    assert not [line for line in client.run.lines if "takes a lock" in line]


def ask(client: Client, headers: dict[str, str], **body: Any) -> Any:
    request = urllib.request.Request(client.url, json.dumps(ENDLESS | body).encode(), headers)
    return urllib.request.urlopen(request, timeout=PATIENCE)


def streamed(client: Client, headers: dict[str, str], begun: Event) -> list[dict[str, Any]]:
    events = []
    with ask(client, headers, stream=True) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                events.append(json.loads(line[len(b"data: ") :]))
                begun.set()
    return events


def refused(client: Client) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as refusal, ask(client, {}):
        pass
    with refusal.value as answer:
        return answer.code, json.load(answer)["error"]["message"]


def busy_slots(client: Client) -> int:
    with urllib.request.urlopen(
        client.url.replace("completion", "slots"), timeout=PATIENCE
    ) as slots:
        return sum(slot["is_processing"] for slot in json.load(slots))


def test_requests_under_way_end(patched_server: Path, files: Files, free_port: int) -> None:
    """Streams, one of them to be resumed later as the page asks for it, and a whole answer."""
    options = (*SETTINGS, "--parallel", 3, "--context-shift", "--slots")
    with (
        serving(patched_server, files("ids"), free_port, *options) as run,
        ThreadPoolExecutor(3) as pool,
    ):
        run.until("ready")
        client = Client(run, free_port)
        begun = [Event(), Event()]
        streams = [
            pool.submit(streamed, client, {}, begun[0]),
            pool.submit(streamed, client, {"X-Conversation-Id": "resumed"}, begun[1]),
        ]
        whole = pool.submit(refused, client)
        assert all(stream.wait(PATIENCE) for stream in begun)
        deadline = time.monotonic() + PATIENCE
        while busy_slots(client) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 0
        for stream in streams:
            assert not stream.result()[-1]["stop"]
        assert whole.result() == (503, "the server is stopping")
    assert not [line for line in run.lines if "signal" in line or "interrupt" in line]
