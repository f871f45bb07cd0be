"""Several API keys: what one has computed is offered to no other, in slots, memory and files."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native.sessions.session_file import check_session
from support.models import Files
from support.real_server import Client, Server, post
from support.session_files import OTHER, PROMPT
from support.upstream.nextn_models import write_models

pytestmark = pytest.mark.server

ANN, BEN = "ann-0f3a", "ben-77c1"
BOTH = ("--api-key", f"{ANN},{BEN}")
ONE_SLOT, TWO_SLOTS = ("--parallel", 1), ("--parallel", 2)


def started(
    server: Server, model: Path, *passed: object, options: Sequence[object] = BOTH
) -> AbstractContextManager[Client]:
    return server.running(model, *passed, options=("--depth", 2, *options))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def reused(client: Client, prompt: list[int], key: str | None, **options: Any) -> int:
    """How many tokens of a prompt are not read again."""
    timings = client.complete(prompt, key=key, **options)["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == len(prompt)
    return int(timings["cache_n"])


def act(client: Client, action: str, key: str) -> tuple[int, str]:
    """Do something with the slot and slot.bin; the status, and the sentence of an error."""
    body = {"filename": "slot.bin"}
    status, found = post(client.port, f"/slots/0?action={action}", body, bearer(key))
    return status, found.get("error", {}).get("message", "")


@pytest.mark.sample(1)
@pytest.mark.parametrize("slots", [ONE_SLOT, TWO_SLOTS], ids=["cache", "slots"])
def test_a_key_reuses_what_it_has_computed_itself(
    server: Server, files: Files, slots: tuple[object, ...]
) -> None:
    """One slot has to take the conversations of both from the cache in memory."""
    with started(server, files("ids"), *slots) as client:
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
    server: Server, files: Files, tmp_path: Path, options: tuple[object, ...]
) -> None:
    """And the files are those of a server without keys."""
    keys = [ANN, BEN] if BOTH[1] in options else [ANN, ANN]
    kept = ("--session-dir", tmp_path)
    model = files("ids")
    with started(server, model, *ONE_SLOT, options=(*options, *kept)) as client:
        assert reused(client, PROMPT, keys[0]) == 0
        assert reused(client, PROMPT, keys[1]) > 0
    (path,) = tmp_path.glob("*.session")
    assert check_session(path).owner == 0
    with started(server, model, *ONE_SLOT, options=kept) as client:
        assert reused(client, PROMPT, None) > 0


@pytest.mark.thorough
def test_files_of_a_folder_are_for_the_key_that_began_them(
    server: Server, files: Files, tmp_path: Path
) -> None:
    folder, model = tmp_path / "sessions", files("ids")
    options = (*BOTH, "--session-dir", folder)
    with started(server, model, *ONE_SLOT, options=options) as client:
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
    with started(server, model, *ONE_SLOT, options=options) as client:
        assert reused(client, longer, BEN) == 0
        assert reused(client, longer, ANN) >= len(PROMPT)
    for others in ((), ("--api-key", ANN), (*BOTH, "--share-sessions")):
        kept = (*others, "--session-dir", folder)
        with started(server, model, *ONE_SLOT, options=kept) as client:
            assert reused(client, OTHER, ANN) == 0  # only one with several keys can tell
        for path in folder.iterdir():
            if not check_session(path).owner:
                path.unlink()


def test_the_key_may_come_in_either_header(server: Server, files: Files) -> None:
    with started(server, files("ids"), *ONE_SLOT) as client:
        client.complete(PROMPT, key=ANN)
        for key in (BEN, ANN):
            body = {"prompt": PROMPT, "n_predict": 1}
            _, found = post(client.port, "/completion", body, {"X-Api-Key": key})
            assert (found["timings"]["cache_n"] > 0) is (key == ANN)


def test_slots_are_saved_and_restored_by_their_own_key(
    server: Server, files: Files, tmp_path: Path
) -> None:
    model, passed = files("ids"), (*ONE_SLOT, "--slot-save-path", f"{tmp_path}/")
    with started(server, model, *passed) as client:
        answer = client.complete(PROMPT, key=ANN)["tokens"]
        for action in ("save", "erase"):
            refused = (403, "The slot has the conversation of another API key")
            assert act(client, action, BEN) == refused
        assert not (tmp_path / "slot.bin").exists()
        assert act(client, "save", ANN)[0] == 200
    longer = [*PROMPT, *answer, 11, 12, 13]
    with started(server, model, *passed) as client:
        status, said = act(client, "restore", BEN)
        assert status == 400
        assert "expected a file that was saved with this API key" in said
        assert reused(client, longer, BEN) == 0
        assert act(client, "restore", ANN)[0] == 200
        assert reused(client, longer, ANN) == len(PROMPT) + len(answer) - 1
        assert act(client, "erase", ANN)[0] == 200
    with started(server, model, *passed, options=()) as client:
        assert act(client, "restore", ANN)[0] == 400


def test_no_part_from_the_middle_either(server: Server, tmp_path: Path) -> None:
    """--cache-reuse takes equal parts from another place of the slot's text."""
    model = write_models(tmp_path, ["glm4moe"])["glm4moe"]
    passed = (*ONE_SLOT, "--ctx-size", 256, "--cache-reuse", 8)
    rng = random.Random(1)
    text = [rng.randrange(5, 100) for _ in range(100)]
    shorter = [*text[:10], *text[30:]]
    with started(server, model, *passed) as client:
        client.complete(text, key=ANN)
        assert reused(client, shorter, ANN) == len(shorter) - 1
        client.complete(text, key=ANN)
        assert reused(client, shorter, BEN) == 0


def test_processes_of_a_router_have_no_keys(server: Server, files: Files, tmp_path: Path) -> None:
    """The router checks the keys and passes them on."""
    shutil.copy(files("ids"), tmp_path / "model.gguf")
    body = {"model": "model", "prompt": PROMPT, "n_predict": 1}
    with server.router(tmp_path, *ONE_SLOT, *BOTH) as port:
        found = [post(port, "/completion", body, bearer(key))[1] for key in (ANN, BEN, ANN)]
    assert [each["timings"]["cache_n"] > 0 for each in found] == [False, False, True]
