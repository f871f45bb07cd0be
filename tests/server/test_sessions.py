"""Conversations that outlive a llama-server: serve --session-dir."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.native.sessions.session_file import check_session, read_session
from support.commands import invoke, succeed
from support.models import Dial, Files
from support.real_server import TOKENS, Client, Server, drafted, post, refusal
from support.serving import wait_for
from support.session_files import OTHER, PROMPT, parse_session, version_1
from support.upstream.nextn_models import TOKENS as VOCABULARY

pytestmark = pytest.mark.server

MORE = [11, 12, 13]
ONE_SLOT = ("--parallel", 1)
Saved = tuple[Path, Any]
WRITTEN = ".server-1.part"  # by another server
EPSILON = "qwen35.attention.layer_norm_rms_epsilon"


def keeping(
    server: Server, model: Path, folder: Path | None, *passed: object
) -> AbstractContextManager[Client]:
    """A server with one slot, and a folder for its conversations."""
    kept = () if folder is None else ("--session-dir", folder)
    return server.running(model, *ONE_SLOT, *passed, options=("--depth", 2, *kept))


def told(result: dict[str, Any]) -> list[Any]:
    """What must not depend on whether a session was interrupted."""
    timings = result["timings"]
    return [result["tokens"], timings["draft_n"], timings["draft_n_accepted"]]


def reused(result: dict[str, Any]) -> int:
    return int(result["timings"]["cache_n"])


def sessions(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".session")


@pytest.fixture
def saved(server: Server, files: Files, tmp_path: Path) -> Saved:
    """A folder with the conversations of a server that has ended, and the first one's answer."""
    folder = tmp_path / "sessions"
    with keeping(server, files("ids"), folder) as client:
        answer = client.complete(PROMPT)
        client.complete(OTHER)
    assert len(sessions(folder)) == 2
    return folder, answer["tokens"]


def test_a_restarted_server_goes_on_as_if_nothing_had_happened(
    server: Server, files: Files, saved: Saved
) -> None:
    folder, answer = saved
    with keeping(server, files("ids"), None) as client:
        client.complete(PROMPT)
        expected = client.complete([*PROMPT, *answer, *MORE])
    with keeping(server, files("ids"), folder) as client:
        found = client.complete([*PROMPT, *answer, *MORE])
        other = client.complete([*OTHER, *MORE])
    assert told(found) == told(expected)
    assert reused(found) >= len(PROMPT) + len(answer) - 1
    assert found["timings"]["draft_n"] > 0
    assert reused(other) > 0
    # the first one replaces the file with its beginning; the other turned away from its answer
    assert len(sessions(folder)) == 3
    assert not (folder.stat().st_mode | sessions(folder)[0].stat().st_mode) & 0o077


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "sampling",
    [pytest.param({}, marks=pytest.mark.slow, id="greedy"), {"temperature": 1.0, "seed": 5}],
    ids=lambda _: "seed",
)
@pytest.mark.parametrize(
    ("name", "swa_full"),
    [*((name, False) for name in ("qwen35", "qwen3next", "glm4moe", "step35")), ("step35", True)],
)
def test_every_kind_of_memory_goes_on(
    dial: Dial, server: Server, tmp_path: Path, name: str, swa_full: bool, sampling: dict[str, Any]
) -> None:
    """Recurrent states, experts, plain attention and sliding windows; drafted greedily or not."""
    model, prompt = dial.gguf(name), [token % VOCABULARY for token in PROMPT]
    passed = ["--override-kv", f"{name}.context_length=int:2048"]
    passed += ["--swa-full"] if swa_full else []
    with keeping(server, model, None, *passed) as client:
        answer = client.complete(prompt, **sampling)["tokens"]
        expected = client.complete([*prompt, *answer, *MORE], **sampling)
    with keeping(server, model, tmp_path, *passed) as client:
        assert client.complete(prompt, **sampling)["tokens"] == answer
    with keeping(server, model, tmp_path, *passed) as client:
        found = client.complete([*prompt, *answer, *MORE], **sampling)
    assert told(found) == told(expected)
    # llama.cpp does not go on within a window that was restored, but from the checkpoint before it
    cut = name == "step35" and not swa_full
    assert reused(found) >= (len(prompt) - 10 if cut else reused(expected))
    assert found["timings"]["draft_n_accepted"] > 0


