"""`mtp-gguf list` of folders; tests/gguf_tools/test_hub_gguf.py lists the hub's cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import TINY
from support.commands import check_refusal, invoke
from support.models import Models


@pytest.fixture
def folder(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, one without a head, one in shards, one cut off, and other files."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "models"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    whole = models.convert(TINY)
    for name in ("whole.gguf", "sub/-copy.gguf", ".hidden/x.gguf"):
        shutil.copy(whole, folder / name)
    shutil.copy(models.convert(TINY, "--no-mtp"), folder / "trunk.gguf")
    shutil.copy(models.convert(TINY, "--head-only"), folder / "mtp-other.gguf")
    (folder / "cut.gguf").write_bytes(whole.read_bytes()[:-5000])
    (folder / "notes.txt").touch()
    return folder


def listed(*folders: object) -> dict[str, Any]:
    done = invoke("list", *folders, "--json")
    assert done.exit_code == 0, done.output
    return {each["name"]: each for each in json.loads(done.stdout)["models"]}


def test_the_models_of_a_folder(folder: Path) -> None:
    found = listed(folder)
    names = ["cut.gguf", "sub/-copy.gguf", "trunk.gguf", "whole.gguf"]
    assert list(found) == [str(folder / name) for name in names]
    assert [each["can_draft"] for each in found.values()] == [False, True, True, True]
    trunk = found[str(folder / "trunk.gguf")]
    assert trunk["reason"] == "its head is in mtp-other.gguf"
    assert trunk["bytes"] == (folder / "trunk.gguf").stat().st_size
    assert "truncated" in found[str(folder / "cut.gguf")]["reason"]
    (folder / "mtp-other.gguf").unlink()
    assert "no MTP head" in listed(folder)[str(folder / "trunk.gguf")]["reason"]


def test_the_current_folder_by_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "sub")
    assert list(listed()) == ["./-copy.gguf"]
    lines = invoke("list").stdout.splitlines()
    assert lines[0].split() == ["size", "drafts", "model"]
    assert lines[1].split()[2:] == ["yes", "./-copy.gguf"]
    monkeypatch.chdir(folder.parent)
    assert list(listed()) == [f"models/{n}" for n in ("cut.gguf", "trunk.gguf", "whole.gguf")]


def test_no_models_and_no_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = invoke("list", tmp_path / "empty")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no models found" in done.stderr
    for path in (tmp_path / "absent", folder / "whole.gguf"):
        done = invoke("list", path)
        check_refusal(done.exit_code, done.stderr, "expected a folder")
