"""Models by their hub id, with the real huggingface_hub client against a hub on loopback."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from mtp_gguf.gguf_tools.machine.text import human_bytes
from support.checkpoint_edits import edit_json, edit_tensors
from support.checkpoints import TINY
from support.commands import held, spawn
from support.conversions import converted
from support.gguf_files import differing, tensors_of
from support.hub_commands import Done, environment
from support.hub_server import Hub
from support.models import Models

MODEL = "somebody/Tiny-3.5"
SHARDED = replace(TINY, name="sharded", layers=4, shards=12)
OTHER = replace(TINY, name="other", seed=2)
TOKEN = "hf_thisIsNoRealToken"
INDEX = "model.safetensors.index.json"
# The client pauses between attempts; these tests do not.
IMPATIENT = "import time; time.sleep = lambda seconds: None"
# It keeps what came before a cut by whole pieces of this size, 10 MB else.
SMALL_PIECES = "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 500"


@pytest.fixture
def hub(models: Models) -> Iterator[Hub]:
    with Hub(MODEL, {"main": models.checkpoint(SHARDED), "v2": models.checkpoint(OTHER)}) as hub:
        yield hub


def start(hub: Hub, folder: Path, *arguments: object, **env: str) -> Popen[str]:
    """Start a command of ours in `folder`, with the hub and a cache beside it."""
    environ = environment(hub, folder.parent / "home", HF_HUB_DISABLE_TELEMETRY="1", **env)
    return spawn(*arguments, prelude=f"{IMPATIENT}; {SMALL_PIECES}", env=environ, cwd=folder)


def run(hub: Hub, folder: Path, *arguments: object, **env: str) -> Done:
    with start(hub, folder, *arguments, **env) as process:
        stdout, stderr = process.communicate(timeout=120)
    assert "Traceback" not in stderr
    return Done(process.returncode, stdout, stderr)


def conversion(output: Path, *options: object, model: object = MODEL) -> tuple[object, ...]:
    return ("convert", model, "-o", output / "out.gguf", "--quant", "F16", "--overwrite", *options)


def succeeds(hub: Hub, output: Path, *options: object, model: object = MODEL, **env: str) -> bytes:
    """Convert the hub's model and return the file."""
    done = run(hub, output, *conversion(output, *options, model=model), **env)
    assert done.code == 0, done.stderr
    assert "bits per weight" in done.stdout
    return (output / "out.gguf").read_bytes()


def fails(hub: Hub, output: Path, *words: str, model: str = MODEL, **env: str) -> None:
    """Convert the hub's model, in vain: one sentence, below what the client itself reports."""
    done = run(hub, output, *conversion(output, model=model), **env)
    assert done.code == 1, done.stderr
    assert done.last.startswith("mtp-gguf: "), done.stderr
    for word in (model, *words):
        assert word in done.last
    assert not done.stdout
    assert not held(output)


