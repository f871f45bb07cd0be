"""The folder of --session-dir when disks, other programs or other servers disturb it.

The server answers as without sessions, says so once, and uses the folder again when that passes.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native.sessions.session_file import check_session
from support.failing_files import FailingFiles
from support.models import Files
from support.real_server import Client, Server
from support.serving import wait_for
from support.session_files import OTHER, PROMPT

pytestmark = pytest.mark.server

PAUSE = 5  # seconds until the server writes again, session_folder.h's pause_us
OPTIONS = ("--no-draft",)
GOES_BACK = 0.9  # a recurrent state, to its last checkpoint


def serve(server: Server, files: Files, folder: Path, *options: object) -> Any:
    """A server with one slot."""
    passed = (*OPTIONS, "--session-dir", folder, *options)
    return server.running(files("ids"), "--parallel", 1, options=passed)


def reused(client: Client, text: list[int]) -> int:
    return int(client.complete(text, n_predict=2)["timings"]["cache_n"])


def sessions(folder: Path) -> list[Path]:
    return sorted(folder.glob("server-*.session"))


def is_written(folder: Path, before: set[Path]) -> bool:
    """Whether the folder has a session that it had not, or as many as it keeps."""
    return bool(set(sessions(folder)) - before) or len(before) > 1


def said(client: Client, words: str) -> int:
    """How many lines of the whole log have these words; the server has ended."""
    return sum(words in line for line in client.run.lines)


@pytest.fixture
def saved(server: Server, files: Files, tmp_path: Path) -> Path:
    """A folder with the session of PROMPT."""
    folder = tmp_path / "sessions"
    with serve(server, files, folder) as client:
        client.complete(PROMPT, n_predict=2)
    assert len(sessions(folder)) == 1
    return folder


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], FailingFiles]:
    """Has calls of servers fail in a folder, as a test says."""
    return lambda folder: FailingFiles(folder, tmp_path, monkeypatch)


@pytest.mark.thorough
def test_strangers_cost_no_calls(
    server: Server, files: Files, tmp_path: Path, failing: Callable[[Path], FailingFiles]
) -> None:
    """Each request writes a session; 4,000 other files are listed then, and not looked at."""
    folder, requests, strangers = tmp_path / "sessions", 20, 4000
    folder.mkdir()
    for n in range(strangers):
        (folder / f"stranger-{n}.session").write_bytes(b"x" * 300)
    calls = failing(folder)
    with serve(server, files, folder) as client:
        reused(client, [3, *OTHER])
        began, opens, stats = time.monotonic(), calls["opens"], calls["stats"]
        for n in range(requests):
            reused(client, [10 + n, *OTHER])
        wait_for(lambda: len(sessions(folder)) >= requests, "each writes one")
        every_10_s = int((time.monotonic() - began) / 10) + 1  # changes of files in their place
        assert calls["opens"] - opens <= 10 * requests
        assert calls["stats"] - stats <= strangers * every_10_s + 10 * requests**2


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("call", ["open", "read", "list"])
def test_a_disk_that_fails_for_a_while(
    server: Server, files: Files, saved: Path, failing: Callable[[Path], FailingFiles], call: str
) -> None:
    """A good file is not taken for a damaged one, and is used once it can be read."""
    calls = failing(saved)
    calls[call] = errno.EMFILE if call == "open" else errno.EIO
    with serve(server, files, saved) as client:
        assert reused(client, [*PROMPT, 1]) == 0
        assert reused(client, [*OTHER, 2]) == 0
        calls[call] = 0
        time.sleep(2.5)
        assert reused(client, [*PROMPT, 3]) >= GOES_BACK * len(PROMPT)
        if call == "list":
            client.run.until("can be read again")
            calls["list"] = errno.EIO
            for n in range(3):
                (saved / f"{n}").touch()
                reused(client, [20 + n, *OTHER])
    assert said(client, f"{saved} cannot be read: Input/output error") == (call == "list")


@pytest.mark.thorough
def test_a_full_disk(
    server: Server, files: Files, tmp_path: Path, failing: Callable[[Path], FailingFiles]
) -> None:
    """Answers go on, one line says so, nothing unfinished stays, and it writes again later."""
    folder = tmp_path / "sessions"
    folder.mkdir()
    calls = failing(folder)
    calls["write"] = errno.ENOSPC
    with serve(server, files, folder) as client:
        for n in range(3):
            assert reused(client, [10 + n, *OTHER]) == 0
        client.run.until("sessions are not written until that passes")
        time.sleep(PAUSE + 0.5)
        reused(client, [20, *OTHER])
        reused(client, [21, *OTHER])  # it fails a second time
        assert not sessions(folder)
        calls["write"] = 0
        time.sleep(PAUSE + 0.5)
        reused(client, [22, *OTHER])
        reused(client, [23, *OTHER])
        client.run.until("sessions are written again")
        assert reused(client, [22, *OTHER]) >= GOES_BACK * len(OTHER)
    assert said(client, "No space left on device") == 1
    assert sessions(folder)
    assert not list(folder.glob(".*"))


@pytest.mark.thorough
def test_a_folder_that_disappears_and_comes_back(
    server: Server, files: Files, saved: Path, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    with serve(server, files, saved) as client:
        saved.rename(away)
        assert reused(client, [*PROMPT, 1]) == 0
        for n in range(3):
            assert reused(client, [10 + n, *OTHER]) == 0
        client.run.until("sessions are not written until that passes")
        away.rename(saved)
        time.sleep(PAUSE + 0.5)
        assert reused(client, [*PROMPT, 2]) >= GOES_BACK * len(PROMPT)
        reused(client, [13, *OTHER])
        client.run.until("sessions are written again")
    assert said(client, f"{saved} cannot be read: No such file or directory") == 1
    assert said(client, f"{saved} can be read again") == 1
    assert said(client, "sessions are not written") == 1
    assert len(sessions(saved)) > 1


def test_files_of_others_are_not_removed(server: Server, files: Files, saved: Path) -> None:
    """They take no part in --session-size, whatever their names; damaged sessions do."""
    (good,) = sessions(saved)
    size = good.stat().st_size
    strangers = [saved / "server-0123456789abcdef.session", saved / "a.session", saved / "b.txt"]
    for path in strangers:
        path.write_bytes(b"\0" * 4 * size)
    pipe, link, target = saved / "pipe.session", saved / "link.session", saved.parent / "target"
    os.mkfifo(pipe)
    target.write_bytes(b"x" * 4 * size)
    link.symlink_to(target)
    damaged = saved / "damaged.session"
    damaged.write_bytes(good.read_bytes()[: size // 2])
    old = [*strangers, damaged, good, target]
    for path in old:
        os.utime(path, (1, 1))
    n_mib = 2 * size // 2**20 + 1
    limit = ("--session-size", f"{n_mib * 2**20 // 1000 + 1}K")
    with serve(server, files, saved, *limit) as client:
        for n in range(6):
            reused(client, [20 + n, *PROMPT])
    assert all(os.path.lexists(path) for path in (*strangers, pipe, link, target))
    assert not damaged.exists()
    assert not good.exists()
    assert sum(path.stat().st_size for path in set(sessions(saved)) - {*strangers}) <= n_mib << 20


def test_two_servers_share_a_folder(server: Server, files: Files, tmp_path: Path) -> None:
    """Each goes on with what the other one has written, and survives what it has removed."""
    folder = tmp_path / "sessions"
    with (
        serve(server, files, folder) as first,
        serve(server, files, folder) as second,
    ):
        text = PROMPT
        for turn in range(3):
            for client in (first, second):
                found = reused(client, [*text, 1 + turn])
                assert turn == 0 or found >= GOES_BACK * len(text)
                before = set(sessions(folder))
                reused(client, OTHER if turn % 2 else [9, *OTHER])  # takes the slot
                wait_for(partial(is_written, folder, before), "written")
                text = [*text, 1 + turn]
        for path in sessions(folder):
            path.unlink()
        assert reused(first, [*PROMPT, 99]) >= 0
        assert reused(second, [*PROMPT, 98]) >= 0
    for path in sessions(folder):
        check_session(path)


@pytest.mark.thorough
def test_a_file_that_is_replaced_and_cut_while_it_is_read(
    server: Server, files: Files, saved: Path
) -> None:
    """Answers are the same whatever a file has at the moment that it is looked at."""
    (good,) = sessions(saved)
    data = good.read_bytes()
    with server.running(files("ids"), "--parallel", 1, options=OPTIONS) as client:
        expected = [client.complete([*PROMPT, n])["tokens"] for n in range(12)]
    ends = threading.Event()

    def disturb() -> None:
        n = 0
        while not ends.is_set():
            n += 1
            part = saved / ".new"
            part.write_bytes(data if n % 3 else data[: len(data) - n])
            part.rename(good)
            with good.open("r+b") as file:
                file.truncate(len(data) * (n % 7) // 7)
                file.truncate(len(data))

    with serve(server, files, saved) as client:
        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            for n in range(12):
                assert client.complete([*PROMPT, n])["tokens"] == expected[n]
                client.complete([n, *OTHER], n_predict=1)
        finally:
            ends.set()
            thread.join()
    assert client.run.process.returncode == 0
