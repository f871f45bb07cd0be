"""Deltas of synthetic patches. `test_patches.py` checks those that the package has."""

from __future__ import annotations

import difflib
import re

import pytest

from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.server import patches
from mtp_gguf.server.deltas import apply_delta, make_delta
from mtp_gguf.server.patches import Addition, read_patches

TEXT = [f"line {i}" for i in range(60)]
FIXED = {8: ["line 8, fixed"], 30: ["line 30", "and more"], 50: []}


def patch(
    old: list[str], changes: dict[int, list[str]], name: str = "a.txt", blob: str = "0"
) -> bytes:
    """A patch that replaces lines of `old`, as git writes it."""
    new = [line for i, text in enumerate(old) for line in changes.get(i, [text])]
    diff = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="")
    head = [f"diff --git a/{name} b/{name}", f"index {blob * 40}..{'f' * 40} 100644"]
    return "\n".join([*head, *diff, ""]).encode()


def without_blobs(data: bytes) -> str:
    """A patch without the names of blobs."""
    return re.sub(r"^index .*\n", "", data.decode(), flags=re.MULTILINE)


def plain(data: bytes) -> str:
    """A patch without the names of blobs and the numbers of lines."""
    return re.sub(r"(?<=^@@) .*(?= @@)", "", without_blobs(data), flags=re.MULTILINE)


def moved() -> list[str]:
    """The file in another llama.cpp: twelve lines further down, with another neighbour of one."""
    return [f"new {i}" for i in range(12)] + TEXT[:31] + ["neighbour"] + TEXT[31:]


OTHER = {20: ["line 8, fixed"], 42: ["line 30", "and more"], 63: [], 71: ["line 58, fixed"]}


def test_a_delta_makes_one_patch_of_the_other() -> None:
    ours, theirs = patch(TEXT, FIXED), patch(moved(), OTHER, blob="1")
    delta = make_delta(ours, theirs)
    assert without_blobs(apply_delta(ours, delta)) == without_blobs(theirs)
    assert delta.decode().splitlines()[0] == "a.txt 1:+12 3:+13"
    assert len(delta) < len(theirs)
    assert not re.search(rb"^.?@@ -\d", delta, re.MULTILINE)
    assert make_delta(ours, ours) == b""


def test_a_fix_is_written_once() -> None:
    """Also one that moves all lines, as another patch does, and one more hunk."""
    delta = make_delta(patch(TEXT, FIXED), patch(moved(), OTHER))
    before = ["first"] * 5
    fixed = {i + 5: lines for i, lines in FIXED.items()} | {13: ["fixed again"], 20: ["a hunk"]}
    other = {i + 5: lines for i, lines in OTHER.items()} | {25: ["fixed again"], 32: ["a hunk"]}
    ours, theirs = patch(before + TEXT, fixed), patch(before + moved(), other)
    assert without_blobs(apply_delta(ours, delta)) == without_blobs(theirs)
    assert make_delta(ours, theirs) == delta


def test_a_change_among_equal_hunks_stays_at_its_place() -> None:
    text = ["begin", *(["a", "b", "c", "x", "d", "e", "f"] * 6), "end"]
    changes = {i: ["y"] for i in range(4, 43, 7)}
    for i in changes:
        other = [*text[: i + 1], "one more", *text[i + 1 :]]
        theirs = patch(other, {j + (j > i): lines for j, lines in changes.items()})
        ours = patch(text, changes)
        assert plain(apply_delta(ours, make_delta(ours, theirs))) == plain(theirs)


def test_new_files_and_messages_can_differ() -> None:
    def new(lines: int, title: str) -> bytes:
        head = f"Subject: {title}\n\n---\ndiff --git a/n.cpp b/n.cpp\nnew file mode 100644\n"
        text = "".join(f"+int n{i};\n" for i in range(lines))
        return f"{head}--- /dev/null\n+++ b/n.cpp\n@@ -0,0 +1,{lines} @@\n{text}\n".encode()

    ours, theirs = new(20, "old") + patch(TEXT, FIXED), new(23, "new") + patch(TEXT, FIXED)
    delta = make_delta(ours, theirs)
    assert without_blobs(apply_delta(ours, delta)) == without_blobs(theirs)
    assert [line for line in delta.decode().splitlines() if line[0] == "@"] == [
        "@@ message",
        "@@ n.cpp",
    ]


def test_a_delta_that_does_not_fit_is_an_error_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delta = make_delta(patch(TEXT, FIXED), patch(moved(), OTHER))
    files = {
        ("upstream", ".patch"): Addition("0001-a.patch", patch(TEXT, {8: ["line 8, fixed"]})),
        ("b11549", ".delta"): Addition("0001-a.delta", delta),
    }
    found = {key: {"0001": file} for key, file in files.items()}
    monkeypatch.setattr(patches, "_files", lambda *key: found.get(key, {}))
    assert len(read_patches()) == 1
    with pytest.raises(ServerError) as error:
        read_patches("b11549")
    assert str(error.value) == (
        "patches/b11549/0001-a.delta: a.txt: expected in the patch the 9 lines from ' line 29', "
        'found them nowhere; renew it as "Deltas" in patches/README.md says'
    )
