"""Folders of sessions: conversations are read once, whatever happens to the files in between."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.gguf_tools.errors import OutputError
from mtp_gguf.native import MTPLlama, NativeError
from mtp_gguf.native.sessions.session_file import read_header, read_session, write_session
from mtp_gguf.native.sessions.session_folder import SessionFolder, shared_length
from support import generation
from support.generation import TESTS, in_another_process, random_tokens, take
from support.models import Dial, Models
from support.tiny_llama import write_tiny_llama

A, B = random_tokens(300, 1, 120), random_tokens(300, 2, 120)
load = partial(generation.load, depth=3, n_ctx=1024, seed=5)


def answer(llm: MTPLlama, prompt: list[int], n: int = 8) -> tuple[list[int], int]:
    """The tokens that follow a prompt, and how many tokens were read for it."""
    llm.session.reset_stats()
    tokens = take(llm, n, prompt)
    return tokens, llm.mtp_stats.prefilled


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.session"))


def test_conversations_are_read_once(dial: Dial, tmp_path: Path) -> None:
    """Two of them alternate in one context, and go on in the next process."""
    path, folder = dial("tiny"), tmp_path / "new" / "sessions"
    with load(path) as llm:
        first = [*A, *answer(llm, A)[0], 5, 6]
        want = {"A": answer(llm, first)[0]}
        second = [*B, *answer(llm, B)[0], 7]
        want["B"] = answer(llm, second)[0]
    with load(path, session_dir=folder) as llm:
        answer(llm, A)
        assert not files(folder)
        answer(llm, B)
        assert len(files(folder)) == 1
        assert answer(llm, first) == (want["A"], 3)
        assert len(files(folder)) == 2
    assert folder.stat().st_mode & 0o77 == 0
    for file in files(folder):
        os.utime(file, (1, 1))
    with load(path, session_dir=folder) as llm:
        assert answer(llm, second) == (want["B"], 2)
        assert sum(file.stat().st_mtime > 1 for file in files(folder)) == 1
        assert answer(llm, [*first, *want["A"], 1])[1] <= 2
        before = len(files(folder))
    assert len(files(folder)) > before
    before = len(files(folder))
    with load(path, session_dir=folder) as llm:
        answer(llm, A[:200])
    assert len(files(folder)) == before
    for file in files(folder):
        assert read_header(file).n_tokens >= 256


def test_a_recurrent_model_goes_on_from_the_end_of_its_prompt(dial: Dial, tmp_path: Path) -> None:
    """The next prompt leaves out a part of the answer, so the end of the session is of no use."""
    path = dial("tiny")
    long, other = random_tokens(400, 3, 120), [9, *random_tokens(399, 3, 120)]
    follow = [*long, 1, 2, 3]
    with load(path) as llm:
        want = answer(llm, follow)[0]
    with load(path, session_dir=tmp_path) as llm:
        answer(llm, long)
        answer(llm, other)
        (file,) = files(tmp_path)
        assert read_header(file).earlier == (400 - 64,)
        assert answer(llm, follow) == (want, 64 + 3)
        written = {file: file.stat().st_ino for file in files(tmp_path)}
        answer(llm, long)
        answer(llm, other)
        assert written.items() <= {file: file.stat().st_ino for file in files(tmp_path)}.items()


def test_a_prompt_that_shares_more_than_the_checkpoint(dial: Dial, tmp_path: Path) -> None:
    """After the long answer is written, the model goes on from the checkpoint."""
    path, long = dial("tiny"), random_tokens(400, 6, 120)
    follow = [*long[:380], 9, 8, 7]
    with load(path) as llm:
        want = answer(llm, follow)[0]
    with load(path, session_dir=tmp_path) as llm:
        answer(llm, long, 300)
        assert answer(llm, follow) == (want, len(follow) - (400 - 64))


def test_other_models_use_any_shared_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer session takes the place of the shorter one that it continues."""
    path, folder = write_tiny_llama(tmp_path / "llama.gguf"), tmp_path / "sessions"
    with load(path, depth=0) as llm:
        long = [*A, *answer(llm, A)[0], *B]
        want = answer(llm, [*long[:450], 1, 2])[0]
    options: dict[str, Any] = {"depth": 0, "session_dir": folder}
    for prompt in (A, long):
        with load(path, **options) as llm:
            answer(llm, prompt)
        assert len(files(folder)) == 1
    with load(path, **options) as llm:
        assert answer(llm, [*long[:450], 1, 2]) == (want, 2)
    with pytest.warns(UserWarning, match="drafting nothing"):
        opened = load(path, **{**options, "depth": "auto"}, lookup=False)
    with opened as llm:
        assert answer(llm, [*long[:450], 1, 2])[1] == 1
    for file in files(folder):
        if read_header(file).n_tokens < 512:
            file.unlink()
    assert files(folder)
    monkeypatch.setattr(MTPLlama, "load_session", None)
    with load(path, **{**options, "n_ctx": 512}) as llm:  # which has no room for it
        assert answer(llm, [*long[:450], 1, 2])[1] == 452


