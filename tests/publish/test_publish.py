"""`mtp-gguf publish`, with the real huggingface_hub client against a hub on loopback."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from mtp_gguf.convert.heads import acceptance
from mtp_gguf.gguf_tools.heads.acceptance import read_stored
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.publish.catalogue import Entry, read_catalogue
from support.checkpoints import TINY
from support.commands import MAIN, held, invoke, run_python, succeed
from support.hub_commands import Done, run_commands
from support.models import DEMO, ROOT, Models
from support.sparse_checkpoints import TERABYTE, write_sparse
from support.upload_hub import TARGET, UploadHub

MODEL = "somebody/Tiny-3.5"
TOKEN = "hf_thisIsNoRealToken"
CARD = """---
license: apache-2.0
language: [en]
tags: [chat, conversational]
pipeline_tag: text-generation
---
# Tiny
"""


@pytest.fixture(scope="module")
def checkpoint(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = models.copy(replace(TINY, name="published", shards=3), tmp_path_factory.mktemp("hf"))
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return folder


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[UploadHub]:
    with UploadHub(MODEL, {"main": checkpoint}) as hub:
        yield hub


def publish(hub: UploadHub, work: Path, *options: object, **env: str) -> Done:
    words = ("publish", MODEL, "--types", "Q4_K_M,Q8_0", "--to", TARGET, "-o", "out", *options)
    env = {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", **env}
    return run_commands(hub, work / "home", words, **env)[0]


def is_private(created: dict[str, Any]) -> bool:
    """By what the client asked for, which depends on its version."""
    return created.get("visibility") == "private" or created.get("private") is True


def test_a_plan_and_a_card_write_nothing(hub: UploadHub, tmp_path: Path) -> None:
    fields = publish(hub, tmp_path, "--dry-run", "--json").fields
    assert [file["type"] for file in fields["files"]] == ["Q4_K_M", "Q8_0"]
    names = [Path(file["path"]).name for file in fields["files"]]
    assert all(name.endswith(f"-{kind}.gguf") for name, kind in zip(names, ("Q4_K_M", "Q8_0")))  # noqa: B905
    data = vars(ModelCard(fields["card"]).data)
    assert data["base_model"] == MODEL
    assert data["base_model_relation"] == "quantized"
    assert data["license"] == "apache-2.0"
    assert {"chat", "gguf", "mtp"} <= {*data["tags"]}
    assert all(name in fields["card"] for name in names)
    assert "include the model's multi-token prediction (MTP) head" in fields["card"]
    assert not (tmp_path / "out").exists()
    assert hub.created is None


@pytest.mark.thorough
def test_published_files_are_those_of_convert(
    hub: UploadHub, checkpoint: Path, tmp_path: Path
) -> None:
    done = publish(hub, tmp_path)
    assert done.code == 0, done.stderr
    local = {n: d for n, d in held(tmp_path / "out").items() if n != "release.json"}
    assert hub.stored == local
    assert sorted(Path(name).suffix for name in local) == [".gguf", ".gguf", ".md"]
    assert hub.created is not None
    assert is_private(hub.created)
    (tmp_path / "alone").mkdir()
    (tmp_path / "Tiny-3.5").symlink_to(checkpoint)
    words = ("convert", tmp_path / "Tiny-3.5", "-o", "alone", "--also", "Q8_0")
    (alone,) = run_commands(hub, tmp_path / "home", words)
    assert alone.code == 0, alone.stderr
    assert held(tmp_path / "alone") == {n: d for n, d in local.items() if n != "README.md"}
    # The token is in requests, and nowhere else.
    assert TOKEN in hub.tokens
    for data in held(tmp_path).values():
        assert TOKEN.encode() not in data
    assert TOKEN not in done.stdout + done.stderr
    # A second call uploads and converts nothing.
    hub.received.clear()
    assert publish(hub, tmp_path).code == 0
    assert not hub.received


@pytest.mark.thorough
def test_nothing_is_uploaded_without_being_asked_for(hub: UploadHub, tmp_path: Path) -> None:
    done = publish(hub, tmp_path, "--no-upload")
    assert done.code == 0, done.stderr
    assert hub.created is None
    sizes = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.gguf")}
    assert publish(hub, tmp_path, "--public").code == 0
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.gguf")} == sizes
    assert hub.created is not None
    assert not is_private(hub.created)


@pytest.mark.thorough
def test_an_upload_goes_on_with_what_is_missing(hub: UploadHub, tmp_path: Path) -> None:
    hub.refused_commits = 1
    failed = publish(hub, tmp_path)
    assert failed.code == 1
    assert TARGET in failed.last
    assert not hub.stored
    assert publish(hub, tmp_path).code == 0
    assert len(hub.stored) == 3
    assert len({*hub.received}) == 2


@pytest.mark.thorough
def test_uploaded_files_can_be_removed(hub: UploadHub, tmp_path: Path) -> None:
    assert publish(hub, tmp_path, "--no-upload", "--sidecar", "Q8_0").code == 0
    local = {n: d for n, d in held(tmp_path / "out").items() if n != "release.json"}
    words = ("--remove-local", "--sidecar", "Q8_0")
    hub.refused_commits = 1
    assert publish(hub, tmp_path, *words).code == 1
    assert len([*(tmp_path / "out").glob("*.gguf")]) == 3
    assert publish(hub, tmp_path, *words).code == 0
    assert hub.stored == local
    assert b"The mtp- file is the head alone" in local["README.md"]
    assert {*held(tmp_path / "out")} == {"README.md", "release.json"}
    hub.received.clear()
    assert publish(hub, tmp_path, *words).code == 0
    assert not hub.received, "the record and the hub say that nothing is left to do"
    assert {*held(tmp_path / "out")} == {"README.md", "release.json"}


@pytest.mark.thorough
def test_files_of_others_are_not_replaced(hub: UploadHub, tmp_path: Path) -> None:
    hub.created, hub.stored = {}, {"theirs.gguf": b"GGUF", "README.md": b"theirs"}
    before = dict(hub.stored)
    failed = publish(hub, tmp_path)
    assert failed.code == 1
    assert f"{TARGET}: exists with other files (README.md and 1 more)" in failed.last
    assert hub.stored == before
    assert not [*(tmp_path / "out").glob("*.gguf")], "it is found before the conversion"
    assert publish(hub, tmp_path, "--replace").code == 0
    assert "theirs.gguf" not in hub.stored
    assert len(hub.stored) == 3


class TestQuality:
    WORDS = ("publish", DEMO, "--types", "Q4_K_M,F16", "--to", "me/Demo-GGUF", "--no-upload")

    def test_tables_in_the_card(self, hub: UploadHub, tmp_path: Path) -> None:
        text = tmp_path / "text.txt"
        text.write_text((ROOT / "docs" / "bench.md").read_text(encoding="utf-8"), encoding="utf-8")
        words = (*self.WORDS, "-o", "out", "--text", text, "--chunks", "1")
        first, second = run_commands(hub, tmp_path / "home", words, words)
        assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
        card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
        [row] = [line for line in card.splitlines() if re.match(r"\| \S+Q4_K_M\.gguf \|.*±", line)]
        assert re.fullmatch(r"\| \S+ \| 0\.0\d{4} ± .* \| \d+\.\d+% \|.*\d% \d+% \d+% \|", row)
        assert re.search(r"Compared with \S+-F16\.gguf on 255 tokens", card)
        assert "Q4_K_M.gguf: starting" in first.stderr
        assert "starting" not in second.stderr, "the record has the figures"

    def test_models_that_do_not_fit_are_not_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mtp_gguf.gguf_tools.machine.process_memory.free_memory", lambda: 1000)
        (tmp_path / "text.txt").write_text("text")
        words = (*self.WORDS, "-o", tmp_path / "out", "--text", tmp_path / "text.txt")
        done = invoke(*words)
        assert done.exit_code == 0
        assert "not measured: F16 needs 11.1 MB of memory, and 1 kB are free" in done.stderr
        assert "## Quality" not in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


class TestList:
    def publish(self, hub: UploadHub, work: Path, lines: str, *options: object) -> Done:
        (work / "models.txt").write_text(lines, encoding="utf-8")
        words = ("publish", "--list", "models.txt", "--types", "Q8_0", "-o", "all", *options)
        env = {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        return run_commands(hub, work / "home", words, **env)[0]

    @pytest.mark.thorough
    def test_a_model_that_fails_does_not_stop_the_others(
        self, hub: UploadHub, checkpoint: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "Local").symlink_to(checkpoint)
        lines = f"# two are good\nnobody/Nothing\n{MODEL} {TARGET}  # this one\n\nLocal me/Second\n"
        to = ("--to", "me/{name}-GGUF")
        done = self.publish(hub, tmp_path, lines, *to, "--no-upload")
        assert done.code == 1
        assert "mtp-gguf: nobody/Nothing: no such model, or it is private" in done.stderr
        assert done.last.startswith("mtp-gguf: 1 of 3 models failed: nobody/Nothing; ")
        made = {path.parent.name: path.stat().st_mtime_ns for path in tmp_path.glob("all/*/*.gguf")}
        assert {*made} == {"Tiny-MTP-GGUF", "Second"}
        # A second call converts nothing again, and uploads what was not.
        (tmp_path / "models.txt").unlink()
        done = self.publish(hub, tmp_path, f"{MODEL} {TARGET}", *to, "--json")
        [model] = done.fields["models"]
        assert {*model["uploaded"]} == {*hub.stored}
        assert made == {p.parent.name: p.stat().st_mtime_ns for p in tmp_path.glob("all/*/*.gguf")}

    @pytest.mark.parametrize(
        ("lines", "told"),
        [
            ("# nothing\n", "expected a list of models, found none"),
            ("a/b\n", "line 1: expected SOURCE OWNER/NAME, found only a source"),
            ("\na/b c/d e/f\n", "line 2: expected SOURCE or SOURCE OWNER/NAME, found 3 words"),
            ("a/b 'c/d\n", "line 1: No closing quotation"),
            ("a/b c\n", "line 1: expected OWNER/NAME, found 'c'"),
            ("a/b c/d\ne/f c/d\n", "expected each repository once, found c/d 2 times"),
        ],
    )
    def test_lists_that_are_wrong(self, lines: str, told: str, tmp_path: Path) -> None:
        path = tmp_path / "models.txt"
        path.write_text(lines, encoding="utf-8")
        done = invoke("publish", "--list", path, "--types", "Q8_0", "--no-upload")
        assert done.exit_code == 1
        assert f"{path}: {told}" in done.stderr

    def test_names(self, tmp_path: Path) -> None:
        path = tmp_path / "models.txt"
        path.write_text("a/One@v2\n'./My Tune'\nhf://b/Two c/Other\n", encoding="utf-8")
        entries = read_catalogue(path, "me/{name}-GGUF")
        assert entries == [
            Entry("a/One@v2", "me/One-GGUF"),
            Entry("./My Tune", "me/My-Tune-GGUF"),
            Entry("hf://b/Two", "c/Other"),
        ]

    def test_a_model_or_a_list(self, tmp_path: Path) -> None:
        for words in ((), (MODEL, "--list", tmp_path / "x"), (MODEL,)):
            done = invoke("publish", *words, "--types", "Q8_0", "--no-upload")
            assert done.exit_code == 2


# Prints, when the program ends, its seconds of CPU time (other processes may take most of a
# machine's) and its own peak memory, to which the kernel's figure adds that of this process.
USAGE = """
import atexit, time
from mtp_gguf.gguf_tools.machine.process_memory import peak_memory
atexit.register(lambda: print(time.process_time(), peak_memory()))
"""


@pytest.mark.thorough
def test_a_plan_of_a_terabyte(tmp_path: Path) -> None:
    """Headers of 200 files with 600 experts in each of 60 layers, in bounded time and memory."""
    folder = tmp_path / "Large"
    write_sparse(folder, TERABYTE)
    assert sum(path.stat().st_size for path in folder.iterdir()) > 10**12
    words = ["publish", folder, "--types", "Q4_K_M,Q5_K_M,Q6_K,Q8_0", "--to", "me/Large-GGUF"]
    printed = run_python(USAGE + MAIN, *words, "--dry-run", "--json")
    plan, usage = printed.strip().rsplit("\n", 1)
    files = json.loads(plan)["files"]
    assert {file["type"] for file in files} == {"Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"}
    assert max(file["bytes"] for file in files) < 51 * 10**9
    assert files[0]["path"].endswith("-Q4_K_M-00001-of-00008.gguf")
    seconds, peak = usage.split()
    assert float(seconds) < 30
    assert int(peak) < 2 * 10**9


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--types", "Q4_K_M,Q9"), "--types"),
        (("--types", "Q8_0,Q8_0"), "expected each mix once"),
        (("--to", "nobody"), "expected OWNER/NAME"),
    ],
)
def test_wrong_options(words: tuple[str, ...], told: str, hub: UploadHub, tmp_path: Path) -> None:
    done = publish(hub, tmp_path, *words)
    assert done.code == 2
    assert told in " ".join(done.stderr.split())


def test_a_checkpoint_without_a_head_is_refused(models: Models, tmp_path: Path) -> None:
    bare = models.checkpoint(replace(TINY, name="bare", mtp=False))
    with UploadHub(MODEL, {"main": bare}) as hub:
        done = publish(hub, tmp_path)
    assert done.code == 1
    assert "expected a checkpoint with an MTP head, found none" in done.last
    assert not [*(tmp_path / "out").iterdir()]


def test_a_head_below_the_floor_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(acceptance.VARIABLE, "1")
    monkeypatch.setattr(acceptance, "_SECONDS", 0.0)
    files = ("publish", DEMO, "--types", "Q4_K_M,Q8_0", "--to", TARGET, "-o", tmp_path)
    words = (*files, "--no-upload", "--least-acceptance", "0.99")
    refused = invoke(*words)
    assert refused.exit_code == 1
    assert "of first drafts are accepted" in refused.output
    assert "less than --least-acceptance 99%: " in refused.output
    assert "it is not published; --force publishes it all the same" in refused.output
    assert not (tmp_path / "README.md").exists()
    succeed(*words, "--force")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "## Acceptance" in card
    for path in tmp_path.glob("*.gguf"):
        with open_model(path) as model:
            found = read_stored(model).acceptance
        assert found is not None
        text = f"| {path.name} | {found.greedy.text} | {found.sampled.text} | 8 |"
        assert text in card
    assert "](acceptance.png)" in card
    with Image.open(tmp_path / "acceptance.png") as picture:
        assert picture.size == (1200, 525)
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 100
    # What a file states is not measured again.
    monkeypatch.setattr("mtp_gguf.publish.release.record_acceptance", None)
    assert invoke(*words, "--force").exit_code == 0
    assert "less than --least-acceptance 99%: " in invoke(*words).output
    # They are recorded, for the card of files that are removed after their upload.
    record = json.loads((tmp_path / "release.json").read_text(encoding="utf-8"))
    assert {*record["acceptance"]} == {path.name for path in tmp_path.glob("*.gguf")}
