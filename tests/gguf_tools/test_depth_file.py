"""Where depth "auto" keeps what it has learned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.depth_file import VARIABLE, depth_file


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    os.utime(path, ns=(0, 0))
    return path


def test_what_changes_the_costs_has_a_file_of_its_own(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "head.gguf"
    other.write_bytes(b"GGUF")
    files = [
        depth_file([model], "4 threads"),
        depth_file([model], "2 threads"),
        depth_file([model, other], "4 threads"),
    ]
    os.utime(model, ns=(0, 1))
    files.append(depth_file([model], "4 threads"))
    assert len(set(files)) == len(files)
    assert all(file and file.parent == tmp_path / "cache/mtp-gguf/depth" for file in files)
    assert depth_file([model], "4 threads") == files[-1]


def test_the_variable_names_the_file_or_none(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    assert depth_file([model]) is None
    monkeypatch.setenv(VARIABLE, "/tmp/some file")
    assert depth_file([model]) == Path("/tmp/some file")


def test_a_model_that_is_gone_has_none(model: Path) -> None:
    model.unlink()
    assert depth_file([model]) is None


def test_the_oldest_are_removed(model: Path) -> None:
    path = depth_file([model])
    assert path
    path.parent.mkdir(parents=True)
    for i in range(205):
        file = path.with_name(f"{i}.depth")
        file.touch()
        os.utime(file, ns=(i, i))
    assert depth_file([model]) == path
    assert {int(file.stem) for file in path.parent.iterdir()} == set(range(5, 205))
