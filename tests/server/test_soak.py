"""Ten thousand short requests from eight clients, many of them cancelled: `pytest -m slow`.

Each answer is held to the text that its prompt has without drafting, so that a slot that shows
another one's text is seen.
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.models import Files
from support.real_server import DEPTH, TEXTS, TOKENS, Client, Server, certain, opened

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads memory from /proc"),
]

REQUESTS, CLIENTS, SLOTS = 10_000, 8, 4
CANCELLED = 0.2  # share of requests whose client goes away in the middle of the answer
GROWTH = 1.10  # of the memory after the first tenth, in which caches fill
SEED = 4


def cancel(client: Client, prompt: str) -> None:
    """Ask for a stream, read its beginning and hang up."""
    body = {"prompt": prompt, "n_predict": 200, "ignore_eos": True, "stream": True}
    with opened(client.port, "/completion", body) as answer:
        answer.readline()


def test_many_clients_that_come_and_go(server: Server, files: Files) -> None:
    model = files("table", "demo")
    plain = server.answers(model, TEXTS, options=["--no-draft"], n_probs=2)
    texts = [certain(result) for result in plain]

    # A limit on kept prompts that is reached within the first tenth.
    slots, depth = ("--parallel", SLOTS, "--cache-ram", 8), ("--spec-draft-n-max", DEPTH)
    with server.running(model, *slots, options=depth) as client:
        (process,) = client.processes()

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
            early = process.memory_info().rss
            list(pool.map(work, range(REQUESTS // 10, REQUESTS)))
        late = process.memory_info().rss
    assert late < early * GROWTH, f"{early} bytes, then {late}"
