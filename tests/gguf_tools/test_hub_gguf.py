"""GGUFs on the hub, with the real huggingface_hub client against a hub on loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from support.checkpoints import TINY
from support.commands import invoke, run_python, spawn
from support.hub_commands import Done, downloaded, environment, run_commands
from support.hub_server import Hub
from support.models import DEMO, Models
from support.stand_in_server import write_stand_in

NAME = "somebody/Demo-GGUF"
Run = Callable[..., list[Done]]
HEAD = f"hf://{NAME}/mtp-Demo.gguf"
TEXT = ("-p", "def is_prime(n):\n", "-n", "24", "-c", "256", "-t", "1", "--depth", "2", "--json")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository as publishers lay it out: a model with its head, one without, one in shards."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "F16").mkdir()
    for name, *options in (
        ("Demo-Q4_K_M.gguf", "--mtp-f16"),
        ("Demo-Q8_0.gguf", "--quant", "Q8_0", "--no-mtp"),
        ("mtp-Demo.gguf", "--head-only", "--mtp-f16"),
        ("F16/Demo-F16.gguf", "--quant", "F16", "--mtp-f16", "--split-max-size", "4M"),
    ):
        result = invoke("convert", DEMO, "-o", folder / name, *options)
        assert result.exit_code == 0, result.output
    (folder / "mmproj-Demo-F16.gguf").write_bytes(b"GGUF")
    (folder / "imatrix.gguf").write_bytes(b"GGUF")
    (folder / "README.md").write_text("# Demo\n")
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[Hub]:
    with Hub(NAME, {"main": repository, "v2": repository}) as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The client's cache."""
    return tmp_path / "home"


@pytest.fixture
def run(hub: Hub, home: Path) -> Run:
    """Runs commands against the hub."""
    return partial(run_commands, hub, home)