@pytest.mark.thorough
def test_the_longest_beginning_is_taken(server: Server, files: Files, saved: Saved) -> None:
    """From a file, though another one, or the slot, has a shorter one and nothing else."""
    folder, answer = saved
    longer = [*PROMPT, *answer, *OTHER]
    with keeping(server, files("ids"), folder) as client:
        longer += client.complete(longer)["tokens"]
    with keeping(server, files("ids"), folder) as client:
        client.complete(PROMPT)  # goes back, and is written as the end of a conversation again
    found = {check_session(path).n_tokens: path for path in sessions(folder)}
    shorter = len(PROMPT) + len(answer) - 1
    found[shorter].rename(folder / "0.session")  # which is found first
    found[len(longer) - 1].rename(folder / "1.session")
    for before in (OTHER, PROMPT):
        copied = shutil.copytree(folder, folder.parent / f"{len(before)}")
        with keeping(server, files("ids"), copied) as client:
            client.complete(before)
            assert reused(client.complete([*longer, *MORE])) == len(longer) - 1


def test_conversations_with_the_same_beginning_alternate(
    server: Server, files: Files, tmp_path: Path
) -> None:
    """More than half of the slot's text is that of the next request; the rest is not lost."""
    first, second = [*PROMPT, *OTHER], [*PROMPT, *OTHER[1:]]
    with keeping(server, files("ids"), tmp_path) as client:
        first += client.complete(first)["tokens"]
        second += client.complete(second)["tokens"]
        for text in (first, second):
            assert reused(client.complete([*text, *MORE])) == len(text) - 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", [10, 40, -1, None], ids=["prefix", "json", "state", "cut"])
def test_a_damaged_session_is_not_used(
    server: Server, files: Files, saved: Saved, place: int | None
) -> None:
    folder, answer = saved
    for path in sessions(folder):
        data = bytearray(path.read_bytes())
        if place is None:
            del data[-100:]
        else:
            data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(FormatError):
            check_session(path)
    with keeping(server, files("ids"), folder) as client:
        found = client.complete([*PROMPT, *answer, *MORE])
    assert reused(found) == 0


@pytest.mark.thorough
def test_strange_files_are_read_once(server: Server, files: Files, saved: Saved) -> None:
    """Foreign, damaged, of another program or model: at the start, and when they appear."""
    folder, answer = saved
    good = {check_session(path).n_tokens: path.read_bytes() for path in sessions(folder)}
    (data,) = [good[n] for n in good if n > len(PROMPT)]
    parts = parse_session(data)
    strange = [
        b"x" * 300,
        data[:-1],
        data[:100] + bytes([data[100] ^ 1]) + data[101:],
        version_1(b"{}"),
        parts.with_header(numbers=parts.numbers | {"program": 1}).data(),
        parts.with_header(identity=parts.identity[1:]).data(),
        data[:-9] + bytes(9),
    ]

    def write(name: str, count: int) -> None:
        for n in range(count):
            (folder / f"{name}{n}.session").write_bytes(strange[n % (len(strange) - 1)])

    write("early", 600)
    for path in sessions(folder):
        if path.read_bytes() == data:
            path.write_bytes(strange[-1])  # its header and tokens are whole, its state is damaged
    with keeping(server, files("ids"), folder) as client:
        (process,) = client.processes()

        def reads(text: list[int]) -> tuple[int, int]:
            before = process.io_counters().read_count
            found = reused(client.complete(text, n_predict=2))
            return process.io_counters().read_count - before, found

        text = [*PROMPT, *answer, *MORE]
        count, found = reads(text)
        assert found == 0
        assert count < 200
        assert reads([9, *OTHER])[0] < 200
        write("late", 600)
        total = sum(reads([n, *OTHER])[0] for n in range(20, 60))
        assert 600 < total < 4000  # each is read by one of them, in two or three parts
        assert reads([61, *OTHER])[0] < 200
        part = folder / ".new"
        part.write_bytes(data)
        part.rename(folder / "new.session")
        assert reads([*PROMPT, *answer, *MORE, 1])[1] > len(PROMPT)


@pytest.mark.thorough
def test_a_file_that_is_out_of_reach_is_tried_again(
    server: Server, files: Files, saved: Saved, tmp_path: Path
) -> None:
    """Soon, though neither its name nor the folder changes: it is not taken for a damaged one."""
    folder, answer = saved
    (path,) = [path for path in sessions(folder) if check_session(path).n_tokens > len(PROMPT)]
    away, back = tmp_path / "away", tmp_path / "back"
    path.rename(away)
    path.symlink_to(back)
    with keeping(server, files("ids"), folder) as client:
        away.rename(back)
        time.sleep(2.5)
        assert reused(client.complete([*PROMPT, *answer, *MORE], n_predict=2)) >= len(PROMPT)


