"""`mtp-gguf up`: what it plans, and that a run can stop at any step and be continued."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import TINY
from support.commands import invoke, spawn, succeed
from support.hub_commands import downloaded, environment, run_commands
from support.hub_server import Hub
from support.models import DEMO, Models
from support.stand_in_server import write_stand_in

Words = tuple[object, ...]
NAME = "somebody/Demo-GGUF"
CHECKPOINT = "somebody/Demo"


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole model and one without a head."""
    folder = tmp_path_factory.mktemp("ggufs")
    for name, *options in (
        ("Demo-Q4_K_M.gguf", "--mtp-f16"),
        ("Demo-Q8_0.gguf", "--quant", "Q8_0", "--no-mtp"),
    ):
        result = invoke("convert", DEMO, "-o", folder / name, *options)
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def repository(ggufs: Path, tmp_path: Path) -> Path:
    """A repository with these files and a card that names the original."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for path in ggufs.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "README.md").write_text(f"---\nbase_model: {CHECKPOINT}\n---\n# Card\n")
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[Hub]:
    with Hub(NAME, {"main": repository}) as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The hub's cache; commands run in the folder that it is in."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work" / "home"


@pytest.fixture
def server(tmp_path: Path) -> Path:
    return write_stand_in(tmp_path / "llama server")


@pytest.fixture
def where(server: Path, free_port: int) -> Words:
    """Options that name the server and its port."""
    return ("--llama-server", server, "--port", free_port)


def steps(fields: Any) -> dict[str, str]:
    """The steps of a plan that are left, with their commands."""
    return {s["name"]: s["command"] for s in fields["steps"] if s["left_out"] is None}


class TestPlan:
    def test_of_every_kind_of_model(
        self,
        hub: Hub,
        home: Path,
        ggufs: Path,
        server: Path,
        free_port: int,
        where: Words,
    ) -> None:
        """What is missing is planned, with sizes; nothing but the card is downloaded for it."""
        options = ("--dry-run", "--json", *where)
        whole, trunk = f"hf://{NAME}/Demo-Q4_K_M.gguf", f"hf://{NAME}/Demo-Q8_0.gguf"
        local = ggufs / "Demo-Q8_0.gguf"
        whole_on_hub, lost, folder, unknown, named, plain = run_commands(
            hub,
            home,
            *(
                ("up", *words, *options)
                for words in (
                    (NAME,),
                    (f"{NAME}:Q8_0",),
                    (DEMO, "--fastmtp-corpus", DEMO / "config.json"),
                    (local,),
                    (local, "--from", DEMO, "--skip", "tune"),
                    (f"{NAME}:Q8_0", "--skip", "graft", "--skip", "serve"),
                )
            ),
        )
        assert steps(whole_on_hub.fields) == {
            "download": f"hf download {NAME} Demo-Q4_K_M.gguf",
            "tune": f"mtp-gguf tune {whole} --budget 1m",
            "serve": f"mtp-gguf serve {whole} --host 127.0.0.1 --port {free_port} "
            f"--llama-server '{server}' --example",
        }
        [download, *_] = whole_on_hub.fields["steps"]
        assert download["bytes"] == (ggufs / "Demo-Q4_K_M.gguf").stat().st_size
        found = steps(lost.fields)
        assert [*found] == ["graft", "tune", "serve"]
        assert found["graft"] == (
            f"mtp-gguf graft {trunk} --from {CHECKPOINT} -o Demo-Q8_0-MTP.gguf"
        )
        assert found["tune"] == "mtp-gguf tune Demo-Q8_0-MTP.gguf --budget 1m"
        found = steps(folder.fields)
        assert found["convert"] == (
            f"mtp-gguf convert {DEMO} -o Demo_Model-5.5M-Q4_K_M.gguf --quant Q4_K_M --mtp-f16 "
            f"--fastmtp --fastmtp-corpus {DEMO / 'config.json'}"
        )
        found = steps(unknown.fields)
        assert [*found] == ["serve"]
        assert found["serve"].split()[2:3] == [str(local)]
        assert "--no-draft" not in found["serve"]
        assert [*steps(named.fields)] == ["graft", "serve"]
        assert [*steps(plain.fields)] == ["download"]
        assert downloaded(home) == {"README.md"}
        assert [path.name for path in home.parent.iterdir()] == ["home"]

    def test_of_a_checkpoint_on_the_hub(self, home: Path, where: Words) -> None:
        options = (*where, "--dry-run", "--json")
        with Hub(CHECKPOINT, {"main": DEMO}) as hub:
            [done] = run_commands(hub, home, ("up", CHECKPOINT, *options))
        assert steps(done.fields)["convert"] == (
            f"mtp-gguf convert {CHECKPOINT} -o Demo-5.5M-Q4_K_M.gguf --quant Q4_K_M --mtp-f16"
        )
        [convert, *_] = done.fields["steps"]
        assert convert["bytes"] == (DEMO / "model.safetensors").stat().st_size
        assert "model.safetensors" not in downloaded(home)

    @pytest.mark.parametrize("head", [True, False], ids=["with a head", "that lost its head"])
    def test_names_the_file_as_convert_does(self, head: bool, models: Models, where: Words) -> None:
        whole = models.checkpoint(TINY)
        model = whole if head else models.checkpoint(replace(TINY, name="bare", mtp=False))
        options = ("--quant", "Q8_0", "--from", whole, "--dry-run", "--json")
        planned = steps(json.loads(succeed("up", model, *options, *where)))["convert"].split()
        [file] = json.loads(succeed("convert", model, *options))["files"]
        assert planned[planned.index("-o") + 1] == file["path"]
        assert ("--from" in planned) != head

    @pytest.mark.parametrize("key", [("--api-key", "secret"), ("--api_key=secret",)])
    def test_prints_no_api_key(self, key: tuple[str, ...], ggufs: Path, where: Words) -> None:
        words = ("up", ggufs / "Demo-Q4_K_M.gguf", "--skip", "tune", "--dry-run")
        for options in ((), ("--json",)):
            plan = succeed(*words, *where, *options, "--", *key)
            assert "***" in plan
            assert "secret" not in plan

    def test_leaves_out_what_is_done(
        self, hub: Hub, home: Path, ggufs: Path, server: Path, free_port: int
    ) -> None:
        """An earlier run's file, download and profile are used; a foreign file is not."""
        (home.parent / "Demo_Model-5.5M-Q4_K_M.gguf").symlink_to(ggufs / "Demo-Q4_K_M.gguf")
        (home.parent / "Demo_Model-5.5M-Q8_0.gguf").write_text("mine")
        short = ("--budget", "1s", "--prompts", "code", "-t", "1", "--max-depth", "1")
        options = ("--port", free_port, "--dry-run", "--json")
        tuned, downloaded_and_tuned, converted, foreign = run_commands(
            hub,
            home,
            ("tune", NAME, *short),
            ("up", NAME, *options),
            ("up", DEMO, *options, "--llama-server", server),
            ("up", DEMO, *options, "--llama-server", server, "--quant", "q8_0"),
        )
        assert tuned.code == 0, tuned.stderr
        found = steps(downloaded_and_tuned.fields)
        assert not {"download", "tune"} & found.keys()
        assert "convert" not in steps(converted.fields)
        assert foreign.code == 1
        assert "Demo_Model-5.5M-Q8_0.gguf" in foreign.last

    def test_what_cannot_be(self, hub: Hub, home: Path, ggufs: Path, where: Words) -> None:
        options = (*where, "--dry-run")
        broken = home.parent / "broken"
        broken.mkdir()
        (broken / "model.safetensors").symlink_to(DEMO / "model.safetensors")
        (broken / "config.json").write_text("{}")
        cases = {
            (broken,): f"mtp-gguf: {broken}/config.json: architectures: expected one of",
            ("nothing",): "nothing: expected a GGUF file, a checkpoint folder or a model on the "
            "hub, found none; models on the hub are named OWNER/NAME",
            (DEMO, "--skip", "convert"): "--skip convert: expected its result, found none; leave "
            "--skip out, or run: mtp-gguf convert",
            (f"{NAME}:Q9",): f"no Q9 on the hub; there are {NAME}:Q4_K_M, {NAME}:Q8_0",
            (ggufs / "Demo-Q4_K_M.gguf", "--fastmtp"): "--fastmtp: expected a model to convert or "
            "graft",
            (DEMO, "--host", "192.0.2.1", "--", "--api-key", "k"): "cannot listen there",
            (DEMO, "--host", "0.0.0.0"): "other machines can reach it and there is no API key",
            (DEMO, "--", "--api-key", ""): "--api-key: expected an API key, found ''",
        }
        results = run_commands(hub, home, *(("up", *options, *words) for words in cases))
        for result, text in zip(results, cases.values(), strict=True):
            assert result.code == 1
            assert text in result.last
            assert result.stderr.count("\n") == 1
        assert not downloaded(home)