@pytest.mark.thorough
def test_a_silent_hub_is_named(tmp_path: Path) -> None:
    """Within seconds, not when the attempts are over."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = f"127.0.0.1:{silent.getsockname()[1]}"
        env = {**os.environ, "HF_ENDPOINT": f"http://{hub}", "HF_HOME": str(tmp_path)}
        names = (f"hf://{NAME}/x.gguf", f"{NAME}:Q4_K_M", NAME)
        commands = [(name, spawn("list-tensors", name, env=env)) for name in names]
        try:
            for name, command in commands:
                assert command.stderr
                expected = f"mtp-gguf: {name.removesuffix(':Q4_K_M')}: no answer yet from {hub}; "
                assert command.stderr.readline().startswith(expected)
        finally:
            for _, command in commands:
                command.kill()
                command.communicate()


class TestRuns:
    @pytest.mark.thorough
    def test_generate_with_every_form_of_a_name(
        self, hub: Hub, run: Run, repository: Path, home: Path
    ) -> None:
        """The text is that of the local file; the second time, nothing is asked of the network."""
        names = {
            f"{NAME}:q4_k_m": "Demo-Q4_K_M.gguf",
            NAME: "Demo-Q4_K_M.gguf",  # the usual one
            f"hf://{NAME}/Demo-Q4_K_M.gguf": "Demo-Q4_K_M.gguf",
            f"hf://{NAME}@v2:F16": "F16/Demo-F16-00001-of-00003.gguf",
            f"hf.co/{NAME}:Q4_K_M": "Demo-Q4_K_M.gguf",
            f"{NAME}/Demo-Q4_K_M.gguf": "Demo-Q4_K_M.gguf",
        }
        local = [("generate", repository / file, *TEXT) for file in names.values()]
        remote = [("generate", name, *TEXT) for name in names]
        results = [each.fields for each in run(*local, *remote)]
        locally, remotely = results[: len(names)], results[len(names) :]
        for expected, found in zip(locally, remotely, strict=True):
            assert found["text"] == expected["text"]
            assert found["drafted"] == expected["drafted"]
        shards = {f"F16/Demo-F16-0000{i}-of-00003.gguf" for i in (1, 2, 3)}
        assert downloaded(home) == {"Demo-Q4_K_M.gguf", *shards}
        hub.requests.clear()
        again = run(*remote)
        assert [each.fields["text"] for each in again] == [each["text"] for each in remotely]
        assert not hub.fetched()
        assert not any("download" in each.stderr for each in again)
        hub.requests.clear()
        offline = run(*remote, HF_HUB_OFFLINE="1")
        assert [each.fields["text"] for each in offline] == [each["text"] for each in remotely]
        assert not hub.requests

    def test_the_head_beside_a_model_without_one(
        self, run: Run, repository: Path, home: Path
    ) -> None:
        local = (repository / "Demo-Q8_0.gguf", "--head", repository / "mtp-Demo.gguf")
        plain, ours, theirs, named = run(
            ("generate", f"{NAME}:Q8_0", *TEXT, "--depth", "0"),
            ("generate", f"{NAME}:Q8_0", *TEXT),
            ("generate", *local, *TEXT),
            ("generate", local[0], "--head", HEAD, *TEXT),
        )
        assert ours.fields["drafted"] == theirs.fields["drafted"] == named.fields["drafted"]
        assert any(ours.fields["drafted"])
        assert ours.fields["text"] == plain.fields["text"]
        assert [line for line in plain.stderr.splitlines() if "mtp-" in line] == [
            f"mtp-gguf: download hf://{NAME}/Demo-Q8_0.gguf, 4.91 MB"
        ]
        assert f"mtp-gguf: download {HEAD}, 2.96 MB" in ours.stderr
        assert downloaded(home) == {"Demo-Q8_0.gguf", "mtp-Demo.gguf"}

    def test_a_head_of_another_model_is_passed_over(
        self, repository: Path, models: Models, tmp_path: Path, home: Path
    ) -> None:
        """The smallest file is tried first."""
        folder = tmp_path / "repository"
        folder.mkdir()
        (folder / "Demo-Q8_0.gguf").symlink_to(repository / "Demo-Q8_0.gguf")
        (folder / "mtp-Head.gguf").symlink_to(repository / "mtp-Demo.gguf")
        words = ("convert", models.checkpoint(TINY), "-o", folder / "mtp-Other.gguf")
        assert invoke(*words, "--head-only").exit_code == 0
        (folder / "mtp-Broken.gguf").write_bytes(b"GGUF")
        with Hub(NAME, {"main": folder}) as hub:
            [done] = run_commands(hub, home, ("generate", f"{NAME}:Q8_0", *TEXT))
        assert any(done.fields["drafted"])
        assert downloaded(home) == {path.name for path in folder.iterdir()}

    def test_the_head_beside_a_local_model(self, repository: Path, tmp_path: Path) -> None:
        """As on the hub; what does not fit is ignored, and so is what has another model's name.

        Of two that fit and have the same name, none is chosen.
        """
        model = tmp_path / "model.gguf"
        model.symlink_to(repository / "Demo-Q8_0.gguf")
        (tmp_path / "mtp-other.gguf").symlink_to(repository / "Demo-Q4_K_M.gguf")
        (tmp_path / "mtp-broken.gguf").write_bytes(b"GGUF")

        def drafted() -> bool:
            result = invoke("generate", model, *TEXT[:-3], "--json")
            assert result.exit_code == 0, result.output
            return any(json.loads(result.stdout)["drafted"])

        assert not drafted()
        (tmp_path / "mtp-model.gguf").symlink_to(repository / "mtp-Demo.gguf")
        assert drafted()
        (tmp_path / "mtp-second.gguf").symlink_to(repository / "mtp-Demo.gguf")
        assert drafted()
        (tmp_path / "mtp-model-Q8_0.gguf").symlink_to(repository / "mtp-Demo.gguf")
        assert not drafted()

    def test_serve_and_its_hf_option(self, run: Run, tmp_path: Path, home: Path) -> None:
        server = write_stand_in(tmp_path / "server")
        options = ("--llama-server", server, "--print-command", "--json")
        argument, option, head, host = run(
            ("serve", f"{NAME}:Q4_K_M", *options),
            ("serve", "-hf", NAME, *options, "--", "--verbose"),
            ("serve", f"{NAME}:Q8_0", *options),
            ("serve", "-hf", f"hf.co/{NAME}:Q4_K_M", *options),
        )
        words = argument.fields["command"]
        path = Path(words[words.index("-m") + 1])
        assert path.is_file()
        assert path.is_relative_to(home)
        assert option.fields["command"] == [*words, "--verbose"]
        assert host.fields["command"] == words
        words = head.fields["command"]
        assert Path(words[words.index("-md") + 1]).name == "mtp-Demo.gguf"

    @pytest.mark.thorough
    def test_list(self, run: Run, repository: Path) -> None:
        """What is in the cache has names that work, and no heads, towers or later shards."""
        names = (f"{NAME}:Q4_K_M", f"{NAME}:Q8_0", f"{NAME}:F16")
        run(*(("generate", name, *TEXT) for name in names))
        [done] = run(("list", "--json"), HF_HUB_OFFLINE="1")
        found = {each["name"]: each for each in done.fields["models"]}
        f16 = f"{NAME}/F16/Demo-F16-00001-of-00003.gguf"
        assert set(found) == {f"{NAME}/Demo-Q4_K_M.gguf", f"{NAME}/Demo-Q8_0.gguf", f16}
        assert all(each["can_draft"] for each in found.values())
        assert "mtp-Demo.gguf" in found[f"{NAME}/Demo-Q8_0.gguf"]["reason"]
        shards = (repository / "F16").iterdir()
        assert found[f16]["bytes"] == sum(path.stat().st_size for path in shards)
        [again] = run(("generate", f16, *TEXT), HF_HUB_OFFLINE="1")
        assert again.fields["text"]

    def test_a_mistyped_path(self, hub: Hub, run: Run) -> None:
        """A path that could be a name on the hub is said to be neither."""
        name = "nobody/Nothing/x.gguf"
        for command in (("list-tensors", name), ("generate", name, *TEXT)):
            [done] = run(command)
            assert done.code == 1
            assert f"mtp-gguf: {name}: no such file here; on the hub: " in done.stderr
            assert "nobody/Nothing" in done.last

    def test_a_download_shows_no_bars_without_a_terminal(self, tmp_path: Path) -> None:
        with Hub("somebody/Demo", {"main": DEMO}) as hub:
            words = ("convert", "somebody/Demo", "-o", tmp_path / "demo.gguf")
            with spawn(*words, env=environment(hub, tmp_path)) as command:
                _, stderr = command.communicate(timeout=120)
        assert command.returncode == 0
        assert re.fullmatch(
            r"mtp-gguf: download hf://somebody/Demo/model.safetensors, .* MB\n", stderr
        )

    def test_tune_and_bench(self, run: Run) -> None:
        short = ("--budget", "1s", "--prompts", "code", "-t", "1", "--json")
        tuned, measured = run(
            ("tune", f"{NAME}:Q8_0", *short, "--max-depth", "1"),
            ("bench", f"{NAME}:Q8_0", *short, "--depths", "0,1", "--no-server"),
        )
        assert Path(tuned.fields["profile"]).name == "Demo-Q8_0.mtp.toml"
        assert "depth" in json.dumps(measured.fields)

    def test_python(self, hub: Hub, repository: Path, tmp_path: Path, home: Path) -> None:
        program = f"""