@pytest.mark.thorough
def test_sessions_of_other_parameters_are_not_used(
    server: Server, files: Files, tmp_path: Path
) -> None:
    """Of another later shard, or with parameters that nobody has proved harmless."""
    split, folder = files("split"), tmp_path / "sessions"
    shutil.copytree(split.parent, tmp_path / "model")
    model, *_, last = sorted((tmp_path / "model").iterdir())

    def asked(*passed: object) -> int:
        with keeping(server, model, folder, *passed) as client:
            return reused(client.complete([*PROMPT, *MORE]))

    assert asked() == 0
    assert asked("--threads", 1, "--ubatch-size", 64, "--no-perf") > 0
    assert "type_k: f16" in succeed("doctor", sessions(folder)[0])
    n_files = len(sessions(folder))
    for passed in (
        *(("--repack",), ("--rope-freq-base", 5e5), ("--flash-attn", "off")),
        *(("--cache-type-k", "q8_0"), ("--override-kv", f"{EPSILON}=float:0.3")),
    ):
        copied = shutil.copytree(folder, tmp_path / passed[0])
        with keeping(server, model, copied, *passed) as client:
            assert reused(client.complete([*PROMPT, *MORE])) == 0, passed
        assert len(sessions(copied)) > n_files  # those of others stay
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert asked() == 0


def test_the_least_recently_used_go_first(server: Server, files: Files, saved: Saved) -> None:
    folder, _ = saved
    oldest, newest = sorted(sessions(folder), key=lambda path: check_session(path).n_tokens)
    os.utime(oldest, (1, 1))
    size = f"{3 * newest.stat().st_size // 10**6 + 1}M"
    options = ("--session-dir", folder, "--session-size", size)
    with server.running(files("ids"), *ONE_SLOT, options=options) as client:
        for first in range(20, 26):
            client.complete([first, *PROMPT])
    assert not oldest.exists()
    limit = max(1, int(size[:-1]) * 10**6 >> 20) << 20
    assert sum(path.stat().st_size for path in sessions(folder)) <= limit


def serve_six(server: Server, files: Files, folder: Path, n_mib: int) -> None:
    """Answer six prompts that are kept, with so much room, while another server writes a file."""
    options = ("--session-dir", folder, "--session-size", f"{n_mib * 2**20 // 1000 + 1}K")
    with (folder / WRITTEN).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as its server does
        prompts = [[first, *PROMPT] for first in range(20, 26)]
        server.answers(files("ids"), prompts, *ONE_SLOT, options=options)


def test_unfinished_files_count(server: Server, files: Files, saved: Saved) -> None:
    """One that another server writes takes a part of the size; one whose server is dead goes."""
    folder, _ = saved
    largest = max(path.stat().st_size for path in sessions(folder))
    # A server keeps what is younger than a second, which may get its lock yet.
    old = time.time() - 60
    for name in (WRITTEN, ".server-2.part"):
        (folder / name).write_bytes(bytes(2 * largest))
        os.utime(folder / name, (old, old))
    n_mib = 4 * largest // 2**20 + 1
    serve_six(server, files, folder, n_mib)
    assert [path.name for path in folder.glob("*.part")] == [WRITTEN]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= n_mib << 20
    assert sessions(folder)


@pytest.mark.thorough
def test_no_room_beside_unfinished_files(server: Server, files: Files, saved: Saved) -> None:
    folder, _ = saved
    n_mib = max(path.stat().st_size for path in sessions(folder)) // 2**20 + 1
    (folder / WRITTEN).write_bytes(bytes(n_mib << 20))
    serve_six(server, files, folder, n_mib)
    assert [path.name for path in folder.iterdir()] == [WRITTEN]


def tokens_in(folder: Path) -> list[int]:
    """How many tokens each session has that is complete."""
    return sorted(check_session(path).n_tokens for path in sessions(folder))


def wait_for_session(folder: Path, least: int) -> None:
    """Wait for a session of at least this many tokens."""
    wait_for(lambda: max(tokens_in(folder), default=0) >= least, f"{least} tokens")