def test_damaged_foreign_and_vanishing_files(
    dial: Dial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dial("tiny")
    with load(path, session_dir=tmp_path) as llm:
        prompt = [*A, *answer(llm, A)[0], 5]
    (good,) = files(tmp_path)
    data = good.read_bytes()
    good.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # its header and tokens are whole
    for name, contents in {"a": b"", "b": b"hello", "c": data[:100], "d": data[:-1]}.items():
        (tmp_path / f"{name}.session").write_bytes(contents)
    (tmp_path / "e.session").mkdir()
    (tmp_path / "f.session").symlink_to(tmp_path / "none")
    with load(path, session_dir=tmp_path) as llm:
        assert answer(llm, prompt)[1] == len(prompt)
    shutil.copy(good, tmp_path / "other.session")
    (tmp_path / "other.session").write_bytes(data)
    with load(path, session_dir=tmp_path) as llm:
        assert answer(llm, prompt)[1] <= 2  # the next best one
    really_find = SessionFolder.find
    offered: list[Any] = []

    def find(self: SessionFolder, *args: Any, **options: Any) -> Any:
        found = really_find(self, *args, **options)
        offered.extend(found)
        for file in files(tmp_path):
            if not file.is_dir():
                file.unlink()
        return found

    monkeypatch.setattr(SessionFolder, "find", find)
    with load(path, session_dir=tmp_path) as llm:
        assert answer(llm, prompt)[1] == len(prompt)
        assert offered
        shutil.rmtree(tmp_path)
        with pytest.warns(UserWarning, match="sessions are no longer saved: .* its folder"):
            answer(llm, B)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answer(llm, A)


def test_sessions_of_other_models_are_not_offered(
    dial: Dial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(dial("tiny"), session_dir=tmp_path) as llm:
        prompt = [*A, *answer(llm, A)[0], 5]
    with load(dial("tiny"), session_dir=tmp_path, n_ctx=512) as llm:
        assert answer(llm, prompt)[1] <= 2
    monkeypatch.setattr(MTPLlama, "load_session", None)
    with load(dial("tiny"), session_dir=tmp_path, type_k=8) as llm:
        assert answer(llm, prompt)[1] == len(prompt)
    with pytest.raises(NativeError, match="session_dir: expected logits_all=False"):
        load(dial("tiny"), session_dir=tmp_path, logits_all=True)
    with pytest.raises(NativeError, match="session_size: expected 1 byte or more, found 0"):
        load(dial("tiny"), session_dir=tmp_path, session_size=0)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file: cannot be created: "):
        load(dial("tiny"), session_dir=tmp_path / "file")


def ones(n: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.ones(n, np.int32)


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path, 1_000_000)
    (tmp_path / "foreign.session").write_bytes(b"x" * 900_000)
    os.utime(tmp_path / "foreign.session", (0, 0))
    dead = tmp_path / ".gone.session.1234.partial"
    dead.write_bytes(b"left by a killed process")
    paths = []
    for i in range(3):
        path = folder.write(ones(i + 1), bytes(300_000), {})
        assert path
        os.utime(path, (i + 1, i + 1))
        paths.append(path)
    assert not dead.exists()
    folder.used(paths[0])
    assert folder.write(ones(9), bytes(300_000), {})
    assert [path.exists() for path in paths] == [True, False, True]
    assert folder.write(ones(9), bytes(2_000_000), {}) is None
    assert folder.write(ones(9), bytes(300_000), {})  # in the place of the one before
    assert [path.exists() for path in paths] == [True, False, True]
    assert (tmp_path / "foreign.session").exists()
    assert sum(p.stat().st_size for p in files(tmp_path) if p.stem != "foreign") <= 1_000_000


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path, 1_000_000)
    with ThreadPoolExecutor(1) as pool:
        with folder.locked():
            job = pool.submit(folder.write, ones(1), b"x", {})
            time.sleep(0.3)
            assert not job.done()
        assert job.result() in files(tmp_path)


def test_the_longest_is_found(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path, 10**9)
    for n in (3, 5, 7):
        folder.write(np.arange(n, dtype=np.int32), b"x", {"n": str(n)})
    write_session(tmp_path / "x.session", np.array([0, 1, 2, 3, 9], np.int32), b"x", {}, {})

    def lengths(n: int, more_than: int = 0, *, whole: bool = True, least: int = 0) -> list[int]:
        found = folder.find(
            list(range(n)),
            lambda header: header.n_tokens >= least,
            more_than=more_than,
            whole=whole,
        )
        return [match.length for match in found]

    assert lengths(20) == [7, 5, 3]
    assert lengths(7) == [5, 3]  # the last token has to be read
    assert lengths(20, 5) == [7]
    assert lengths(20, least=6) == [7]
    assert lengths(7, whole=False) == [6, 5, 4, 3]
    numbers = np.arange(9, dtype=np.int32)
    folder.write(numbers, b"x", {"n": "9"}, {n: np.zeros(1, np.uint8) for n in (2, 4, 6)})
    assert lengths(20) == [9, 7, 5, 3]
    assert lengths(7) == [6, 5, 3]
    assert lengths(6) == [5, 4, 3]
    assert lengths(6, 4) == [5]
    assert shared_length([], [1]) == 0
    folder.remove_prefixes(np.arange(6, dtype=np.int32), {"n": "5"})
    assert lengths(20) == [9, 7, 3]


AT_EXIT = """
import sys
from native.test_session_folder import A, MTPLlama, take
llm = MTPLlama(sys.argv[1], depth=3, n_ctx=1024, n_threads=1, seed=5, session_dir=sys.argv[2])
take(llm, 8, A)
"""


def test_the_end_of_python_closes_the_folder(dial: Dial, tmp_path: Path) -> None:
    done = in_another_process(AT_EXIT, dial("tiny"), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(files(tmp_path)) == 1


CLIENT = """
import json, random, sys
from pathlib import Path
from native.test_session_folder import answer, load
model, folder, size, seed, asked, stop = sys.argv[1:]
conversations, rng = json.loads(Path(asked).read_text()), random.Random(seed)
turns = [0] * len(conversations)
with load(model, session_dir=folder, session_size=int(size)) as llm:
    print("ready", flush=True)
    while not Path(stop).exists():
        number = rng.randrange(len(turns))
        prompt, want = conversations[number][turns[number] % 3]
        found = answer(llm, prompt)[0]
        assert found == want, f"turn {turns[number]} of {number}: {found}, not {want}"
        turns[number] += 1
"""
Turns = list[tuple[list[int], list[int]]]


def turns_of(llm: MTPLlama, seed: int) -> Turns:
    """The prompts of a conversation, and what follows each."""
    prompt, turns = random_tokens(300, seed, 120), []
    for turn in range(3):
        tokens = take(llm, 8, prompt)
        turns.append((prompt, tokens))
        prompt = [*prompt, *tokens, turn]
    return turns


@contextmanager
def clients(model: Path, scratch: Path, folder: Path, size: int, talks: list[Turns]) -> Any:
    """Starts processes that continue random conversations, until the block ends."""
    asked, stop = scratch / "asked.json", scratch / "stop"
    asked.write_text(json.dumps(talks))
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        words = map(str, (model, folder, size, len(started), asked, stop))
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", CLIENT, *words], cwd=TESTS, **pipes))
        return started[-1]

    try:
        yield start
    finally:
        stop.touch()
        ended = [(child.communicate(timeout=60)[1], child.returncode) for child in started]
        stop.unlink()
    for stderr, code in ended:
        assert not stderr
        assert code in (0, -signal.SIGKILL)


def check_folder(folder: SessionFolder) -> None:
    """No file is damaged, and all of them, unfinished ones too, are within the size."""
    with folder.locked():
        assert sum(p.stat().st_size for p in folder.path.iterdir()) <= folder.size
        for path in files(folder.path):
            read_session(path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("n_clients", "n_talks", "kills"),
    [(2, 15, 6), pytest.param(8, 200, 100, marks=pytest.mark.slow)],
)
def test_processes_that_are_killed_share_a_folder(
    models: Models, tmp_path: Path, n_clients: int, n_talks: int, kills: int
) -> None:
    """Each answer is right, and the folder, which has room for a third, within its size."""
    path, rng = models.gguf(), random.Random(2)
    with load(path) as llm:
        talks = [turns_of(llm, seed) for seed in range(n_talks)]
        llm.save_session(tmp_path / "one")
    folder = SessionFolder(tmp_path / "folder", n_talks * (tmp_path / "one").stat().st_size // 3)
    with clients(path, tmp_path, folder.path, folder.size, talks) as start:
        running = [start() for _ in range(n_clients)]
        for _ in range(kills):
            victim = running.pop(rng.randrange(n_clients))
            assert victim.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, 0.5))
            victim.kill()
            check_folder(folder)
            running.append(start())
        for child in running:
            child.stdout.readline()
    check_folder(folder)
    assert len(files(folder.path)) > n_talks // 5
    assert folder.write(ones(1), b"x", {})
    assert {p.suffix or p.name for p in folder.path.iterdir()} == {".session", ".lock"}


@pytest.mark.parametrize("n_talks", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_nothing_is_lost_that_fits(models: Models, tmp_path: Path, n_talks: int) -> None:
    """After several processes have ended, each conversation goes on where it ended."""
    path, folder = models.gguf(), tmp_path / "folder"
    with load(path) as llm:
        talks = [turns_of(llm, seed) for seed in range(n_talks)]
    with clients(path, tmp_path, folder, 10**9, [turns[:1] * 3 for turns in talks]) as start:
        for child in [start(), start()]:
            child.stdout.readline()
        wait_until = time.monotonic() + 60
        while len(files(folder)) < n_talks and time.monotonic() < wait_until:
            time.sleep(0.1)
    with load(path, session_dir=folder) as llm:
        for turns in talks:
            prompt, want = turns[1]
            assert answer(llm, prompt) == (want, 2)  # the last token of the answer, and a new one


def test_why_a_prompt_was_read_again(dial: Dial, tmp_path: Path) -> None:
    """The sentence of each way to reuse a part of a prompt."""
    path = dial("tiny")
    prompt = [(7 * n) % 50 + 3 for n in range(400)]

    def reuse(llm: MTPLlama, tokens: list[int]) -> tuple[int, str]:
        take(llm, 2, tokens)
        found = llm.prompt_reuse
        assert found is not None
        assert found.tokens == len(tokens)
        return found.reused, found.why

    with load(path, session_dir=tmp_path) as llm:
        assert llm.prompt_reuse is None
        assert reuse(llm, prompt) == (0, "nothing that is kept begins like it")
        kept = llm.n_tokens
        reused, why = reuse(llm, [*llm.input_ids[:kept].tolist(), 5, 6, 7])
        assert reused == kept
        assert why == f"the text that was kept ends at token {kept}, and the rest is new"
        reused, why = reuse(llm, [*prompt[:390], 1, 2, 3])
        assert reused < 390
        assert why == (f"390 tokens are the same, but the model can only go on from token {reused}")
    with load(path, session_dir=tmp_path) as llm:
        reused, why = reuse(llm, [*prompt, 1])
        assert reused > 0
    with load(path, session_dir=tmp_path, type_k=8) as llm:
        reused, why = reuse(llm, [*prompt, 1])
        assert reused == 0
        assert re.match(r"a session has \d+ tokens of it: .*: type_k: expected 'Q8_0'", why)
