"""The patches on the pristine sources, as pip hands them over."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_gguf.server.patches import (
    HEAD_FOLDER,
    add_head,
    read_head_sources,
    read_patches,
)
from mtp_gguf.server.upstream_source import cache_folder, fetch_archive, llama_cpp_source

PATCHES = Path(__file__).parents[2] / "patches"


def test_the_package_has_the_patches_and_the_index_names_them() -> None:
    names = [patch.name for patch in read_patches()]
    assert names == sorted(path.name for path in PATCHES.glob("*.patch"))
    index = (PATCHES / "README.md").read_text(encoding="utf-8")
    for name in names:
        assert f"| {name[:4]} |" in index


def test_the_sources_of_the_head_are_whole(tmp_path: Path) -> None:
    add_head(read_head_sources(), tmp_path)
    folder = tmp_path / HEAD_FOLDER
    listed = re.findall(
        r"\$\{CMAKE_CURRENT_LIST_DIR\}/(\S+\.cpp)", (folder / "sources.cmake").read_text()
    )
    assert "src/head_api.cpp" in listed
    waiting = {folder / name for name in listed}
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        names = re.findall(r'^#include "([a-z_]+\.h)"', path.read_text(), re.MULTILINE)
        for name in names:
            assert name != "llama.h", f"{path.name}: the head knows ggml alone"
            near = [folder / place / name for place in ("src", "include")]
            waiting |= {file for file in near if file.is_file()} - seen
            assert name.startswith("g") or any(file.is_file() for file in near), (path, name)


def test_the_patches_name_no_author_and_no_machine() -> None:
    for patch in read_patches():
        author = next(line for line in patch.data.splitlines() if line.startswith(b"From: "))
        assert author == b"From: mtp-gguf <mtp-gguf@localhost>"
        assert b"/tmp/" not in patch.data


@pytest.mark.upstream
def test_the_patches_apply_and_are_as_their_commits_make_them() -> None:
    done = subprocess.run(
        [sys.executable, PATCHES / "remake.py", "check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(read_patches())} patches" in done.stdout


@pytest.mark.upstream
def test_each_bug_fix_applies_without_the_other_patches() -> None:
    index = (PATCHES / "README.md").read_text(encoding="utf-8")
    numbers = re.findall(r"^\| (\d{4}) \| Bug fix\.", index, re.MULTILINE)
    assert len(numbers) == 4
    source = llama_cpp_source()
    apart = {**os.environ, "GIT_CEILING_DIRECTORIES": str(source.parent)}
    for patch in read_patches():
        if patch.name[:4] in numbers:
            check = ["git", "apply", "--check", "-"]
            done = subprocess.run(check, cwd=source, env=apart, input=patch.data, check=False)
            assert done.returncode == 0, patch.name


@pytest.mark.upstream
def test_pip_fetches_the_pinned_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
    archive = fetch_archive()
    assert archive.parent == cache_folder("upstream")
    assert fetch_archive() == archive


@pytest.mark.upstream
def test_a_dirty_tree_makes_no_patches(tmp_path: Path) -> None:
    tree = tmp_path / "llama.cpp"
    remake = [sys.executable, str(PATCHES / "remake.py")]
    subprocess.run([*remake, "checkout", tree], check=True)
    (tree / "README.md").write_text("changed")
    before = {path.name: path.read_bytes() for path in PATCHES.glob("*.patch")}
    done = subprocess.run([*remake, "make", tree], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "in no commit" in done.stderr
    assert {path.name: path.read_bytes() for path in PATCHES.glob("*.patch")} == before