import warnings
warnings.simplefilter("error")
from mtp_gguf.native import MTPLlama
o = dict(n_ctx=256, n_threads=1, depth=2)
def text(llm):
    with llm:
        out = llm("def is_prime(n):\\n", max_tokens=24, temperature=0)["choices"][0]["text"]
        assert llm.mtp_stats.drafted[0] > 0
        return out
texts = [
    text(MTPLlama({str(repository / "Demo-Q4_K_M.gguf")!r}, **o)),
    text(MTPLlama("{NAME}:Q4_K_M", **o)),
    text(MTPLlama.from_pretrained("{NAME}", "*Q4_K_M.gguf", **o)),
    text(MTPLlama.from_pretrained("{NAME}", "*F16*.gguf", cache_dir="cache", **o)),
    text(MTPLlama.from_pretrained("{NAME}", "Demo-Q8_0.gguf", local_dir="models",
                                  additional_files=["README*"], **o)),
]
assert texts[0] == texts[1] == texts[2], texts
print(texts[0])
"""
        output = run_python(program, env=environment(hub, home), cwd=tmp_path)
        assert "return" in output
        assert downloaded(home) == {"Demo-Q4_K_M.gguf"}
        shards = (tmp_path / "cache").glob("models--*/snapshots/*/F16/*.gguf")
        assert len([*shards]) == 3
        held = {path.name for path in (tmp_path / "models").iterdir() if path.is_file()}
        assert held == {"Demo-Q8_0.gguf", "mtp-Demo.gguf", "README.md"}


class TestReads:
    def test_headers_only(self, run: Run, repository: Path, home: Path) -> None:
        """Commands that inspect read ranges of a name by quant, too, and keep nothing."""
        listed, doctor, with_head, compared = run(
            ("list-tensors", f"{NAME}:F16", "--json"),
            ("doctor", f"{NAME}:Q4_K_M", "--json"),
            ("doctor", f"{NAME}:Q8_0", "--head", HEAD, "--json"),
            ("compare", repository / "Demo-Q4_K_M.gguf", f"{NAME}:Q4_K_M", "--filter", "nextn"),
        )
        assert len(listed.fields["tensors"]) == 70
        assert doctor.fields["can_draft"]
        assert with_head.fields["can_draft"]
        assert compared.code == 0
        assert not downloaded(home)

    def test_offline_from_the_cache(self, hub: Hub, run: Run) -> None:
        names = (f"{NAME}:F16", f"hf://{NAME}/F16/Demo-F16-00002-of-00003.gguf")
        [_] = run(("generate", names[0], *TEXT))
        hub.requests.clear()
        commands = [("doctor", name, "--json") for name in (*names, HEAD)]
        *there, missing = run(*commands, HF_HUB_OFFLINE="1")
        assert all(done.fields["can_draft"] for done in there)
        assert missing.code == 1
        assert "no such file" in missing.last
        assert not hub.requests

    def test_a_head_measured_against_a_gguf(
        self, run: Run, repository: Path, tmp_path: Path
    ) -> None:
        """`doctor --from` takes a GGUF as the original, too, and finds another one's head."""
        other = tmp_path / "other"
        shutil.copytree(DEMO, other)
        from safetensors.numpy import load_file, save_file  # noqa: PLC0415

        tensors = load_file(other / "model.safetensors")
        tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][::-1].copy()
        save_file(tensors, other / "model.safetensors")
        assert invoke("convert", other, "-o", tmp_path / "other.gguf").exit_code == 0
        same, wrong = run(
            ("doctor", repository / "Demo-Q4_K_M.gguf", "--from", f"{NAME}:F16", "--json"),
            ("doctor", tmp_path / "other.gguf", "--from", f"{NAME}:F16", "--json"),
        )
        assert same.fields["can_draft"]
        assert wrong.code == 1
        [finding] = [f for f in json.loads(wrong.stdout)["findings"] if f["severity"] == "fault"]
        assert "nextn.eh_proj.weight" in finding["text"]

    def test_doctor_runs_a_download(self, run: Run) -> None:
        [done] = run(("doctor", f"{NAME}:Q8_0", "--load"))
        assert done.code == 0, done.stderr
        assert "loaded: it runs and drafts" in done.stdout

    def test_convert_and_graft(self, hub: Hub, run: Run) -> None:
        converted, grafted = run(
            ("convert", f"{NAME}:F16", "-o", "out.gguf", "--quant", "Q5_K_M", "--json"),
            ("graft", f"{NAME}:Q8_0", "--from", HEAD, "--no-check", "--json"),
        )
        assert converted.code == 0, converted.stderr
        assert grafted.fields["path"] == "Demo-Q8_0-MTP.gguf"
        assert grafted.fields["head"]["ready"]