def index_of(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index has it."""
    index: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return index


class TestFetches:
    @pytest.mark.thorough
    @pytest.mark.sample(1)
    def test_the_same_bytes_as_a_local_folder(
        self, hub: Hub, models: Models, output: Path, tmp_path: Path
    ) -> None:
        folder = models.copy(SHARDED, tmp_path / "copies").rename(tmp_path / "Tiny-3.5")
        converted(folder, tmp_path / "local.gguf", "--quant", "F16", "--fastmtp")
        ours = succeeds(hub, output, "--fastmtp")
        assert ours == (tmp_path / "local.gguf").read_bytes()
        shards = {path.name for path in folder.glob("*.safetensors")} & {*index_of(folder).values()}
        assert len(shards) > 5
        assert shards | {INDEX, "config.json", "tokenizer.json"} <= {*hub.fetched()}
        # A second run asks for no content, a third one, offline, for nothing at all.
        hub.requests.clear()
        assert succeeds(hub, output, "--fastmtp") == ours
        assert not hub.fetched()
        hub.requests.clear()
        assert succeeds(hub, output, "--fastmtp", HF_HUB_OFFLINE="1") == ours
        assert not hub.requests

    @pytest.mark.thorough
    def test_a_line_announces_the_weights(self, hub: Hub, models: Models, output: Path) -> None:
        """With the size of what is missing in the cache; nothing is said of what is there."""

        def announced(*words: object) -> list[str]:
            done = run(hub, output, *words)
            assert done.code == 0, done.stderr
            return [line for line in done.stderr.splitlines() if "download hf://" in line]

        def line(revision: str, names: list[str]) -> str:
            size = sum((hub.revisions[revision] / name).stat().st_size for name in names)
            more = f" and {len(names) - 1} more shards" if len(names) > 1 else ""
            where = MODEL if revision == "main" else f"{MODEL}@{revision}"
            return f"mtp-gguf: download hf://{where}/{names[0]}{more}, {human_bytes(size)}"

        index = index_of(models.checkpoint(SHARDED))
        head = sorted({f for name, f in index.items() if not name.startswith("model.layers.")})
        options = ("--quant", "F16", "--overwrite", "-o", "out.gguf")
        assert announced("convert", MODEL, *options, "--head-only") == [line("main", head)]
        trunk = sorted({*index.values()} - {*head})
        assert announced("convert", MODEL, *options) == [line("main", trunk)]
        assert announced("convert", MODEL, *options) == []
        words = ("compare", "out.gguf", MODEL)
        assert announced(*words) == []
        (output.parent / "home").rename(output.parent / "aside")
        assert announced(*words) == [line("main", sorted({*index.values()}))]
        single = ("convert", f"{MODEL}@v2", *options)
        assert announced(*single) == [line("v2", ["model.safetensors"])]

    @pytest.mark.thorough
    def test_a_revision_of_one_file(
        self, hub: Hub, models: Models, output: Path, tmp_path: Path
    ) -> None:
        folder = models.copy(OTHER, tmp_path / "copies").rename(tmp_path / "Tiny-3.5")
        converted(folder, tmp_path / "local.gguf", "--quant", "F16")
        expected = (tmp_path / "local.gguf").read_bytes()
        assert succeeds(hub, output, "--revision", "v2") == expected
        assert "model.safetensors" in hub.fetched()
        offline = {"HF_HUB_OFFLINE": "1"}
        assert succeeds(hub, output, "--revision", "v2", **offline) == expected
        commit = hub.commit("v2")
        assert succeeds(hub, output, "--revision", commit) == expected

    @pytest.mark.parametrize(
        ("option", "left_out"), [("--head-only", "model.layers."), ("--no-mtp", "mtp.")]
    )
    def test_no_shard_that_is_not_needed(
        self, option: str, left_out: str, hub: Hub, models: Models, output: Path
    ) -> None:
        succeeds(hub, output, option)
        index = index_of(models.checkpoint(SHARDED))
        needed = {f for name, f in index.items() if not name.startswith(left_out)}
        assert needed < {*index.values()}
        assert {f for f in hub.fetched() if f.endswith(".safetensors")} == needed

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("base", ["checkpoint", "gguf"])
    def test_nothing_but_the_head_of_a_donor(
        self, base: str, hub: Hub, models: Models, output: Path, tmp_path: Path
    ) -> None:
        """Of its weights the MTP block alone, by ranges: not even the rest of a shard."""
        bare = models.checkpoint(replace(SHARDED, name="bare", mtp=False))
        donor = models.checkpoint(SHARDED)
        if base == "gguf":
            converted(bare, tmp_path / "bare.gguf", "--quant", "BF16")
            bare = tmp_path / "bare.gguf"
        options = "--quant", "F16", "--mtp-from"
        converted(bare, tmp_path / "local.gguf", *options, donor)
        ours = succeeds(hub, output, "--mtp-from", MODEL, model=bare)
        assert [*held(output)] == ["out.gguf"]
        assert ours == (tmp_path / "local.gguf").read_bytes()
        index = index_of(donor)
        ranges = [asked.range for asked in hub.requests if "/cdn/" in asked.path]
        assert all(ranges)
        asked = {f for f in hub.fetched() if f.endswith(".safetensors")}
        with_head = {f for name, f in index.items() if name.startswith("mtp.")}
        if base == "checkpoint":
            assert asked == with_head
        assert with_head <= asked

    def test_nothing_of_a_donor_for_a_plan(self, hub: Hub, models: Models, output: Path) -> None:
        bare = models.checkpoint(replace(SHARDED, name="bare", mtp=False))
        words = conversion(output, "--mtp-from", MODEL, "--dry-run", model=bare)
        done = run(hub, output, *words)
        assert done.code == 0, done.stderr
        assert "mtp.fc.weight" in done.stdout
        assert not held(output)

    def test_no_file_that_nobody_reads(self, models: Models, output: Path, tmp_path: Path) -> None:
        folder = models.copy(TINY, tmp_path)
        unread = "pytorch_model.bin", "training.pt", "consolidated.safetensors", "out.gguf"
        for name in unread:
            (folder / name).write_bytes(b"x")
        with Hub(MODEL, {"main": folder}) as hub:
            succeeds(hub, output)
        assert not {*unread} & {*hub.fetched()}

    def test_with_a_token(self, hub: Hub, output: Path) -> None:
        hub.token = TOKEN
        succeeds(hub, output, HF_TOKEN=TOKEN)
        assert {asked.token for asked in hub.requests if MODEL in asked.path} == {TOKEN}
        assert {asked.token for asked in hub.requests if "/cdn/" in asked.path} == {""}

    @pytest.mark.thorough
    def test_on_after_the_connection_was_cut(self, hub: Hub, output: Path) -> None:
        whole = succeeds(hub, output)
        (output / "out.gguf").unlink()
        hub.requests.clear()
        hub.cuts, hub.cut_after = 1, 1000
        resumed = succeeds(hub, output, HF_HOME=str(output.parent / "another home"))
        assert resumed == whole
        assert hub.cuts == 0
        assert [asked.range for asked in hub.requests if asked.range] == ["bytes=1000-"]
        assert not [*(output.parent / "another home").rglob("*.incomplete")]

    def test_nothing_more_after_an_interrupt(self, hub: Hub, output: Path) -> None:
        """Ctrl-C takes effect while a file is downloaded, and not after it."""
        hub.stalls, hub.cut_after = True, 1000
        with start(hub, output, *conversion(output)) as process:
            assert hub.stalled.wait(60)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=30)  # and the hub still sends nothing
        hub.proceed.set()
        assert process.returncode == 130
        assert stderr.splitlines()[-1].startswith("mtp-gguf: interrupted")
        assert not held(output)


class TestFails:
    @pytest.mark.parametrize(
        ("trouble", "said"),
        [
            ({"token": TOKEN}, "no such model … private … hf auth login"),
            ({"gated": True}, "is gated … accept its terms … hf auth login … HF_TOKEN"),
            ({"cuts": 1000, "cut_after": 0}, "download failed … try again"),
            ({"fault": 500}, "500"),
            pytest.param({"fault": 503}, "503", marks=pytest.mark.thorough),
            pytest.param({"fault": 429}, "429", marks=pytest.mark.thorough),
        ],
        ids=str,
    )
    def test_without_an_answer(
        self, trouble: dict[str, Any], said: str, hub: Hub, output: Path
    ) -> None:
        vars(hub).update(trouble)
        fails(hub, output, *said.split(" … "))

    def test_wrong_token(self, hub: Hub, output: Path) -> None:
        hub.token = TOKEN
        fails(hub, output, "401", "HF_TOKEN", HF_TOKEN="hf_another")

    def test_nobody_listens(self, hub: Hub, output: Path) -> None:
        fails(hub, output, "cannot be reached", HF_ENDPOINT="http://127.0.0.1:9")

    def test_no_such_model(self, hub: Hub, output: Path) -> None:
        words = "no such model", "private", "check the name", "hf auth login", "HF_TOKEN"
        fails(hub, output, *words, model="somebody/else")

    def test_no_such_revision(self, hub: Hub, output: Path) -> None:
        done = run(hub, output, *conversion(output, "--revision", "v9"))
        assert done.code == 1
        assert done.stderr == f"mtp-gguf: {MODEL}: no revision 'v9' on the hub\n"

    def test_offline_and_not_in_the_cache(self, hub: Hub, output: Path) -> None:
        fails(hub, output, "local cache", "offline mode", "HF_HUB_OFFLINE", HF_HUB_OFFLINE="1")
        assert not hub.requests

    def test_offline_and_not_whole_in_the_cache(self, hub: Hub, output: Path) -> None:
        succeeds(hub, output, "--head-only")
        (output / "out.gguf").unlink()
        fails(hub, output, "incomplete in the local cache", HF_HUB_OFFLINE="1")

    @pytest.mark.parametrize(
        ("file", "text", "said"),
        [
            # Before any weights are fetched.
            ("config.json", '{"architectures": ["LlamaForCausalLM"]}', "LlamaForCausalLM"),
            (
                *(INDEX, '{"weight_map": {"mtp.fc.weight": "../../config.json"}}'),
                "a file name inside the folder, found '../../config.json'",
            ),
        ],
        ids=["architecture", "index"],
    )
    def test_files_that_are_wrong(
        self, file: str, text: str, said: str, models: Models, output: Path, tmp_path: Path
    ) -> None:
        folder = models.copy(SHARDED, tmp_path)
        (folder / file).write_text(text)
        with Hub(MODEL, {"main": folder}) as hub:
            assert said in run(hub, output, *conversion(output)).stderr
        assert hub.fetched() == [*dict.fromkeys(["config.json", file])]


class TestNames:
    """A model on the hub has one name in every command; what is local stays local."""

    @pytest.mark.thorough
    @pytest.mark.parametrize("name", [MODEL, f"hf://{MODEL}@main"])
    def test_of_one_model(
        self, name: str, hub: Hub, models: Models, output: Path, tmp_path: Path
    ) -> None:
        converted(models.checkpoint(SHARDED), tmp_path / "own.gguf", "--quant", "F16")
        options = ("--quant", "F16", "-o", "out.gguf")
        assert run(hub, output, "convert", name, *options).code == 0
        made = tensors_of(output / "out.gguf")
        assert not differing(made, tensors_of(tmp_path / "own.gguf"))
        done = run(hub, output, "doctor", name)
        assert (done.code, done.stdout) == (
            0,
            f"{name.removeprefix('hf://')}: can draft\nhead: 15 mtp.* tensors\n"
            f"runs with: mtp-gguf convert {name.removeprefix('hf://')} --mtp-f16 --fastmtp\n",
        )
        assert "can draft once converted" in run(hub, output, "list-tensors", name).stdout
        assert run(hub, output, "compare", "out.gguf", name).code == 0
        assert run(hub, output, "doctor", "out.gguf", "--from", name).code == 0
        assert run(hub, output, "strip", "out.gguf", "-o", "trunk.gguf").code == 0
        arguments = ("trunk.gguf", "--from", name, "--no-check", "-o", "whole.gguf")
        assert run(hub, output, "graft", *arguments).code == 0

    def test_a_revision_in_the_name(
        self, hub: Hub, models: Models, output: Path, tmp_path: Path
    ) -> None:
        folder = models.copy(OTHER, tmp_path / "copies").rename(tmp_path / "Tiny-3.5")
        converted(folder, tmp_path / "local.gguf", "--quant", "F16")
        ours = succeeds(hub, output, model=f"{MODEL}@v2")
        assert ours == (tmp_path / "local.gguf").read_bytes()

    @pytest.mark.thorough
    def test_a_mistyped_path_is_not_asked_of_the_hub(self, hub: Hub, output: Path) -> None:
        (output / "models").mkdir()
        for name, said in (
            ("models/Qwen", "on the hub it would be hf://models/Qwen"),
            ("Qwen", "models on the hub are named OWNER/NAME"),
            ("/nowhere/Qwen", "models on the hub are named OWNER/NAME"),
        ):
            done = run(hub, output, "convert", name)
            assert (done.code, done.stdout) == (1, "")
            found = f"mtp-gguf: {name}: expected a folder with config.json, found"
            assert done.stderr.startswith(found)
            assert done.stderr.endswith(f"{said}\n")
        assert run(hub, output, "doctor", "Qwen/x.gguf").code == 1
        assert run(hub, output, "list-tensors", "Qwen/x.safetensors").code == 1
        assert not hub.requests

    def test_a_revision_needs_the_hub(self, hub: Hub, models: Models, output: Path) -> None:
        for arguments in (
            ("convert", models.checkpoint(TINY), "--revision", "v2"),
            ("convert", f"{MODEL}@main", "--revision", "v2"),
        ):
            done = run(hub, output, *arguments)
            assert done.code == 2
            assert "--revision" in done.stderr
        assert not hub.requests


class TestOtherRepositories:
    """The error for other repositories says what they contain."""

    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        ("files", "said"),
        [
            (
                {"m-Q4_K_M.gguf": "x"},
                "found GGUF files; name one, such as hf://somebody/Tiny-3.5/m",
            ),
            (
                {"adapter_config.json": '{"base_model_name_or_path": "Qwen/Q"}'},
                "found a LoRA adapter of Qwen/Q; merge it",
            ),
            ({"adapter_config.json": "["}, "found a LoRA adapter; merge it"),
            ({"adapter_config.json": "[" * 100_000}, "found a LoRA adapter; merge it"),
            ({"model_index.json": "{}"}, "found a diffusers pipeline"),
            ({"notes.md": ""}, "found none (notes.md); it is not a transformers checkpoint"),
        ],
    )
    def test_a_repository_without_a_config(
        self, files: dict[str, str], said: str, output: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "files"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        with Hub(MODEL, {"main": folder}) as hub:
            for command in ("convert", *(["doctor", "list-tensors"] if "GGUF" in said else [])):
                done = run(hub, output, command, MODEL)
                assert (done.code, done.stdout) == (1, "")
                expected = f"mtp-gguf: {MODEL}: expected a checkpoint with config.json, {said}"
                assert done.stderr.startswith(expected)

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("kind", ["dataset", "space"])
    def test_what_is_no_model(self, kind: str, output: Path, tmp_path: Path) -> None:
        with Hub(MODEL, {"main": tmp_path}, kind=kind) as hub:
            done = run(hub, output, "convert", MODEL)
        assert done.code == 1
        assert done.stderr == f"mtp-gguf: {MODEL}: expected a model on the hub, found a {kind}\n"


def finding_of(hub: Hub, folder: Path, model: object) -> dict[str, str]:
    """The only finding of the doctor."""
    done = run(hub, folder, "doctor", model, "--json")
    assert done.code == 1
    [finding] = json.loads(done.stdout)["findings"]
    found: dict[str, str] = finding
    return found


class TestDoctor:
    """The commands that the doctor prints for models on the hub run as they are."""

    @pytest.mark.thorough
    def test_a_head_that_was_lost(self, models: Models, output: Path, tmp_path: Path) -> None:
        """The fix names the base model of the model card."""
        bare = models.copy(replace(SHARDED, name="bare", mtp=False), tmp_path)
        (bare / "README.md").write_text(f"---\nbase_model: {MODEL}\n---\n")
        versions = {"v1": bare, "main": models.checkpoint(SHARDED)}
        with Hub(MODEL, versions) as hub:
            # One model is on this hub: its first version stands for the fine-tune.
            command = finding_of(hub, output, f"hf://{MODEL}@v1")["fix"]
            assert command == f"mtp-gguf convert {MODEL}@v1 --from ORIGINAL --mtp-f16"
            words = shlex.split(command.replace("ORIGINAL", MODEL))
            assert run(hub, output, *words[1:], "-o", "out.gguf").code == 0
            assert run(hub, output, "doctor", "out.gguf").code == 0
        fine_tune = models.copy(replace(SHARDED, name="local", mtp=False), tmp_path)
        (fine_tune / "README.md").write_text(f"---\nbase_model: {MODEL}\n---\n")
        with Hub(MODEL, versions) as hub:
            words = shlex.split(finding_of(hub, output, fine_tune)["fix"])
            assert words[1:4] == ["convert", str(fine_tune), "--from"]
            assert run(hub, output, *words[1:], "-o", "local.gguf").code == 0
            assert run(hub, output, "doctor", "local.gguf").code == 0

    def test_what_is_broken_there_is_not_blamed_on_the_cache(
        self, models: Models, output: Path, tmp_path: Path
    ) -> None:
        broken = models.copy(TINY, tmp_path)
        edit_tensors(broken, lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"].T.copy()}))
        with Hub(MODEL, {"main": broken}) as hub:
            finding = finding_of(hub, output, MODEL)
        assert "home" not in json.dumps(finding)
        assert not finding["fix"]

    @pytest.mark.thorough
    def test_a_damaged_download(self, models: Models, output: Path, tmp_path: Path) -> None:
        folder = models.copy(SHARDED, tmp_path)
        edit_json(folder / "config.json", lambda c: c.update(_name_or_path=MODEL))
        (folder / index_of(folder)["mtp.fc.weight"]).unlink()
        with Hub(MODEL, {"main": models.checkpoint(SHARDED)}) as hub:
            command = shlex.split(finding_of(hub, output, folder)["fix"])
            assert command[:3] == ["hf", "download", MODEL]
            client = "from huggingface_hub.cli.hf import main; main()"
            subprocess.run(
                [sys.executable, "-c", client, *command[1:]],
                env=environment(hub, tmp_path),
                check=True,
            )
            assert run(hub, output, "doctor", command[-1]).code == 0
