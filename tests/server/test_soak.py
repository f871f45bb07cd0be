"""Ten thousand short requests from eight clients, many of them cancelled: `pytest -m slow`.

Each answer is held to the text that its prompt has without drafting, so that a slot that shows
another one's text is seen.
"""

from __future__ import annotations

import json
import random
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.models import Files
from support.real_server import DEPTH, TEXTS, TOKENS, Client, answers, certain, running
from support.serving import server_folder

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads memory from /proc"),
]

REQUESTS, CLIENTS, SLOTS = 10_000, 8, 4
CANCELLED = 0.2  # share of requests whose client goes away in the middle of the answer
GROWTH = 1.10  # of the memory after the first tenth, in which caches fill
SEED = 4


def resident_bytes(wrapper: int) -> int:
    """Resident memory of the server that the process `wrapper` runs."""
    found = re.search(r"VmRSS:\s+(\d+) kB", (server_folder(wrapper) / "status").read_text())
    assert found
    return int(found[1]) * 1024


def cancel(client: Client, prompt: str) -> None:
    """Ask for a stream, read its beginning and hang up."""
    body = {"prompt": prompt, "n_predict": 200, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(client.url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.readline()


def test_many_clients_that_come_and_go(patched_server: Path, files: Files, free_port: int) -> None:
    model = files("table", "demo")
    plain = answers(patched_server, model, free_port, TEXTS, options=["--no-draft"], n_probs=2)
    texts = [certain(result) for result in plain]

    # A limit on kept prompts that is reached within the first tenth.
    slots, depth = ("--parallel", SLOTS, "--cache-ram", 8), ("--spec-draft-n-max", DEPTH)
    with running(patched_server, model, free_port, *slots, options=depth) as client:

        def work(number: int) -> None:
            choice = random.Random(f"{SEED} {number}")
            index = choice.randrange(len(TEXTS))
            if choice.random() < CANCELLED:
                cancel(client, TEXTS[index])
                return
            length = choice.randrange(1, TOKENS)
            tokens = client.complete(TEXTS[index], n_predict=length)["tokens"]
            same = min(length, len(texts[index]))
            assert tokens[:same] == texts[index][:same], TEXTS[index]

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(work, range(REQUESTS // 10)))
            early = resident_bytes(client.run.process.pid)
            list(pool.map(work, range(REQUESTS // 10, REQUESTS)))
        late = resident_bytes(client.run.process.pid)
    assert late < early * GROWTH, f"{early} bytes, then {late}"