@pytest.mark.thorough
def test_a_killed_server_has_written_what_was_idle(
    server: Server, files: Files, tmp_path: Path
) -> None:
    """Without another request; and the beginning is not written again for a few new tokens."""
    folder = tmp_path / "sessions"
    options = ("--depth", 2, "--session-dir", folder)
    with server.started(files("ids"), *ONE_SLOT, options=options) as client:
        answer = client.complete(PROMPT)["tokens"]
        wait_for_session(folder, len(PROMPT) + len(answer) - 1)
        before = tokens_in(folder)
        text = [*PROMPT, *answer, *MORE]
        text += client.complete(text, n_predict=2)["tokens"]
        time.sleep(5)  # more than it takes to write a new one
        assert tokens_in(folder) == before
        longer = [*text, *range(20, 320)]
        longer += client.complete(longer)["tokens"]
        wait_for_session(folder, len(longer) - 1)
        assert len(sessions(folder)) == 1  # it replaces its beginning
        client.kill()
    with keeping(server, files("ids"), None) as client:
        client.complete(longer[:-TOKENS])
        expected = client.complete([*longer, *MORE])
    with keeping(server, files("ids"), folder) as client:
        found = client.complete([*longer, *MORE])
    assert told(found) == told(expected)
    assert reused(found) >= len(longer) - 1


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("drafts", [("--depth", 2), ("--depth", 2, "--lookup")], ids=str)
def test_files_of_slots_have_the_drafts_too(
    server: Server, files: Files, tmp_path: Path, drafts: Sequence[object]
) -> None:
    """As if the slot had not been saved; a file without them, or a damaged one, still restores."""
    model, path = files("ids"), tmp_path / "slot.bin"
    passed = (*ONE_SLOT, "--slot-save-path", f"{tmp_path}/")

    def did(client: Client, result: dict[str, Any]) -> list[Any]:
        offered = result["timings"]["draft_n"]
        return [*told(result), drafted(client.log())[-offered:]]

    with server.running(model, *passed, options=drafts, verbose=True) as client:
        answer = client.complete(PROMPT)["tokens"]
        said = slot(client, "save")
        text = [*PROMPT, *answer, *MORE]
        result = client.complete(text)
    expected = did(client, result)
    assert path.stat().st_size == said["n_written"]
    data = path.read_bytes()
    (nbytes,) = struct.unpack_from("<Q", data, len(data) - 16)
    assert data[-24:-16] == b"mtpslot\0"
    stock = data[: -24 - nbytes]
    damaged = bytearray(data)
    damaged[-100] ^= 1
    found = {}
    for name, content in (("whole", data), ("stock", stock), ("damaged", bytes(damaged))):
        path.write_bytes(content)
        with server.running(model, *passed, options=drafts, verbose=True) as client:
            assert slot(client, "restore")["n_restored"] == len(PROMPT) + len(answer) - 1
            result = client.complete(text)
        found[name] = did(client, result)
        assert reused(result) == len(PROMPT) + len(answer) - 1
    assert found["whole"] == expected
    assert found["stock"][0] == expected[0]
    assert found["stock"] == found["damaged"] != expected  # the head begins anew


def slot(client: Client, action: str) -> dict[str, Any]:
    """Save or restore the slot as slot.bin."""
    status, found = post(client.port, f"/slots/0?action={action}", {"filename": "slot.bin"})
    assert status == 200, found
    result: dict[str, Any] = found
    return result


def test_forged_states_of_a_drafter_do_no_harm(
    server: Server, files: Files, tmp_path: Path
) -> None:
    """Their checksums are right; the answers are those of the target."""
    passed = (*ONE_SLOT, "--slot-save-path", f"{tmp_path}/")
    model, path = files("ids"), tmp_path / "slot.bin"
    with server.running(model, *passed, options=("--depth", "auto")) as client:
        answer = client.complete(PROMPT)["tokens"]
        slot(client, "save")
        text = [*PROMPT, *answer, *MORE]
        expected = client.complete(text)["tokens"]
        data = path.read_bytes()
        start = data.rindex(b"mtpstat5", 0, data.rindex(b"mtpslot"))
        first = data.index(b"mtpstat5")
        rng = random.Random(1)
        places = [first + i for i in range(8, 104, 8)] + rng.sample(range(start, start + 99), 9)
        changes = [{place: bytes([data[place] ^ 0x81])} for place in places]
        for at in (first, start):  # as many rows of the head, at positions beyond its cache
            length, _, row = struct.unpack_from("<3q", data, at + 24)
            moved = {at + 24: 100_000, at + 40: 100_000 - length + row}
            changes.append({place: struct.pack("<q", number) for place, number in moved.items()})
        for change in changes:
            forged = bytearray(data)
            for place, content in change.items():
                forged[place : place + len(content)] = content
            (nbytes,) = struct.unpack_from("<Q", forged, len(forged) - 16)
            checksum = zlib.crc32(forged[-24 - nbytes : -24])
            struct.pack_into("<I", forged, len(forged) - 8, checksum)
            path.write_bytes(forged)
            slot(client, "restore")
            assert client.complete(text)["tokens"] == expected


def test_doctor_reports_on_them(saved: Saved) -> None:
    path = sessions(saved[0])[0]
    assert "program: llama-server" in succeed("doctor", path)
    with pytest.raises(FormatError, match="found one of llama-server"):
        read_session(path)


def test_what_excludes_sessions(server: Server, files: Files, tmp_path: Path) -> None:
    kept = ("-m", files("ids"), "--session-dir", tmp_path / "s")
    assert "--cache-ram 0 switches off" in refusal(server.program, *kept, "--cache-ram", 0)
    (tmp_path / "file").touch()
    done = invoke("serve", files("ids"), "--session-dir", tmp_path / "file")
    assert done.exit_code == 2
    assert "is a file" in " ".join(done.stderr.replace("│", " ").split())  # in one line