class TestFileTools:
    """`extract`, `strip` and `fastmtp` write from the hub straight into their output."""

    def test_the_output_is_that_of_the_local_file(
        self, run: Run, repository: Path, tmp_path: Path, home: Path
    ) -> None:
        files = {f"{NAME}:F16": "F16/Demo-F16-00001-of-00003.gguf", NAME: "Demo-Q4_K_M.gguf"}
        tools = (("extract",), ("strip",), ("fastmtp", "add", "--size", "700"))
        local: list[tuple[object, ...]] = []
        remote: list[tuple[object, ...]] = []
        for name, file in files.items():
            for tool in tools:
                n = len(local)
                local.append((*tool, repository / file, "-o", tmp_path / f"{n}-local.gguf"))
                remote.append((*tool, name, "-o", tmp_path / f"{n}-remote.gguf"))
        for done in run(*local, *remote):
            assert done.code == 0, done.stderr
        for (*_, ours), (*_, theirs) in zip(local, remote, strict=True):
            assert Path(str(ours)).read_bytes() == Path(str(theirs)).read_bytes()
        assert not downloaded(home)

    def test_names_corpora_and_places(self, run: Run, tmp_path: Path, home: Path) -> None:
        corpus = tmp_path / "corpus.txt"
        corpus.write_text("def is_prime(n):\n    return n > 1\n" * 50)
        named, counted, shown, listless, in_place = run(
            ("extract", f"{NAME}:F16"),
            ("fastmtp", "add", f"{NAME}:Q4_K_M", "--corpus", corpus, "--size", "600"),
            ("fastmtp", "show", "Demo-Q4_K_M-FastMTP.gguf", "--json"),
            ("fastmtp", "show", f"{NAME}:Q4_K_M"),
            ("fastmtp", "remove", f"{NAME}:Q4_K_M", "--in-place"),
        )
        assert named.code == 0
        assert (tmp_path / "mtp-Demo-F16.gguf").is_file()
        assert f"mtp-gguf: download hf://{NAME}/Demo-Q4_K_M.gguf, " in counted.stderr
        assert shown.fields["size"] == 600
        assert downloaded(home) == {"Demo-Q4_K_M.gguf"}
        assert f"{NAME}:Q4_K_M: has no draft vocabulary" in listless.last
        assert in_place.code == 2
        assert "--in-place changes a local file" in in_place.stderr


