"""Several API keys: what one has computed is offered to no other, in slots, memory and files."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native.sessions.session_file import check_session
from support.models import Files
from support.real_server import SETTINGS, Client, running
from support.serving import PATIENCE
from support.upstream.nextn_models import write_models

pytestmark = pytest.mark.server

PROMPT = [5 + n * n % 200 for n in range(600)]
OTHER = [7 + n * 3 % 150 for n in range(400)]
ANN, BEN = "ann-0f3a", "ben-77c1"
BOTH = ("--api-key", f"{ANN},{BEN}")
ONE_SLOT, TWO_SLOTS = ("--parallel", 1), ("--parallel", 2)


def server(
    program: Path, model: Path, port: int, *passed: object, options: Sequence[object] = BOTH
) -> AbstractContextManager[Client]:
    return running(program, model, port, *passed, options=("--depth", 2, *options))


def reused(client: Client, prompt: list[int], key: str | None, **options: Any) -> int:
    """How many tokens of a prompt are not read again."""
    timings = client.complete(prompt, key=key, **options)["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == len(prompt)
    return int(timings["cache_n"])


def post(client: Client, path: str, key: str, body: object) -> tuple[int, dict[str, Any]]:
    """The status and the answer."""
    url = client.url.replace("/completion", path)
    headers = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.sample(1)
@pytest.mark.parametrize("slots", [ONE_SLOT, TWO_SLOTS], ids=["cache", "slots"])
def test_a_key_reuses_what_it_has_computed_itself(
    patched_server: Path, files: Files, free_port: int, slots: tuple[object, ...]
) -> None:
    """One slot has to take the conversations of both from the cache in memory."""
    with server(patched_server, files("ids"), free_port, *slots) as client:
        first = client.complete(PROMPT, key=ANN)
        assert reused(client, PROMPT, BEN) == 0
        assert reused(client, PROMPT, ANN) > 0
        assert reused(client, PROMPT, BEN) > 0
        for number in range(int(str(slots[1]))):  # asked for by its number
            text = [9 + number, *OTHER]
            assert reused(client, text, BEN, id_slot=number) == 0
            assert reused(client, text, ANN, id_slot=number) == 0
        assert client.complete(PROMPT, key=BEN)["tokens"] == first["tokens"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [(*BOTH, "--share-sessions"), ("--api-key", ANN), ()],
    ids=["shared", "one key", "no key"],
)
def test_otherwise_everything_is_shared(
    patched_server: Path,
    files: Files,
    free_port: int,
    tmp_path: Path,
    options: tuple[object, ...],
) -> None:
    """And the files are those of a server without keys."""
    keys = [ANN, BEN] if BOTH[1] in options else [ANN, ANN]
    kept = ("--session-dir", tmp_path)
    model = files("ids")
    with server(patched_server, model, free_port, *ONE_SLOT, options=(*options, *kept)) as client:
        assert reused(client, PROMPT, keys[0]) == 0
        assert reused(client, PROMPT, keys[1]) > 0
    (path,) = tmp_path.glob("*.session")
    assert check_session(path).owner == 0
    with server(patched_server, model, free_port, *ONE_SLOT, options=kept) as client:
        assert reused(client, PROMPT, None) > 0


@pytest.mark.thorough
def test_files_of_a_folder_are_for_the_key_that_began_them(
    patched_server: Path, files: Files, free_port: int, tmp_path: Path
) -> None:
    folder, model = tmp_path / "sessions", files("ids")
    options = (*BOTH, "--session-dir", folder)
    with server(patched_server, model, free_port, *ONE_SLOT, options=options) as client:
        answer = client.complete(PROMPT, key=ANN)["tokens"]
        client.complete(PROMPT, key=BEN)  # the same tokens; not the same file
        client.complete(OTHER, key=BEN)
        log = "\n".join(client.run.lines)
    owners = [check_session(path).owner for path in folder.iterdir()]
    ann, ben = (
        int(hashlib.sha256(f"mtp-gguf session\n{key}".encode()).hexdigest()[:16], 16)
        for key in (ANN, BEN)
    )
    assert sorted(owners) == sorted([ann, ben, ben])
    for text in (log.encode(), *(path.read_bytes() for path in folder.iterdir())):
        assert ANN.encode() not in text
    longer = [*PROMPT, *answer, 11, 12, 13]
    for path in folder.iterdir():
        if check_session(path).owner == ben and len(PROMPT) < check_session(path).n_tokens:
            path.unlink()
    with server(patched_server, model, free_port, *ONE_SLOT, options=options) as client:
        assert reused(client, longer, BEN) == 0
        assert reused(client, longer, ANN) >= len(PROMPT)
    for others in ((), ("--api-key", ANN), (*BOTH, "--share-sessions")):
        kept = (*others, "--session-dir", folder)
        with server(patched_server, model, free_port, *ONE_SLOT, options=kept) as client:
            assert reused(client, OTHER, ANN) == 0  # only one with several keys can tell
        for path in folder.iterdir():
            if not check_session(path).owner:
                path.unlink()


def test_the_key_may_come_in_either_header(
    patched_server: Path, files: Files, free_port: int
) -> None:
    with server(patched_server, files("ids"), free_port, *ONE_SLOT) as client:
        client.complete(PROMPT, key=ANN)
        for key in (BEN, ANN):
            body, headers = {"prompt": PROMPT, "n_predict": 1}, {"X-Api-Key": key}
            request = urllib.request.Request(client.url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert (json.load(answer)["timings"]["cache_n"] > 0) is (key == ANN)


def test_slots_are_saved_and_restored_by_their_own_key(
    patched_server: Path, files: Files, free_port: int, tmp_path: Path
) -> None:
    model, passed = files("ids"), (*ONE_SLOT, "--slot-save-path", f"{tmp_path}/")
    body = {"filename": "slot.bin"}
    with server(patched_server, model, free_port, *passed) as client:
        answer = client.complete(PROMPT, key=ANN)["tokens"]
        for action in ("save", "erase"):
            status, said = post(client, f"/slots/0?action={action}", BEN, body)
            assert (status, said["error"]["message"]) == (
                403,
                "The slot has the conversation of another API key",
            )
        assert not (tmp_path / "slot.bin").exists()
        assert post(client, "/slots/0?action=save", ANN, body)[0] == 200
    longer = [*PROMPT, *answer, 11, 12, 13]
    with server(patched_server, model, free_port, *passed) as client:
        status, said = post(client, "/slots/0?action=restore", BEN, body)
        assert status == 400
        assert "expected a file that was saved with this API key" in said["error"]["message"]
        assert reused(client, longer, BEN) == 0
        assert post(client, "/slots/0?action=restore", ANN, body)[0] == 200
        assert reused(client, longer, ANN) == len(PROMPT) + len(answer) - 1
        assert post(client, "/slots/0?action=erase", ANN, body)[0] == 200
    with server(patched_server, model, free_port, *passed, options=()) as client:
        assert post(client, "/slots/0?action=restore", ANN, body)[0] == 400


def test_no_part_from_the_middle_either(
    patched_server: Path, free_port: int, tmp_path: Path
) -> None:
    """--cache-reuse takes equal parts from another place of the slot's text."""
    model = write_models(tmp_path, ["glm4moe"])["glm4moe"]
    passed = (*ONE_SLOT, "--ctx-size", 256, "--cache-reuse", 8)
    rng = random.Random(1)
    text = [rng.randrange(5, 100) for _ in range(100)]
    shorter = [*text[:10], *text[30:]]
    with server(patched_server, model, free_port, *passed) as client:
        client.complete(text, key=ANN)
        assert reused(client, shorter, ANN) == len(shorter) - 1
        client.complete(text, key=ANN)
        assert reused(client, shorter, BEN) == 0


def test_processes_of_a_router_have_no_keys(
    patched_server: Path, files: Files, free_port: int, tmp_path: Path
) -> None:
    """The router checks the keys and passes them on."""
    shutil.copy(files("ids"), tmp_path / "model.gguf")
    command = [patched_server, "--models-dir", tmp_path, "--port", free_port, *SETTINGS, *ONE_SLOT]
    command += ["--api-key", f"{ANN},{BEN}"]
    url = f"http://127.0.0.1:{free_port}"
    with subprocess.Popen([str(word) for word in command], stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1):
                    break
                time.sleep(0.1)

            def reuses(key: str) -> bool:
                body = {"model": "model", "prompt": PROMPT, "n_predict": 1}
                headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
                request = urllib.request.Request(
                    f"{url}/completion", json.dumps(body).encode(), headers
                )
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return bool(json.load(answer)["timings"]["cache_n"] > 0)

            assert [reuses(key) for key in (ANN, BEN, ANN)] == [False, False, True]
        finally:
            process.terminate()
