"""Why a request reads a part of its prompt again: in the log, and in the answer's timings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native.sessions.session_file import check_session
from support.models import Dial, Files
from support.real_server import Client, Server, opened
from support.session_files import OTHER, PROMPT, parse_session

pytestmark = pytest.mark.server

MORE = [11, 12, 13]
ONE_SLOT = ("--parallel", 1)


def serve(server: Server, model: Path, *passed: object, options: Any = ()) -> Any:
    return server.running(model, *passed, options=("--no-draft", *options))


def miss(client: Client, prompt: list[int], **options: Any) -> tuple[str, int, str]:
    """The reason of a request, the tokens that it names, and the sentence; ("", 0, "") if none."""
    timings = client.complete(prompt, n_predict=2, **options)["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == len(prompt)
    found = timings.get("cache_miss")
    if found is None:
        assert timings["prompt_n"] == 1
        return "", 0, ""
    return found["reason"], found["shared"], found["message"]


def sessions(folder: Path) -> dict[int, Path]:
    """The files of a folder by the number of their tokens."""
    return {check_session(path).n_tokens: path for path in folder.glob("*.session")}


@pytest.fixture
def saved(server: Server, files: Files, tmp_path: Path) -> Path:
    """A folder with the sessions of PROMPT and OTHER."""
    folder = tmp_path / "sessions"
    options = ("--session-dir", folder)
    with serve(server, files("ids"), *ONE_SLOT, options=options) as client:
        client.complete(PROMPT, n_predict=2)
        client.complete(OTHER, n_predict=2)
    return folder


def test_what_a_slot_has(dial: Dial, server: Server) -> None:
    """Plain attention, which can go on from any token, and recurrent states, which cannot."""
    passed = ("--override-kv", "glm4moe.context_length=int:2048", *ONE_SLOT)
    with serve(server, dial.gguf("glm4moe"), *passed) as client:
        prompt = [token % 96 for token in PROMPT]
        assert miss(client, prompt)[:2] == ("nothing", 0)
        assert miss(client, prompt)[0] == ""
        reason, shared, message = miss(client, [*prompt[:500], 1, *prompt[501:]])
        assert (reason, shared) == ("parted", 500)
        assert "at token 500" in message
        last = [*prompt[:500], 1, *prompt[501:]]
        answer = client.complete(last)["tokens"]
        reason, shared, message = miss(client, [*last, *answer, *MORE])
        assert (reason, shared) == ("new", len(last) + len(answer) - 1)
        assert miss(client, prompt, cache_prompt=False)[0] == "request"
    lines = [line for line in client.run.lines if "tokens of the prompt" in line]
    found = [re.findall(r"reused (\d+) of (\d+)", line)[0] for line in lines]
    assert found[:3] == [("0", "600"), ("599", "600"), ("500", "600")]
    assert len(found) == 6


def test_a_recurrent_state(server: Server, files: Files) -> None:
    with serve(server, files("ids"), *ONE_SLOT) as client:
        client.complete(PROMPT)
        reason, shared, message = miss(client, [*PROMPT[:590], *MORE])
        assert (reason, shared) == ("checkpoint", 590)
        assert "590 tokens are the same" in message


def test_what_memory_and_slots_have(server: Server, files: Files) -> None:
    two = ("--parallel", 2, "--kv-unified")
    with serve(server, files("ids"), *two) as client:
        client.complete(PROMPT, id_slot=0)
        assert miss(client, [*PROMPT, *MORE], id_slot=1)[:2] in {
            ("", 0),  # taken over from memory
            ("share", len(PROMPT)),
        }
        body = {"prompt": [9, *OTHER], "n_predict": 100_000, "ignore_eos": True, "stream": True}
        with opened(client.port, "/completion", body) as answer:
            assert answer.readline()
            reason, shared, message = miss(client, [9, *OTHER, 1])
        assert (reason, shared) == ("busy", 1 + len(OTHER))
        assert re.search(r"slot [01] has more of it, but is busy", message)
    one = (*ONE_SLOT, "--cache-ram", 1)
    with serve(server, files("ids"), *one) as client:
        for n in range(4):
            client.complete([n, *PROMPT], n_predict=1)
        reason, shared, message = miss(client, [0, *PROMPT, 1])
        assert (reason, shared) == ("evicted", 1 + len(PROMPT))
        assert "was removed from memory to make room" in message


@pytest.mark.thorough
def test_what_the_folder_has(server: Server, files: Files, saved: Path) -> None:
    """Sessions of other parameters, without room, damaged, and removed."""
    kept = sessions(saved)
    long = next(n for n in kept if n >= len(PROMPT))

    def asked(prompt: list[int], *passed: object, options: Any = ()) -> tuple[str, int, str]:
        both = ("--session-dir", saved, *options)
        with serve(server, files("ids"), *ONE_SLOT, *passed, options=both) as client:
            return miss(client, prompt)

    text = [*PROMPT, *MORE]
    reason, shared, message = asked(text, "--cache-type-k", "q8_0")
    assert (reason, shared) == ("identity", len(PROMPT))
    assert "type_k: expected q8_0, found f16" in message
    for path in set(saved.glob("*.session")) - {*kept.values()}:
        path.unlink()
    assert asked(PROMPT[:300], "--ctx-size", 512)[:2] == ("context", 300)
    assert asked([99, *OTHER[:20]])[0] == "short"
    data = kept[long].read_bytes()
    kept[long].write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    reason, shared, message = asked(text)
    assert (reason, shared) == ("unreadable", len(PROMPT))
    assert kept[long].name in message
    assert "slot: " in message
    kept[long].write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    reason, shared, message = asked([98, *text])
    assert (reason, shared) == ("unreadable", 0)
    assert f"{kept[long].name}: header: expected checksum" in message
    assert str(saved) not in message


def test_sessions_that_were_removed(server: Server, files: Files, saved: Path) -> None:
    size = max(path.stat().st_size for path in saved.glob("*.session"))
    options = ("--session-dir", saved, "--session-size", f"{size * 3 // 1000}K")
    passed = (*ONE_SLOT, "--cache-ram", size // 2**20 + 1)
    with serve(server, files("ids"), *passed, options=options) as client:
        for n in range(8):
            client.complete([n, *PROMPT], n_predict=1)
        reason, shared, message = miss(client, [*PROMPT, *MORE])
    assert (reason, shared) == ("evicted", len(PROMPT))
    assert "was removed from the folder to make room" in message


def test_no_key_learns_of_another_one(server: Server, files: Files, tmp_path: Path) -> None:
    """What another key has said is as if it were not there, in memory and in files."""
    passed = (*ONE_SLOT, "--api-key", "ann-1,ben-2")
    options = ("--session-dir", tmp_path / "sessions")
    for extra in ((), ("--cache-type-k", "q8_0")):
        with serve(server, files("ids"), *passed, *extra, options=options) as client:
            if not extra:
                for n in range(5):
                    client.complete([n, *PROMPT], n_predict=1, key="ann-1")
            text = [len(extra), *PROMPT, 1]
            assert miss(client, text, key="ben-2")[:2] == ("nothing", 0)
            if extra:
                assert miss(client, text, key="ann-1")[0] == "identity"
    (path, *_) = (tmp_path / "sessions").glob("*.session")
    assert parse_session(path.read_bytes()).numbers["owner"] != 0
