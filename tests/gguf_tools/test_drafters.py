"""Drafters that are no MTP head (Eagle-3, DFlash, DSpark, assistants): what they are and fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.hub.local_models import models_in
from support.commands import check_refusal, invoke, refused, succeed
from support.drafters import write_drafter
from support.gguf_files import edited, loads
from support.models import Models
from support.stand_in_server import PATCHED_HELP, write_stand_in

KINDS = {
    "eagle3": ("Eagle-3", "draft-eagle3"),
    "dflash": ("DFlash", "draft-dflash"),
    "dspark": ("DSpark", "draft-dspark"),
}
HELP = f"{PATCHED_HELP} draft-dflash,draft-dspark"


@pytest.fixture
def trunk(models: Models, tmp_path: Path) -> Path:
    return Path(shutil.copy(models.convert("dense-3v", "--mtp-f16"), tmp_path / "model.gguf"))


def doctor(*words: object) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(invoke("doctor", *words, "--json").stdout)
    return fields


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_recognized(kind: str, trunk: Path, tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", kind, trunk)
    name, spec_type = KINDS[kind]
    assert loads(path)
    listed = succeed("list-tensors", path)
    assert f"{name} drafter, for a model with embeddings of" in listed
    assert f"--spec-type {spec_type}" in listed
    fields = json.loads(succeed("list-tensors", path, "--json"))
    assert fields["drafter"]["name"] == name
    assert not fields["head"]["ready"]
    alone = doctor(path)
    assert alone["can_draft"]
    [note] = alone["findings"]
    assert "it fits model.gguf beside it" in note["text"]
    pair = doctor(trunk, "--head", path)
    assert pair["runs_with"] == [
        f"llama-server -m {trunk} -md {path} --spec-type {spec_type}",
        f"mtp-gguf serve {trunk} --head {path}",
    ]
    assert "fits this model" in pair["findings"][0]["text"]
    assert f"drafter: {name} drafter" in succeed("doctor", trunk, "--head", path)


def test_a_reduced_vocabulary_loads(trunk: Path, tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", "eagle3", trunk, d2t=64)
    assert loads(path)
    assert doctor(trunk, "--head", path)["can_draft"]


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        ("eagle3", {"target_hidden_size": 96}, "expected a model with embeddings of 96, found"),
        ("dflash", {"embedding_length": 96}, "expected a model with embeddings of 96, found"),
        ("dflash", {"target_layers": [1, 400]}, "expected a model with at least 400 layers, found"),
        ("assistant", {}, "expected a gemma4 model, found qwen35"),
    ],
)
def test_a_drafter_of_another_model_does_not_fit(
    kind: str, changed: dict[str, Any], said: str, trunk: Path, tmp_path: Path
) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", kind, trunk, **changed)
    result = invoke("doctor", trunk, "--head", path, "--json")
    assert result.exit_code == 1
    [fault] = json.loads(result.stdout)["findings"]
    assert fault["code"] == "does-not-fit"
    assert said in fault["text"]
    assert "beside it" not in str(doctor(path))
    server = write_stand_in(tmp_path / "server", HELP)
    words = ("serve", trunk, "--llama-server", server, "--head", path, "--print-command")
    refused(tmp_path, *words, words=(said,))


def test_another_tokenizer_does_not_fit(trunk: Path, models: Models, tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", "dflash", trunk)

    tokens = Value(ValueType.STRING, [f"<{i}>" for i in range(1024)])
    other = edited(path, tmp_path / "other.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    assert "different tokenizers" in str(doctor(trunk, "--head", other)["findings"])


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        ("eagle3", {"target_hidden_size": None}, "eagle3.target_hidden_size: expected the embed"),
        ("eagle3", {"target_layers": [1, 2]}, "target_layers: expected 3 layers, found 2"),
        ("dflash", {"target_layers": None}, "target_layers: expected numbers of layers of the"),
        ("dflash", {"target_layers": 3}, "target_layers: expected numbers of layers of the trunk"),
        ("dflash", {"target_layers": [-1, 3]}, "expected numbers of layers up to 512, found [-1"),
        ("dflash", {"target_layers": list(range(513))}, "expected numbers of layers of the trunk"),
        ("dflash", {"embedding_length": "wide"}, "embedding_length: expected a whole number"),
    ],
)
def test_damaged_drafters(
    kind: str, changed: dict[str, Any], said: str, trunk: Path, tmp_path: Path
) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", kind, trunk, **changed)
    assert "cannot be used: " in succeed("list-tensors", path)
    result = invoke("doctor", path)
    assert result.exit_code == 1
    assert f"{path}: cannot be used" in result.stdout
    assert said in result.stdout
    pair = doctor(trunk, "--head", path)
    assert not pair["can_draft"]
    assert said in pair["findings"][0]["text"]


def test_serve_starts_it_with_its_own_kind(trunk: Path, tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", "dspark", trunk)
    server = write_stand_in(tmp_path / "server", HELP)
    words = ("serve", trunk, "--llama-server", server, "--head", path, "--print-command")
    assert f"--spec-type draft-dspark -md {path}\n" in succeed(*words)
    assert "--spec-type draft-dspark,lookup -md" in succeed(*words, "--lookup", "--depth", 3)
    assert f"-md {path} --spec-draft-n-max 3" in succeed(*words, "--depth", 3)
    refused(tmp_path, *words, "--depth", "auto", words=("--depth auto: expected a number from 1",))
    older = write_stand_in(tmp_path / "older", PATCHED_HELP)
    old = ("serve", trunk, "--llama-server", older, "--head", path, "--print-command")
    refused(tmp_path, *old, words=("does not support draft-dspark",))
    result = invoke("serve", path, "--llama-server", server, "--print-command")
    check_refusal(result.exit_code, result.stderr, "contains only a drafter (DSpark drafter")


def test_what_is_for_heads_leaves_it_alone(trunk: Path, tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", "eagle3", trunk)
    said = "expected an MTP head for --load and --explain, found another drafter (Eagle-3)"
    refused(tmp_path, "doctor", trunk, "--head", path, "--load", words=(said,))
    base, out = tmp_path / "base.gguf", tmp_path / "out.gguf"
    succeed("strip", trunk, "-o", base)
    words = ("no MTP head for architecture 'eagle3'",)
    refused(tmp_path, "graft", base, "--from", path, "-o", out, words=words)
    assert [model.path.name for model in models_in(tmp_path)] == ["base.gguf", "model.gguf"]
