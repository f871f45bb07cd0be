"""`publish --cluster`, on processes of this machine, against the conversion in one process."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from signal import SIGINT, SIGKILL
from threading import Event
from typing import Any

import numpy as np
import psutil
import pytest

from support.checkpoint_edits import edit_tensors
from support.checkpoints import TINY, Array
from support.commands import HEARS_SIGNALS, held, invoke
from support.hub_commands import environment
from support.models import Models
from support.ports import free_port
from support.upload_hub import TARGET, UploadHub

pytest.importorskip("distributed")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

MODEL = "somebody/Tiny-3.5"
TOKEN = "hf_thisIsNoRealToken"
# Many units of a tiny model; workers need none of this.
SMALL_UNITS = """
from mtp_gguf.convert import pipeline
from mtp_gguf.publish import units
pipeline._RESUMABLE_VALUES = 256 * 31
units._SMALLEST = 1 << 14
"""
_TIMEOUT = 300
RUN = "from mtp_gguf.cli import main; main()"


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Path:
    return models.checkpoint(replace(TINY, name="clustered", layers=4, shards=6))


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[UploadHub]:
    with UploadHub(MODEL, {"main": checkpoint}, token=TOKEN) as hub:
        yield hub


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a call without a cluster."""
    work = tmp_path_factory.mktemp("expected")
    with UploadHub(MODEL, {"main": checkpoint}, token=TOKEN) as hub:
        told_by(hub, work, None)
    return published(work)


