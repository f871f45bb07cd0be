"""Conversations on disk with many clients, kills at any moment and damaged files.

A few of each every day; as many as docs/server.md says with: python -m pytest -m slow THIS_FILE
"""

from __future__ import annotations

import itertools
import random
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.native.sessions.session_file import check_session
from support.models import Files
from support.real_server import Client, Server

pytestmark = pytest.mark.server

TURNS, ANSWER = 3, 8
Talk = list[tuple[list[int], list[int]]]


def begun(number: int) -> list[int]:
    """The first prompt of a conversation."""
    return [5 + number % 900, *(5 + n * n * (number + 1) % 211 for n in range(300 + number % 50))]


def expected(server: Server, model: Path, count: int) -> list[Talk]:
    """The prompts of conversations and their answers, by a server that keeps none."""

    def turns(client: Client, prompt: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        for turn in range(TURNS):
            tokens = client.complete(prompt, n_predict=ANSWER)["tokens"]
            yield prompt, tokens
            prompt = [*prompt, *tokens, 11 + turn]

    with server.running(model, "--parallel", 1, options=("--depth", 2)) as client:
        return [list(turns(client, begun(number))) for number in range(count)]


def check_folder(folder: Path, size: int) -> None:
    """No file is damaged, and all of them, unfinished ones too, are within the size."""
    paths = list(folder.iterdir())
    assert sum(path.stat().st_size for path in paths) <= size
    for path in paths:
        if path.suffix == ".session":
            check_session(path)


@contextmanager
def clients(client: Client, talks: Sequence[Talk], count: int, seed: str) -> Iterator[None]:
    """Clients that continue conversations until the block ends, or the server is killed."""
    stop, turns = threading.Event(), [itertools.cycle(talk) for talk in talks]

    def ask(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while not stop.is_set():
            # each client has conversations of its own
            prompt, want = next(turns[rng.randrange(number, len(talks), count)])
            try:
                found = client.complete(prompt, n_predict=ANSWER)["tokens"]
            except (OSError, HTTPException):
                assert stop.wait(60)
                return
            assert found == want

    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(ask, number) for number in range(count)]
        try:
            yield
        finally:
            stop.set()
    for one in asked:
        one.result()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kills", "talks"), [(3, 6), pytest.param(100, 40, marks=pytest.mark.slow)]
)
def test_kills_lose_no_file(
    server: Server, files: Files, tmp_path: Path, kills: int, talks: int
) -> None:
    """At any moment, with a folder that has no room for all; every answer is right."""
    model, folder = files("ids"), tmp_path / "sessions"
    told = expected(server, model, talks)
    rng, size = random.Random(1), 4_000_000
    options = ("--depth", 2, "--session-dir", folder, "--session-size", "4M")
    for kill in range(kills):
        with (
            server.started(model, "--parallel", 2, options=options) as client,
            clients(client, told, 2, f"{kill}"),
        ):
            time.sleep(rng.uniform(0, 4))
            client.kill()
        check_folder(folder, size)
    # The folder has room for one file, which is removed before the next one is complete: whether a
    # kill leaves one is a matter of luck, but not whether a server that ends does.
    time.sleep(1)  # until unfinished files are leftovers
    with server.running(model, "--parallel", 2, options=options) as client:
        client.complete(told[0][-1][0], n_predict=ANSWER)
    check_folder(folder, size)
    assert list(folder.glob("*.session"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seconds", "count", "talks"), [(10, 4, 12), pytest.param(600, 8, 200, marks=pytest.mark.slow)]
)
def test_many_clients_share_few_slots(
    server: Server, files: Files, tmp_path: Path, seconds: int, count: int, talks: int
) -> None:
    """Every answer is right, and the next server continues every conversation."""
    model, folder = files("ids"), tmp_path / "sessions"
    told = expected(server, model, talks)
    options = ("--depth", 2, "--session-dir", folder, "--session-size", "4G")
    passed = ("--parallel", count // 2)
    with server.running(model, *passed, options=options) as client:
        with clients(client, told, count, "many"):
            time.sleep(seconds)
        for prompt, _ in (talk[-1] for talk in told):  # the last of each
            client.complete(prompt, n_predict=ANSWER)
    check_folder(folder, 4 << 30)
    with server.running(model, *passed, options=options) as client:
        for talk in told:
            text = [*talk[-1][0], *talk[-1][1]]
            timings = client.complete([*text, 12], n_predict=1)["timings"]
            assert timings["cache_n"] == len(text) - 1


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The bytes with a flipped bit, a wrong end, or a part that is a copy of another."""
    kind, place = rng.randrange(4), rng.randrange(len(data))
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data + rng.randbytes(rng.randrange(1, 1000))
    changed = bytearray(data)
    place = rng.choice((place, rng.randrange(min(2000, len(data)))))  # the header, too
    if kind == 2:
        changed[place] ^= 1 << rng.randrange(8)
    else:
        length, source = rng.randrange(1, 5000), rng.randrange(len(data))
        part = data[source : source + length]
        changed[place : place + len(part)] = part
    return bytes(changed)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_files_are_read_as_prompts(
    server: Server, files: Files, tmp_path: Path, count: int
) -> None:
    """Each by a server that has 20 of them, and answers as without any."""
    model, folder, n_files = files("ids"), tmp_path / "sessions", 20
    told = expected(server, model, n_files)
    options = ("--depth", 2, "--session-dir", folder)
    passed = ("--parallel", 1)
    with server.running(model, *passed, options=options) as client:
        for talk in told:
            client.complete(talk[0][0], n_predict=ANSWER)
    whole = {check_session(path).n_tokens: path.read_bytes() for path in folder.iterdir()}
    assert len(whole) == n_files
    rng = random.Random(3)
    for _ in range(count // n_files):
        shutil.rmtree(folder)
        folder.mkdir()
        fits = {}
        for n_tokens, data in whole.items():
            path = folder / f"server-{n_tokens}.session"
            path.write_bytes(damaged(data, rng))
            try:
                fits[n_tokens] = bool(check_session(path))
            except FormatError:
                fits[n_tokens] = False
        with server.running(model, *passed, options=options) as client:
            for talk in told:
                prompt, want = talk[1]
                result = client.complete(prompt, n_predict=ANSWER)
                assert result["tokens"] == want
                assert fits[len(prompt) - 2] or result["timings"]["cache_n"] == 0
