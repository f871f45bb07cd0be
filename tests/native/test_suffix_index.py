"""The suffix index against a naive search, and how its operations and memory grow."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_gguf.native.errors import NativeError
from mtp_gguf.native.suffix_index import Match, SuffixIndex
from support.native_build import ROOT

# Few different tokens, so that suffixes repeat; a negative number truncates to that share.
EDITS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 3), min_size=1, max_size=8),
        st.floats(0.0, 1.0),
    ),
    max_size=40,
)


MOST = 64  # kMostContext of native/src/lookup/suffix_index.h


def longest_repeated_suffix(tokens: list[int]) -> int:
    """Length of the longest suffix that also ends before the last token, by comparison."""
    best = 0
    for end in range(len(tokens) - 1):
        length = 0
        while length <= min(end, MOST - 1) and tokens[end - length] == tokens[-1 - length]:
            length += 1
        best = max(best, length)
    return best


@settings(max_examples=300, deadline=None)
@given(EDITS)
def test_matches_are_the_longest_and_real(edits: list[list[int] | float]) -> None:
    tokens: list[int] = []
    with SuffixIndex() as index:
        for edit in edits:
            if isinstance(edit, float):
                del tokens[int(len(tokens) * edit) :]
                index.truncate(len(tokens))
            else:
                tokens += edit
                index.append(edit)
            match = index.match()
            assert match.length == longest_repeated_suffix(tokens)
            if match.length:
                assert match.next < len(tokens)
                earlier = tokens[match.next - match.length : match.next]
                assert earlier == tokens[len(tokens) - match.length :]
                text = tokens + index.propose(12)
                assert text[len(tokens) :] == text[match.next : match.next + 12]
            else:
                assert index.propose(12) == []


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_matches_are_the_latest_and_agreements_are_counted(tokens: list[int]) -> None:
    with SuffixIndex() as index:
        index.append(tokens)
        match = index.match()
    if match.length:
        suffix = tokens[-match.length :]
        starts = [
            i for i in range(len(tokens) - match.length) if tokens[i:][: match.length] == suffix
        ]
        following = [start + match.length for start in starts]
        assert match.next == following[-1]
        same = 0
        while same < min(4, len(starts)) and tokens[following[-1 - same]] == tokens[match.next]:
            same += 1
        assert match.agreeing == (same if len(starts) > 1 else 0)


def test_the_latest_occurrence_is_copied() -> None:
    with SuffixIndex() as index:
        index.append([1, 2, 3, 9, 1, 2, 4, 9, 1, 2])
        assert index.match() == Match(3, 6)  # 9 1 2, followed by 4
        assert index.propose(3) == [4, 9, 1]
        index.truncate(9)
        index.append([7, 1, 2])
        assert index.match() == Match(2, 6, 1)  # 1 2, last followed by 4, not by what was truncated


def test_a_repeated_token_is_continued_for_ever() -> None:
    with SuffixIndex() as index:
        index.append([5] * 3)
        assert index.propose(6) == [5] * 6


@pytest.mark.parametrize("kind", ["one token", "two tokens", "period", "all different"])
def test_memory_grows_linearly(kind: str) -> None:
    patterns: dict[str, Callable[[int], int]] = {
        "one token": lambda i: 5,
        "two tokens": lambda i: (i * 2654435761 >> 16) & 1,
        "period": lambda i: i % 1000,
        "all different": lambda i: i,
    }
    n = 80_000
    tokens = [patterns[kind](i) for i in range(n)]
    with SuffixIndex() as index:
        for _ in range(2):
            index.append(tokens)
            assert index.nbytes < 110 * n + 10_000
            index.truncate(0)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_operations_grow_linearly(tmp_path: Path) -> None:
    """Counted, not timed, on inputs that are bad for a search, also with alternating rollbacks."""
    program = tmp_path / "growth"
    counted = ("lookup/text_drafts", "lookup/suffix_index")
    others = ("depth/acceptance", "lookup/corpus", "depth/costs", "depth/depth")
    options = ["-std=c++17", "-O1", f"-I{ROOT / 'native/src'}", f"-I{ROOT / 'native/include'}"]
    for source in counted:
        compiled = [f"{ROOT}/native/src/{source}.cpp", "-o", f"{tmp_path / Path(source).name}.o"]
        command = ["c++", *options, "-fsanitize-coverage=trace-pc", "-c", *compiled]
        subprocess.run(command, check=True, capture_output=True)
    linked: list[object] = [
        ROOT / "tests/support/text_drafts_growth.cpp",
        *(f"{tmp_path / Path(source).name}.o" for source in counted),
        *(f"{ROOT}/native/src/{source}.cpp" for source in (*others, "error", "file_map")),
    ]
    subprocess.run(
        ["c++", *options, "-o", program, *map(str, linked)], check=True, capture_output=True
    )
    done = subprocess.run([program], check=True, capture_output=True, text=True)
    blocks: dict[str, list[int]] = {}
    for line in done.stdout.splitlines():
        kind, n, count = line.split("\t")
        blocks.setdefault(kind, []).append(int(count))
        assert int(count) > 10 * int(n)
    assert len(blocks) == 11
    for kind, (small, large) in blocks.items():  # 8 times the tokens
        assert large < 10 * small, (kind, small, large)


def test_errors_leave_the_index_unchanged() -> None:
    with SuffixIndex() as index:
        index.append([1, 2, 1])
        with pytest.raises(NativeError, match="tokens: expected 0 to"):
            index.append([2, 1, -7])
        assert index.match() == Match(1, 1)
        with pytest.raises(NativeError, match="size: expected 0 to 3, found 4"):
            index.truncate(4)
        with pytest.raises(NativeError, match="size"):
            index.truncate(-1)
    with pytest.raises(NativeError, match="the suffix index is closed"):
        index.match()


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_failed_allocations_leave_the_index_unchanged(tmp_path: Path) -> None:
    """Every allocation of every call fails once."""
    program = tmp_path / "memory"
    sources = [
        ROOT / "tests/support/suffix_index_memory.cpp",
        ROOT / "native/src/lookup/suffix_index.cpp",
    ]
    options = ["-std=c++17", "-O1", f"-I{ROOT / 'native/src'}"]
    subprocess.run(["c++", *options, "-o", program, *sources], check=True, capture_output=True)
    done = subprocess.run([program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout) > 400
