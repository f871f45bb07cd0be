"""A bench that is stopped, killed or short of time leaves what it measured."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.bench import tune as tuning
from mtp_gguf.bench.options import BenchOptions
from mtp_gguf.bench.plan import Plan
from mtp_gguf.bench.report.page import render_report
from mtp_gguf.bench.result import BenchResult
from mtp_gguf.bench.run import Watcher, run_bench
from mtp_gguf.bench.search import Space
from mtp_gguf.bench.tune import TuneOptions, tune
from mtp_gguf.gguf_tools.machine.system import PATCHED, STOCK
from mtp_gguf.gguf_tools.profile import profile_path, read_profiles
from mtp_gguf.native.libraries.exact import kernels
from mtp_gguf.server.find import VARIABLE
from support.commands import invoke
from support.stand_in_server import PATCHED_HELP, STOCK_HELP, write_stand_in

_HANGS = 120.0  # seconds after which a child is taken to hang


def options(**changes: Any) -> BenchOptions:
    small = {"kinds": ["code", "json"], "depths": (0, 1), "tokens": 8, "rounds": 2, "prompts": 1}
    return BenchOptions(**{**small, "threads": 1, **changes})


def interrupt(when: Callable[[str], bool]) -> Callable[[float, str], None]:
    """Ctrl-C in the part whose text is named so."""

    def progress(_share: float, text: str) -> None:
        if when(text):
            raise KeyboardInterrupt

    return progress


def states(result: BenchResult) -> dict[str, str]:
    return {part.what.partition(":")[0]: part.state for part in result.plan}


def test_every_part_is_saved_and_makes_a_page(dial: Any) -> None:
    """Whenever it is killed, what lies there is a whole JSON and a whole page."""
    saved: list[BenchResult] = []
    plans: list[Plan] = []
    watcher = Watcher(planned=plans.append, saved=saved.append)
    run_bench(dial("tiny", hit=0.9), options(), watcher)
    assert len(plans) == 1
    done = [sum(part.state == "done" for part in r.plan) for r in saved]
    assert done == sorted(done)
    assert done[0] == 1
    assert [r.state for r in saved] == ["running"] * (len(saved) - 1) + ["done"]
    assert not saved[0].texts
    assert saved[0].cycles
    pages = [render_report(r) for r in saved]
    assert all("This benchmark is still running; not measured: " in page for page in pages[:-2])
    assert "This benchmark" not in pages[-1]


@pytest.mark.parametrize("at", ["texts", "a prompt of 512"])
def test_interrupted(dial: Any, at: str) -> None:
    """Ctrl-C in a part: its finished rounds and the parts before it are the result."""
    parts = (at, "texts, round 2 of 2") if at == "texts" else (at,)
    watcher = Watcher(interrupt(lambda text: text in parts))
    result = run_bench(dial("tiny", hit=0.9), options(), watcher)
    assert result.state == "stopped"
    found = states(result)
    assert found["costs of a cycle"] == "done"
    assert found["a prompt of 512"] == "planned"
    speeds = {t.depth: t.tok_s.n for t in result.texts}
    if at == "texts":
        assert found["texts"] == "planned"
        assert speeds == {}
        assert result.analysis is None
    else:
        assert found["texts"] == "done"
        assert speeds == {0: 2, 1: 2}
        assert result.analysis is not None
    page = render_report(result)
    assert "This benchmark was stopped; not measured: " in page


def test_interrupted_between_rounds(dial: Any) -> None:
    watcher = Watcher(interrupt(lambda text: text == "texts, round 2 of 2"))
    result = run_bench(dial("tiny", hit=0.9), options(), watcher)
    assert states(result)["texts"] == "fewer rounds"
    assert {t.depth: t.tok_s.n for t in result.texts} == {0: 1, 1: 1}


def test_before_anything_is_measured_there_is_no_result(dial: Any) -> None:
    watcher = Watcher(interrupt(lambda text: text == "estimating the duration"))
    with pytest.raises(KeyboardInterrupt):
        run_bench(dial("tiny", hit=0.9), options(), watcher)


def test_out_of_time(dial: Any) -> None:
    """The clock jumps once the first round of texts is generated: what is not needed is skipped."""
    now = [0.0]

    def progress(_share: float, text: str) -> None:
        now[0] += 2000.0 if text == "texts, round 1 of 2" and not now[0] else 0.0

    watcher = Watcher(progress, clock=lambda: now[0])
    result = run_bench(dial("tiny", hit=0.9), options(budget=1000.0), watcher)
    assert result.state == "done"
    found = states(result)
    assert found["texts"] == "fewer rounds"
    assert found["a prompt of 512"] == "skipped"
    assert result.prefill is None
    assert found["texts token by token"] == found["sha256 of the file"] == "done"
    assert result.samples
    assert result.model.sha256


@pytest.mark.thorough
def test_ctrl_c_of_the_command(dial: Any, tmp_path: Path) -> None:
    """A real signal to a real process, once it has written something."""
    out = tmp_path / "results"
    command = [sys.executable, "-c", "from mtp_gguf.cli.app import main; main()"]
    command += ["bench", str(dial("tiny", hit=0.9)), "--full", "-n", "192", "--rounds", "20"]
    command += ["--prompts", "code", "--depths", "0,1", "--no-server", "-t", "1", "-o", str(out)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        until = time.monotonic() + _HANGS
        data = out / "bench.json"
        while not (data.exists() and json.loads(data.read_text("utf-8"))["texts"]):
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        stdout, stderr = child.communicate(timeout=_HANGS)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130
    assert "plan: about" in stderr
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("mtp-gguf: interrupted; not measured: texts token by token; ")
    assert f"written: {out / 'report.html'}" in stdout
    assert "depth        tok/s" in stdout
    record = json.loads((out / "bench.json").read_text("utf-8"))
    assert record["state"] == "stopped"
    assert {p.name for p in out.iterdir()} == {"bench.json", "report.html"}
    assert "This benchmark was stopped" in (out / "report.html").read_text("utf-8")


@pytest.mark.thorough
def test_a_folder_of_its_own(dial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = dial("tiny", hit=0.9)
    command = ["bench", path, "--no-server", "--prompts", "code", "--depths", "0,1", "-n", "4"]
    command += ["--rounds", "1", "-t", "1"]
    for expected in (f"{path.stem}.bench", f"{path.stem}.bench-2"):
        done = invoke(*command)
        assert done.exit_code == 0, done.output
        assert f"written: {Path(expected) / 'report.html'}" in done.stdout
        assert (tmp_path / expected / "bench.json").exists()
    quiet = invoke(*command, "--json")
    assert json.loads(quiet.stdout)["format"] == 4
    assert len(list(tmp_path.iterdir())) == 2


def test_tune_interrupted(dial: Any) -> None:
    """After the depths: what was found, and no profile."""
    path = dial("tiny", hit=0.9)
    space = Space((1, 2), rollbacks=("snapshot", "host"))
    small = TuneOptions(space, None, ["code"], tokens=8, rounds=1, threads=1)
    tuned = tune(path, small, interrupt(lambda text: "host" in text))
    assert tuned.profile is None
    assert {c.settings.depth for c in tuned.search.tried} == {0, 1, 2}
    assert not profile_path(path).exists()
    with pytest.raises(KeyboardInterrupt):
        tune(path, small, interrupt(lambda text: text == "depth 1"))


def test_tune_looks_for_a_place_before_it_measures(
    dial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full, or cannot be written, is told at once and not after minutes."""
    path = dial("tiny", hit=0.9)
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda p: real(p)._replace(free=0))
    done = invoke("tune", path, "-t", "1")
    assert done.exit_code == 1
    assert done.stderr.startswith(f"mtp-gguf: {profile_path(path)}: needs ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not profile_path(path).exists()


def test_what_tune_found_is_kept_though_nobody_reads_it(dial: Any, tmp_path: Path) -> None:
    """`mtp-gguf tune | head -n 0`"""
    path = tmp_path / "m.gguf"
    path.symlink_to(dial("tiny", hit=0.9))
    quiet = "from mtp_gguf.bench import tune; tune.warnings_of = lambda *_: ()"
    command = [sys.executable, "-c", f"{quiet}; from mtp_gguf.cli.app import main; main()"]
    command += ["tune", str(path), "--budget", "1s", "-n", "4", "--rounds", "1", "-t", "1"]
    command += ["--prompts", "code", "--max-depth", "1"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=_HANGS, check=False
        )
    assert "Traceback" not in done.stderr
    assert read_profiles(profile_path(path))[0].candidates


def test_tune_as_json(dial: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "warnings_of", lambda *_: ())  # the machine may be busy
    other = {PATCHED: STOCK_HELP, STOCK: PATCHED_HELP}[kernels()]
    server = write_stand_in(tmp_path / "server", other)
    monkeypatch.setenv(VARIABLE, str(server))
    path = tmp_path / "m.gguf"
    path.symlink_to(dial("tiny", hit=0.9))
    options = ("--budget", "1s", "-n", "4", "--rounds", "1", "-t", "1", "--prompts", "code")
    done = invoke("tune", path, *options, "--max-depth", "1", "--json")
    assert done.exit_code == 0, done.output
    assert f"this measures {kernels()} kernels; `serve {path}` runs " in done.stderr
    assert f"({server}) and will not use the result" in done.stderr
    found = json.loads(done.stdout)
    assert found["profile"] == str(profile_path(path))
    assert found["settings"]["depth"] == read_profiles(profile_path(path))[0].settings.depth
    assert found["tried"]
    assert not found["interrupted"]


def test_tune_out_of_time(dial: Any) -> None:
    now = [0.0]

    def progress(_share: float, text: str) -> None:
        now[0] += 500.0 if text == "depth 2" else 0.0

    space = Space((1, 2), rollbacks=("snapshot", "host"), draft_threads=(0, 1))
    small = TuneOptions(space, 600.0, ["code"], tokens=8, rounds=3, threads=1)
    tuned = tune(dial("tiny", hit=0.9), small, progress, clock=lambda: now[0])
    assert set(tuned.skipped) == {"rollbacks", "draft_threads"}
    assert tuned.profile is not None
    assert {c.settings.depth for c in tuned.search.tried} == {0, 1, 2, "auto"}