class TestFails:
    def test_names_that_mean_nothing_there(self, hub: Hub, run: Run, home: Path) -> None:
        there = f"there are {NAME}:Q4_K_M, {NAME}:Q8_0, {NAME}:F16"
        expected = {
            f"{NAME}:Q9_K": f"{NAME}:Q9_K: no Q9_K on the hub; {there}",
            f"hf://{NAME}/nothing.gguf": f"nothing.gguf: no such file on the hub; {there}",
            f"hf://{NAME}/README.md": "README.md: expected a GGUF file by its name",
            "somebody/Else:Q4_K_M": "somebody/Else: no such model, or it is private on the hub; "
            "check the name, or log in with `hf auth login`, or set HF_TOKEN",
            f"{NAME}@v9:Q4_K_M": f"{NAME}: no revision 'v9' on the hub",
            "https://localhost/x.gguf": "download it first: curl -LO https://localhost/x.gguf",
        }
        commands = [("generate", name, *TEXT[:-1]) for name in expected]
        for result, text in zip(run(*commands), expected.values(), strict=True):
            assert result.code == 1
            assert result.stderr.startswith("mtp-gguf: ")
            assert result.stderr.endswith(f"{text}\n")
            assert result.stderr.count("\n") == 1
        assert not downloaded(home)

    def test_names_that_lead_out_of_the_cache(self, hub: Hub, run: Run) -> None:
        hub.claimed = ("../../../evil-Q5_K_M.gguf", "F16/../../../evil-Q6_K.gguf")
        results = run(
            *(("generate", f"{NAME}:{quant}", *TEXT[:-1]) for quant in ("Q5_K_M", "Q6_K")),
            ("generate", f"hf://{NAME}/{hub.claimed[0]}", *TEXT[:-1]),
        )
        for result in results:
            assert result.code == 1
            assert result.last.endswith(f"there are {NAME}:Q4_K_M, {NAME}:Q8_0, {NAME}:F16")

    def test_several_models(self, tmp_path: Path, home: Path) -> None:
        folder = tmp_path / "files"
        for name in ("a/One-Q4_K_M.gguf", "b/Two-Q4_K_M.gguf", "One-Q6_K-00001-of-00002.gguf"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"GGUF")
        with Hub(NAME, {"main": folder}) as hub:
            commands = [("tune", name) for name in (f"{NAME}:Q4_K_M", NAME, f"{NAME}:Q6_K")]
            quant, usual, shard = run_commands(hub, home, *commands)
        both = f"name one: hf://{NAME}/a/One-Q4_K_M.gguf or hf://{NAME}/b/Two-Q4_K_M.gguf"
        assert quant.last == f"mtp-gguf: {NAME}:Q4_K_M: 2 files on the hub are Q4_K_M; {both}"
        assert usual.last == f"mtp-gguf: {NAME}: 2 files on the hub are Q4_K_M; {both}"
        assert shard.last == (
            f"mtp-gguf: {NAME}:Q6_K: expected 2 shards, One-Q6_K-00002-of-00002.gguf is missing on "
            "the hub"
        )

    def test_a_checkpoint_and_nothing_at_all(self, tmp_path: Path, home: Path) -> None:
        folder = tmp_path / "files"
        folder.mkdir()
        with Hub(NAME, {"main": folder}) as hub:
            [empty] = run_commands(hub, home, ("generate", NAME, *TEXT[:-1]))
            (folder / "config.json").write_text("{}")
            [checkpoint] = run_commands(hub, home, ("generate", NAME, *TEXT[:-1]))
        expected = f"mtp-gguf: {NAME}: expected GGUF files on the hub, found"
        assert empty.last == f"{expected} no files"
        assert checkpoint.last.startswith(f"{expected} a checkpoint; `mtp-gguf up {NAME}` converts")

    @pytest.mark.thorough
    def test_not_let_in(self, hub: Hub, run: Run) -> None:
        command = ("generate", f"{NAME}:Q4_K_M", *TEXT[:-1])
        hub.gated = True
        [gated] = run(command)
        assert gated.code == 1
        assert "is gated on the hub; accept its terms there and log in" in gated.last
        hub.gated, hub.token = False, "hf_right"
        [private] = run(command)
        assert "no such model, or it is private" in private.last
        [wrong] = run(command, HF_TOKEN="hf_wrong")
        assert "correct HF_TOKEN" in wrong.last
        [right] = run(command, HF_TOKEN="hf_right")
        assert right.code == 0

    @pytest.mark.thorough
    def test_the_hub_is_out_of_reach(self, hub: Hub, run: Run) -> None:
        command = ("generate", f"{NAME}:Q4_K_M", *TEXT[:-1])
        [offline] = run(command, HF_HUB_OFFLINE="1")
        assert not hub.requests
        [nobody] = run(command, HF_ENDPOINT="http://127.0.0.1:9")
        hub.fault = 500
        [fault] = run(command)
        for result in (offline, nobody, fault):
            assert result.code == 1
            assert result.last.startswith(f"mtp-gguf: {NAME}: not in the local cache, and the hub")
        assert "HF_HUB_OFFLINE" in offline.last
        hub.fault = 0
        [done] = run(command)
        hub.fault = 500
        [cached] = run(command)
        assert cached.stdout == done.stdout
        assert done.code == cached.code == 0

    def test_a_connection_that_drops(self, hub: Hub, run: Run, tmp_path: Path) -> None:
        command = ("generate", f"{NAME}:Q4_K_M", *TEXT[:-1])
        hub.cuts, hub.cut_after = 1, 100_000
        [done] = run(command)
        assert done.code == 0
        assert [asked.range for asked in hub.requests if asked.range] == ["bytes=100000-"]
        hub.cuts, hub.cut_after = 1000, 0
        [failed] = run_commands(hub, tmp_path / "another", command)
        assert failed.code == 1
        assert "download failed" in failed.last
        assert failed.last.endswith("try again")

    def test_an_interrupt(self, hub: Hub, run: Run, tmp_path: Path, home: Path) -> None:
        """Ctrl-C takes effect at once and leaves no file that could be taken for the model."""
        hub.stalls, hub.cut_after = True, 100_000
        words = ("generate", f"{NAME}:Q4_K_M", *TEXT[:-1])
        with spawn(*words, env=environment(hub, home), cwd=tmp_path) as process:
            assert hub.stalled.wait(60)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=30)  # and the hub still sends nothing
        hub.proceed.set()
        assert process.returncode == 130
        assert stderr.splitlines()[-1] == (
            "mtp-gguf: interrupted; files that are complete stay in the hub's cache"
        )
        assert not downloaded(home)
        hub.stalls = False
        [done] = run(words)
        assert done.code == 0
