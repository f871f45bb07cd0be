"""The patches on the pristine sources, as pip hands them over."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_gguf.server.patches import (
    APPLIES,
    HEAD_FOLDER,
    OPTIONAL,
    Addition,
    add_head,
    copy_old_files,
    fit_copy,
    purposes,
    read_head_sources,
    read_patches,
)
from mtp_gguf.server.upstream_source import (
    base,
    base_names,
    cache_folder,
    fetch_archive,
    llama_cpp_source,
)
from support.commands import held

PATCHES = Path(__file__).parents[2] / "patches"
FOLDERS = (PATCHES / "upstream", PATCHES)
COMMENT = "// erase any checkpoints with pos_max > pos_next"  # in SERVER, changed by 0001
SERVER = "tools/server/server-context.cpp"


def remake(*words: object, patches: Path = PATCHES) -> subprocess.CompletedProcess[str]:
    """Run remake.py of a folder of patches."""
    command = [sys.executable, patches / "remake.py", *words]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=600
    )


def test_the_package_has_the_patches_and_the_index_names_them() -> None:
    names = [patch.name for patch in read_patches()]
    assert names == [path.name for folder in FOLDERS for path in sorted(folder.glob("*.patch"))]
    numbers = {name[:4] for name in names}
    assert len(numbers) == len(names)
    index = (PATCHES / "README.md").read_text(encoding="utf-8")
    assert numbers <= set(re.findall(r"^\| (\d{4}) \|", index, re.MULTILINE))
    assert purposes().keys() == numbers


def test_the_sources_of_the_head_are_whole(tmp_path: Path) -> None:
    add_head(read_head_sources(), tmp_path)
    folder = tmp_path / HEAD_FOLDER
    head = (folder / "sources.cmake").read_text().partition("set(MTP_SESSION_SOURCES")[0]
    listed = re.findall(r"^ +(src/\S+\.cpp)", head, re.MULTILINE)
    assert "src/head/head_api.cpp" in listed
    waiting = {folder / name for name in listed}
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        names = re.findall(r'^#include "([a-z_/]+\.h)"', path.read_text(), re.MULTILINE)
        for name in names:
            assert name != "llama.h", f"{path.name}: the head knows ggml alone"
            near = [folder / place / name for place in ("src", "include")]
            waiting |= {file for file in near if file.is_file()} - seen
            assert name.startswith("g") or any(file.is_file() for file in near), (path, name)


def test_the_adapter_that_a_patch_includes_is_among_the_sources() -> None:
    sources = {source.name: source.data.decode() for source in read_head_sources()}
    patches = "".join(patch.data.decode() for patch in read_patches())
    included = re.findall(rf'^\+#include "\.\./{HEAD_FOLDER}/(\S+)"', patches, re.MULTILINE)
    assert included == ["server/speculative_mtp.h"]
    own = re.findall(r'^#include "\.\./(\S+)"', sources[included[0]], re.MULTILINE)
    assert own
    assert set(own) <= sources.keys()


def test_the_patches_name_no_author_and_no_machine() -> None:
    for patch in read_patches():
        author = next(line for line in patch.data.splitlines() if line.startswith(b"From: "))
        assert author == b"From: mtp-gguf <mtp-gguf@localhost>"
        assert b"/tmp/" not in patch.data


@pytest.mark.thorough
@pytest.mark.upstream
@pytest.mark.parametrize("name", base_names())
def test_the_patches_apply_and_are_as_their_commits_make_them(name: str) -> None:
    done = remake("check", name)
    assert done.returncode == 0, done.stderr
    assert f"{len(read_patches(name))} patches" in done.stdout


@pytest.mark.parametrize("name", base_names()[1:])
def test_another_base_has_versions_of_our_patches(name: str) -> None:
    ours = {patch.name for patch in read_patches()}
    files = [path for path in (PATCHES / name).iterdir() if path.name != "BASE"]
    here = {f"{path.stem}.patch" for path in files}
    assert len(here) == len(files)
    assert here < ours
    superseded = base(name).superseded
    assert len(read_patches(name)) == len(ours) - len(superseded)
    assert not {path[:4] for path in here} & set(superseded)


@pytest.mark.thorough
@pytest.mark.upstream
def test_files_that_our_patches_add_are_sources(tmp_path: Path) -> None:
    """`make` writes each of them once: whole in sources/, by its name in the patch."""
    made, tree = tmp_path / "patches", tmp_path / "llama.cpp"
    shutil.copytree(PATCHES, made, ignore=lambda *_: ["sources", "__pycache__"])
    assert remake("checkout", tree).returncode == 0
    assert remake("make", tree, patches=made).returncode == 0
    assert held(made) == {name: data for name, data in held(PATCHES).items() if ".pyc" not in name}
    added = {path.relative_to(made / "sources") for path in (made / "sources").rglob("*.*")}
    for path in added:
        assert (tree / path).read_bytes() == (made / "sources" / path).read_bytes()
    assert Path("src/llama-memory-replay.cpp") in added
    whole = re.compile("^new file mode .*\nindex ", re.MULTILINE)
    assert not [path.name for path in made.glob("*.patch") if whole.search(path.read_text())]


@pytest.mark.thorough
@pytest.mark.upstream
@pytest.mark.parametrize("name", base_names())
def test_git_and_patch_make_the_same_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = shutil.which, []
    for tool in ("git", "patch"):
        monkeypatch.setattr(
            shutil, "which", lambda wanted, t=tool: real(t) if wanted == t else None
        )
        copies = tmp_path / tool
        copies.mkdir()
        for patch in read_patches(name):
            assert fit_copy(patch, llama_cpp_source(name), copies) == APPLIES
        made.append(held(copies))
    assert made[0] == made[1]


@pytest.mark.upstream
@pytest.mark.parametrize("name", base_names())
def test_hunks_that_fit_in_several_places_have_their_line_number(name: str, tmp_path: Path) -> None:
    """git and patch take the nearest place; all hunks go where they went when they were made."""
    ambiguous = []
    for patch in read_patches(name):
        copy_old_files(patch, llama_cpp_source(name), tmp_path)
        for section in re.split(r"^diff --git ", patch.data.decode(), flags=re.MULTILINE)[1:]:
            old_file = re.search(r"^--- a/(.+)$", section, re.MULTILINE)
            text = (tmp_path / old_file[1]).read_text().split("\n") if old_file else []
            for hunk in re.split(r"^@@ -", section, flags=re.MULTILINE)[1:]:
                header, *lines = hunk.split("\n")
                old = [line[1:] for line in lines if line[:1] in ("-", " ")]
                places = [i for i in range(len(text)) if text[i : i + len(old)] == old]
                if len(places) > 1 and int(header.split(",")[0]) - 1 not in places:
                    ambiguous.append((patch.name, header, places))
        assert fit_copy(patch, tmp_path, tmp_path) == APPLIES
    assert not ambiguous


@pytest.mark.upstream
@pytest.mark.parametrize("name", base_names())
def test_each_bug_fix_applies_without_the_other_patches(name: str) -> None:
    source = llama_cpp_source(name)
    apart = {**os.environ, "GIT_CEILING_DIRECTORIES": str(source.parent)}
    fixes = [patch for patch in read_patches(name) if patch.name < "0100"]
    llvmpipe = PATCHES.parent / ".ci/vulkan/llvmpipe.patch"
    for patch in [*fixes, Addition(llvmpipe.name, llvmpipe.read_bytes())]:
        check = ["git", "apply", "--check", "-"]
        done = subprocess.run(check, cwd=source, env=apart, input=patch.data, check=False)
        assert done.returncode == 0, patch.name


@pytest.mark.thorough
@pytest.mark.upstream
@pytest.mark.parametrize("name", base_names())
def test_an_optional_patch_can_be_left_out(name: str, tmp_path: Path) -> None:
    for number in OPTIONAL:
        series = [patch for patch in read_patches(name) if patch.name[:4] != number]
        copies = tmp_path / number
        copies.mkdir()
        states = [fit_copy(patch, llama_cpp_source(name), copies) for patch in series]
        assert set(states) == {APPLIES}, number


def test_each_bug_fix_names_its_test() -> None:
    for path in FOLDERS[0].glob("*.patch"):
        message = path.read_text(encoding="utf-8").partition("\n---\n")[0]
        test = message.partition("\nTest: ")[2]
        (file,) = re.findall(r"\btests/\S+\.py\b", test)
        code = (PATCHES.parent / file).read_text(encoding="utf-8")
        assert all(f"def {name}(" in code for name in re.findall(r"\btest_\w+(?=\sin)", test))


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.upstream
def test_the_hunks_that_fail_on_another_llama_cpp_are_listed(tmp_path: Path) -> None:
    patches = [patch.data.decode() for patch in read_patches()]
    names = {name for patch in patches for name in re.findall(r"^--- a/(.+)$", patch, re.MULTILINE)}
    for name in ["include/llama.h", *names]:
        if (llama_cpp_source() / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(llama_cpp_source() / name, tmp_path / name)
    assert "0 of " in remake("hunks", tmp_path).stdout

    change(tmp_path / SERVER, COMMENT, "// erase checkpoints with pos_max > pos_next")
    change(
        tmp_path / "src/models/delta-net-base.cpp",
        "const int64_t s_slot = K - t;\n",
        "// a comment\n            const int64_t s_slot = K - t;\n",
    )
    (tmp_path / "ggml/src/ggml-cpu/CMakeLists.txt").unlink()
    before = held(tmp_path)
    done = remake("hunks", tmp_path)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if not line.endswith(": applies")]
    touched = ["0001", "0003", "0104", "0106"]
    assert [line[:4] for line in found if line[0] != " "] == [*touched, "4 of"]
    (server,) = [line for line in found if line.startswith(f"    {SERVER}: @@ -")]
    assert server.endswith(f"1 of its 10 old lines are not in the file, first `{COMMENT}`")
    (slots,) = [line for line in found if "delta-net-base.cpp: @@ -" in line]
    assert slots.endswith("all of its old lines are in the file, but not one after the other")
    assert sum("ggml-cpu/CMakeLists.txt: No such file or directory" in line for line in found) == 2
    assert held(tmp_path) == before


@pytest.mark.sample(1)
@pytest.mark.upstream
def test_the_status_of_each_patch_is_listed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(llama_cpp_source(), tree)
    change(tree / SERVER, COMMENT, "// erase checkpoints with pos_max > pos_next")
    fix = next(FOLDERS[0].glob("0013-*.patch"))
    apart = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    subprocess.run(["git", "apply", fix], cwd=tree, check=True, env=apart)
    before = held(tree)
    done = remake("status", tree)
    assert done.returncode == 0, done.stderr
    rows = dict(line.split()[:2] for line in done.stdout.splitlines()[1:-3])
    assert list(rows) == [patch.name.removesuffix(".patch") for patch in read_patches()]
    assert [name[:4] for name, state in rows.items() if state == "conflicts"] == ["0001"]
    assert [name[:4] for name, state in rows.items() if state == "superseded"] == ["0013"]
    assert done.stdout.endswith(f"{len(rows) - 2} applies, 1 superseded\n")
    assert held(tree) == before


def test_sources_of_something_else_are_refused(tmp_path: Path) -> None:
    for command in ("hunks", "rebase", "status"):
        done = remake(command, tmp_path)
        assert done.returncode == 1
        assert done.stderr.endswith("expected the sources of llama.cpp, found no include/llama.h\n")


def test_errors_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    done = remake("check")
    assert done.returncode == 1
    assert re.fullmatch(r".*cannot be made: Not a directory\n", done.stderr)


@pytest.mark.slow
@pytest.mark.upstream
def test_a_rebase_stops_at_a_conflict_and_makes_the_patches_that_differ(tmp_path: Path) -> None:
    """pytest -m slow tests/server/test_patches.py"""
    tree, series = tmp_path / "tree", tmp_path / "series"
    shutil.copytree(llama_cpp_source(), tree)
    change(tree / SERVER, COMMENT, "// erase checkpoints with pos_max > pos_next")
    done = remake("rebase", tree)
    assert "1 of " in done.stdout
    assert done.returncode == 1
    assert done.stderr.startswith("0001-server-drop")
    assert f"conflicts in {SERVER}; " in done.stderr
    git = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}

    text = (tree / SERVER).read_text()
    merged = "                                // erase checkpoints with pos_max >= pos_next\n"
    (tree / SERVER).write_text(re.sub(r"<<<<<<< .*?>>>>>>> .*?\n", merged, text, flags=re.DOTALL))
    subprocess.run(["git", "add", SERVER], cwd=tree, check=True, env=git)
    subprocess.run(["git", "am", "--continue"], cwd=tree, check=True, env=git, capture_output=True)
    done = remake("make", tree, series)
    assert done.returncode == 0, done.stderr
    (path,) = series.iterdir()
    assert re.fullmatch(r"0001-.*\.delta", path.name)
    changed = r"^\+\+ +// erase checkpoints with pos_max >= pos_next$"
    assert re.search(changed, path.read_text(), re.MULTILINE)
    assert "found a repository" in remake("rebase", tree).stderr


@pytest.mark.thorough
@pytest.mark.upstream
def test_pip_fetches_the_pinned_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
    archive = fetch_archive()
    assert archive.parent == cache_folder("upstream")
    assert fetch_archive() == archive


@pytest.mark.thorough
@pytest.mark.upstream
def test_a_dirty_tree_makes_no_patches(tmp_path: Path) -> None:
    tree = tmp_path / "llama.cpp"
    assert remake("checkout", tree).returncode == 0
    (tree / "README.md").write_text("changed")
    before = held(PATCHES)
    done = remake("make", tree)
    assert done.returncode == 1
    assert "in no commit" in done.stderr
    assert held(PATCHES) == before