@contextmanager
def started(
    hub: UploadHub,
    work: Path,
    cluster: str | None,
    *options: str,
    prelude: str = SMALL_UNITS,
    upload: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """`publish` as a process of its own group, with its folder in `work`.

    upload: by the workers of the cluster, if there is one.
    """
    words = ["publish", MODEL, "--types", "Q4_K_M,Q8_0", "--to", TARGET, "-o", "out", *options]
    words += ["--cluster", cluster] if cluster else []
    if upload:
        words += ["--worker-upload"] if cluster else []
    else:
        words += ["--no-upload"]
    env = environment(hub, work / "home", HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1")
    (work / "tmp").mkdir(exist_ok=True)
    env["TMPDIR"] = str(work / "tmp")
    command = [sys.executable, "-c", f"{HEARS_SIGNALS}\n{prelude}\n{RUN}", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=env, cwd=work, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def told_by(hub: UploadHub, work: Path, *arguments: Any, code: int = 0, **how: Any) -> str:
    """What `publish` says on standard error, which ends with this code."""
    with started(hub, work, *arguments, **how) as process:
        told: str = process.communicate(timeout=_TIMEOUT)[1]
    assert process.returncode == code, told
    return told


def published(work: Path) -> dict[str, bytes]:
    """The files of a release without its record."""
    return {n: d for n, d in held(work / "out").items() if n != "release.json"}


class At:
    """A hub's trouble that is none: at the request for weights of this number, it does something.

    The request is answered once that is done.
    """

    def __init__(self, number: int, action: Callable[[], None]) -> None:
        self.left, self.action, self.done = number, action, Event()

    def __call__(self) -> str:
        self.left -= 1
        if self.left == 0:
            self.action()
            self.done.set()
        return ""


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """None where the process has ended, as a kill by another thread may make it at any moment."""
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    found = []
    for child in children:
        with suppress(psutil.Error):  # it has just ended
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.thorough
def test_the_bytes_of_one_process(
    hub: UploadHub, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """A worker is lost, and the token is on no command line."""
    lines: list[str] = []

    def lose_one() -> None:
        first, *_ = found = workers(process)
        lines.extend(" ".join(worker.cmdline()) for worker in found)
        first.kill()

    hub.trouble = at = At(12, lose_one)
    with started(hub, tmp_path, "local:2") as process:
        stdout, told = process.communicate(timeout=_TIMEOUT)
    assert process.returncode == 0, told
    assert at.done.is_set()
    assert published(tmp_path) == expected
    assert re.search(r"local:2: 2 workers, dashboard at http://127\.0\.0\.1:\d+/status\n", told)
    assert len(lines) >= 2
    for text in (stdout, told, *lines, *(d.decode("latin-1") for d in held(tmp_path).values())):
        assert TOKEN not in text


@pytest.mark.thorough
@pytest.mark.parametrize("number", [SIGINT, pytest.param(SIGKILL, marks=pytest.mark.slow)])
def test_goes_on_after_a_signal(
    number: int, hub: UploadHub, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """The whole process group gets it, as from a terminal; a kill only the client."""

    def stop() -> None:
        if number == SIGINT:
            os.killpg(process.pid, number)
        else:
            process.kill()
        process.wait(60)

    hub.trouble = at = At(12, stop)
    with started(hub, tmp_path, "local:2") as process:
        children: list[psutil.Process] = []
        while not at.done.wait(0.05) and process.poll() is None:
            children = workers(process) or children
        told = process.communicate(timeout=_TIMEOUT)[1]
    if number == SIGINT:
        assert process.returncode == 128 + SIGINT
        assert told.splitlines()[-1] == (
            "mtp-gguf: interrupted; the same command goes on from here"
        ), told
        assert told.count("mtp-gguf:") == 2
    psutil.wait_procs(children, timeout=60)
    assert not [child for child in children if child.is_running()], "no worker outlives the client"
    left = {Path(name).suffix for name in held(tmp_path / "out")}
    assert left == {".partial", ".done"}
    told_by(hub, tmp_path, None)
    assert published(tmp_path) == expected


SHARDS = ("--split-max-size", "60K", "--sidecar", "Q8_0")


@pytest.fixture(scope="module")
def shards(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files in shards and a head alone, of a call without a cluster."""
    work = tmp_path_factory.mktemp("shards")
    with UploadHub(MODEL, {"main": checkpoint}, token=TOKEN) as hub:
        told_by(hub, work, None, *SHARDS)
    return published(work)


@pytest.mark.thorough
def test_workers_upload_what_they_write(
    hub: UploadHub, shards: dict[str, bytes], tmp_path: Path
) -> None:
    """A worker is lost. Files are nowhere but on the hub, in folders of workers for a while."""

    def lose_one() -> None:
        workers(process)[0].kill()

    hub.trouble = at = At(6, lose_one)
    with started(hub, tmp_path, "local:2", *SHARDS, upload=True) as process:
        stdout, told = process.communicate(timeout=_TIMEOUT)
    assert process.returncode == 0, told
    assert at.done.is_set()
    assert hub.stored == shards
    assert len([name for name in shards if name.endswith(".gguf")]) > 5
    assert {*published(tmp_path)} == {"README.md"}
    assert all(f"{TARGET}/{name}: " in stdout for name in shards if name.endswith(".gguf"))
    left = [name for name in held(tmp_path) if ".gguf" in name]
    assert not left
    assert TOKEN in hub.tokens
    for text in (stdout, told, *(d.decode("latin-1") for d in held(tmp_path).values())):
        assert TOKEN not in text
    hub.received.clear()
    told_by(hub, tmp_path, None, *SHARDS, upload=True)
    assert not hub.received
    assert {*published(tmp_path)} == {"README.md"}, "nothing is converted again"


@pytest.mark.thorough
def test_uploads_by_workers_go_on_after_a_signal(
    hub: UploadHub, shards: dict[str, bytes], tmp_path: Path
) -> None:
    def stop() -> None:
        while len(hub.stored) < 2:
            time.sleep(0.05)
        os.killpg(process.pid, SIGINT)
        process.wait(60)

    hub.trouble = at = At(20, stop)
    with started(hub, tmp_path, "local:2", *SHARDS, upload=True) as process:
        told = process.communicate(timeout=_TIMEOUT)[1]
    assert process.returncode == 128 + SIGINT, told
    assert at.done.wait(_TIMEOUT)  # the process ends a moment before `stop` does
    before = {*hub.stored}
    assert before < {*shards}
    hub.received.clear()
    told_by(hub, tmp_path, "local:2", *SHARDS, upload=True)
    assert hub.stored == shards
    digests = {sha256(shards[name]).hexdigest() for name in before}
    assert not digests & {*hub.received}
    assert not [name for name in held(tmp_path) if ".gguf" in name]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--worker-upload",), "needs --cluster"),
        (("--worker-upload", "--cluster", "local:1", "--no-upload"), "expected an upload"),
        (("--remove-local", "--no-upload"), "expected an upload"),
        (("--worker-upload", "--cluster", "local:1", "--text", __file__), "no files here"),
        (("--sidecar", "Q9_K"), "Q9_K"),
        (("--split-max-size", "0"), "expected bytes, or a number and K, M or G"),
    ],
)
def test_options_that_contradict(words: tuple[str, ...], told: str, checkpoint: Path) -> None:
    done = invoke("publish", checkpoint, "--types", "Q8_0", "--to", "me/x", *words)
    assert done.exit_code == 2
    assert told in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.thorough
def test_a_unit_that_fails_three_times_ends_the_model(
    hub: UploadHub, expected: dict[str, bytes], tmp_path: Path
) -> None:
    """What is written stays for the next call, which may run without a cluster."""
    old = SMALL_UNITS + "units.version = lambda _: '0'\n"
    told = told_by(hub, tmp_path, "local:1", prelude=old, code=1)
    last = told.splitlines()[-1]
    assert "a part of the conversion failed 3 times: expected mtp-gguf 0 on every worker" in last
    assert not [*(tmp_path / "out").glob("*.gguf")]
    told_by(hub, tmp_path, None)
    assert published(tmp_path) == expected


@pytest.mark.thorough
def test_weights_that_cannot_be_written_leave_nothing(models: Models, tmp_path: Path) -> None:
    folder = models.copy(replace(TINY, name="broken"), tmp_path)

    def broken(tensors: dict[str, Array]) -> None:
        for name, array in tensors.items():
            if name.endswith("down_proj.weight"):
                tensors[name] = np.full_like(array, np.nan)

    edit_tensors(folder, broken)
    words = (*("--types", "Q8_0", "--to", "me/x", "-o", tmp_path / "out", "--no-upload"),)
    command = [sys.executable, "-c", RUN, "publish", folder, *words, "--cluster", "local:1"]
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, timeout=_TIMEOUT
    )
    assert done.returncode == 1
    assert "cannot be written as Q8_0" in done.stderr.splitlines()[-1]
    assert not held(tmp_path / "out")


@pytest.mark.parametrize("name", ["local:0", "local:x", "127.0.0.1:8786", "http://x:1", "tcp://x"])
def test_names_of_clusters(name: str, checkpoint: Path) -> None:
    words = ("--types", "Q8_0", "--to", "me/x", "--cluster", name)
    done = invoke("publish", checkpoint, *words)
    assert done.exit_code == 2
    assert "expected tcp://HOST:PORT or local:N" in " ".join(done.stderr.split())


def test_without_the_extra(hub: UploadHub, tmp_path: Path) -> None:
    absent = "import sys; sys.modules['distributed'] = None"
    told = told_by(hub, tmp_path, "local:1", prelude=absent, code=1)
    assert told.endswith("pip install 'mtp-gguf[cluster]'\n")


def test_without_a_scheduler(hub: UploadHub, tmp_path: Path) -> None:
    soon = "from mtp_gguf.publish import cluster; cluster._CONNECT = 1"
    address = f"tcp://127.0.0.1:{free_port()}"
    told = told_by(hub, tmp_path, address, prelude=soon, code=1)
    assert f"mtp-gguf: {address}: the cluster cannot be used: " in told
    assert told.count("\n") == 1


class Machines:
    """A scheduler and two workers, as processes that `dask` starts."""

    def __init__(self, hub: UploadHub, work: Path, stack: ExitStack) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self._env = environment(hub, work / "home", HF_TOKEN=TOKEN)
        self._work = work
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        stack.callback(self.stop)
        self.start()

    def start(self) -> None:
        """Start what does not run."""
        port = self.address.rpartition(":")[2]
        commands = {
            "scheduler": ["scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard"],
            **{
                f"worker {i}": ["worker", self.address, "--nthreads", "1", "--no-dashboard"]
                for i in range(2)
            },
        }
        for name, words in commands.items():
            if name not in self._processes or self._processes[name].poll() is not None:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "dask", *words],
                    env=self._env,
                    cwd=self._work,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )

    def kill(self, name: str) -> None:
        process = psutil.Process(self._processes[name].pid)
        for child in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                child.kill()
        self._processes[name].wait()

    def stop(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is None:
                self.kill(name)


@pytest.mark.slow
def test_random_kills(hub: UploadHub, expected: dict[str, bytes], tmp_path: Path) -> None:
    """Of workers, the scheduler and the client: the right bytes after a second call, no parts."""
    chance = random.Random(0)
    quick = f"{SMALL_UNITS}\nfrom mtp_gguf.publish import cluster; cluster._CONNECT = 5\n"
    ended: list[tuple[str, int | None]] = []
    with ExitStack() as stack:
        machines = Machines(hub, tmp_path, stack)
        began = time.monotonic()
        for number in range(50):
            work = tmp_path / str(number)
            work.mkdir()
            victim = chance.choice(("worker 0", "worker 1", "scheduler", "client"))
            with started(hub, work, machines.address, prelude=quick) as process:
                machines.start()
                hub.trouble = at = At(chance.randrange(1, 20), lambda: None)
                while not at.done.wait(0.05) and process.poll() is None:
                    pass
                if victim == "client":
                    process.kill()
                else:
                    machines.kill(victim)
                if victim == "scheduler":  # its workers end some time after it
                    machines.kill("worker 0")
                    machines.kill("worker 1")
                    machines.start()
                told = process.communicate(timeout=_TIMEOUT)[1]
            machines.start()
            ended.append((victim, process.returncode))
            if process.returncode > 0:
                assert told.splitlines()[-1].startswith(f"mtp-gguf: {machines.address}: "), told
            if process.returncode:
                told_by(hub, work, machines.address, prelude=quick)
            assert published(work) == expected, (number, victim)
        print(json.dumps(ended), f"{time.monotonic() - began:.0f} s")