class TestRun:
    @pytest.mark.thorough
    def test_from_a_trunk_on_the_hub_to_a_server(
        self, hub: Hub, home: Path, free_port: int, where: Words
    ) -> None:
        """Stopped in the graft it leaves nothing; the same command completes it and serves."""
        words = ("up", f"{NAME}:Q8_0", "--from", DEMO, "--skip", "tune", *where)
        options: dict[str, Any] = {"env": environment(hub, home), "cwd": home.parent}
        hub.stalls, hub.cut_after = True, 1_100_000  # more than is read ahead
        with spawn(*words, **options) as process:
            assert hub.stalled.wait(60)
            process.send_signal(signal.SIGINT)
            hub.proceed.set()
            _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert stderr.splitlines()[-1] == (
            "mtp-gguf: stopped in the step graft; the same command continues here"
        )
        assert "interrupted; nothing was written" in stderr
        assert not [*home.parent.iterdir()]
        hub.stalls = False
        url = f"http://127.0.0.1:{free_port}"
        printed, stderr = until_ready(words, "print(answer", **options)
        assert f'base_url="{url}/v1"' in printed
        assert "[1/2] graft: add the head of" in stderr
        assert "[2/2] serve: at" in stderr
        assert f"ready: {url}" in stderr
        assert (home.parent / "Demo-Q8_0-MTP.gguf").is_file()
        printed, stderr = until_ready((*words, "--json"), "}", **options)
        fields = json.loads(printed)
        assert fields["url"] == url
        assert [*steps(fields)] == ["serve"]
        assert "[1/1] serve" in stderr

    @pytest.mark.thorough
    @pytest.mark.server
    def test_the_example_that_it_prints_runs(
        self, hub: Hub, home: Path, patched_server: Path, free_port: int
    ) -> None:
        """With the real server: convert, serve, and the program for the openai client as it is."""
        options = ("--skip", "tune", "--port", free_port, "--llama-server", patched_server)
        words = ("up", DEMO, *options, "--", "-c", "512", "-t", "2")
        env = environment(hub, home)
        answers = []

        def try_it(printed: str) -> None:
            command = [sys.executable, "-c", printed[printed.index("from openai") :]]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            answers.append(done.stdout)

        until_ready(words, "print(answer", then=try_it, env=env, cwd=home.parent)
        assert answers[0].strip()

    def test_passes_the_api_key_on(
        self, ggufs: Path, server: Path, free_port: int, tmp_path: Path
    ) -> None:
        """What is printed masks the key; the server gets it."""
        recorder = tmp_path / "recorder"
        recorder.write_text(f'#!/bin/sh\necho "$@" > "$0.log"\nexec "{server}" "$@"\n')
        recorder.chmod(0o755)
        where = ("--port", free_port, "--llama-server", recorder)
        words = ("up", ggufs / "Demo-Q4_K_M.gguf", "--skip", "tune", *where)
        printed, stderr = until_ready((*words, "--", "--api-key", "secret"), "print(answer")
        assert "--api-key secret" in (tmp_path / "recorder.log").read_text()
        assert "secret" not in printed + stderr

    def test_a_failing_step_ends_it(self, hub: Hub, home: Path, where: Words) -> None:
        words = ("up", DEMO, "--skip", "tune", *where)
        corpus = ("--fastmtp-corpus", "nothing.txt")
        text, fields, usage = run_commands(
            hub,
            home,
            (*words, *corpus),
            (*words, *corpus, "--json"),
            (*words, "--quant", "Q4_K_X"),
        )
        assert text.code == fields.code == 1
        assert text.last == "mtp-gguf: stopped in the step convert; the same command continues here"
        assert "nothing.txt" in json.loads(fields.stdout)["error"]
        assert usage.code == 2
        assert "Q4_K_X" in usage.stderr
        assert [path for path in home.parent.iterdir() if path != home] == []


def until_ready(
    words: Words,
    last: str,
    then: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> tuple[str, str]:
    """Run `up` until it has printed a line with `last` at an end; then stop its server.

    then: called before that with what was printed.
    """
    printed = ""
    with spawn(*words, **options) as process:
        assert process.stdout is not None
        for line in process.stdout:
            printed += line
            if line.startswith(last) or line.rstrip().endswith(last):
                break
        try:
            then(printed)
        finally:
            process.send_signal(signal.SIGTERM)
        try:
            _, stderr = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, stderr
    return printed, stderr
