"""The index over lookup files: against a naive search, damaged files, and bad input."""

from __future__ import annotations

import gc
import os
import struct
import weakref
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError
from mtp_gguf.gguf_tools.hub.sources import FileSource
from mtp_gguf.native import MTPLlama, lookup_files
from mtp_gguf.native.errors import NativeError
from mtp_gguf.native.lookup_files import Corpus, open_lookup_files
from mtp_gguf.native.suffix_index import Match

VOCABULARY, TOKENIZER = 9, 5
HEADER = 48
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=6)


def written(path: Path, texts: list[list[int]]) -> Corpus:
    Corpus.write(path, texts, n_vocab=VOCABULARY, tokenizer=TOKENIZER)
    return Corpus(path, n_vocab=VOCABULARY, tokenizer=TOKENIZER)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 4), max_size=12))
def test_matches_are_the_longest_and_real(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], query: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "naive.index"
    longest = 0
    followers: list[list[int]] = []
    for text in texts:
        for next_ in range(1, len(text)):
            n = 0
            while n < min(next_, len(query)) and text[next_ - 1 - n] == query[-1 - n]:
                n += 1
            if n and n >= longest:
                followers = [*(followers if n == longest else []), text[next_ : next_ + 5]]
                longest = n
    with written(path, texts) as corpus:
        assert corpus.match(query).length == longest
        proposed = corpus.propose(query, 5)
        assert proposed in followers if longest else proposed == []


@pytest.mark.parametrize("kind", ["one token", "two tokens", "period"])
def test_time_grows_nearly_linearly(tmp_path: Path, kind: str) -> None:
    pattern: dict[str, Callable[[int], int]] = {
        "one token": lambda i: 5,
        "two tokens": lambda i: i * 7 >> 3 & 1,
        "period": lambda i: i % 8,
    }

    def seconds(n: int) -> float:
        tokens = [pattern[kind](i) for i in range(n)]
        start = process_time()
        with written(tmp_path / "a.index", [tokens]) as corpus:
            assert corpus.match(tokens[-80:-40]).length == 32
        return process_time() - start

    small = min(seconds(10_000) for _ in range(3))
    large = min(seconds(80_000) for _ in range(3))
    assert large < 24 * small  # 8 times the tokens; quadratic would be 64 times


def test_damaged_and_foreign_indexes_are_refused(tmp_path: Path) -> None:
    """Any change is found, except in the padding of the header, and none of them crashes."""
    path = tmp_path / "good.index"
    written(path, [[1, 2, 3, 1, 2], [3, 4]]).close()
    good = path.read_bytes()

    def fault(raw: bytes, *, n_vocab: int = VOCABULARY, tokenizer: int = TOKENIZER) -> str:
        path.write_bytes(raw)
        with pytest.raises(NativeError) as found:
            Corpus(path, n_vocab=n_vocab, tokenizer=tokenizer)
        return str(found.value)

    assert "found another kind of file" in fault(b"GGUF" + good[4:])
    assert "found a shorter file" in fault(good[:47])
    assert "found a size that is not" in fault(good[:-4])
    assert "found a size that is not" in fault(good + b"\0\0\0\0")
    assert "found one of another tokenizer" in fault(good, tokenizer=6)
    assert "found one of another tokenizer" in fault(good, n_vocab=10)
    for at in range(len(good)):
        if at < HEADER - 4:  # the last four bytes are padding
            fault(good[:at] + bytes([good[at] ^ 0x81]) + good[at + 1 :])
        elif at >= HEADER:
            assert "content has changed" in fault(
                good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]
            )
    huge = bytearray(good)
    struct.pack_into("<qq", huge, 16, 2**62, 2**62)
    assert "found a size that is not" in fault(bytes(huge))
    assert "cannot be opened" in fault_of_missing(tmp_path / "none.index")


def fault_of_missing(path: Path) -> str:
    with pytest.raises(NativeError) as found:
        Corpus(path, n_vocab=VOCABULARY, tokenizer=TOKENIZER)
    return str(found.value)


def checksum(values: list[int]) -> int:
    total = 0
    for value in values:
        total = (total ^ value % 2**32) * 0x9E3779B97F4A7C15 % 2**64
        total ^= total >> 29
    return total


def test_forged_indexes_are_refused(tmp_path: Path) -> None:
    """The checksum is right, but tokens or positions would be read beyond the file."""
    path = tmp_path / "forged.index"
    for tokens, positions in (
        ([1, 99, -1], [1]),
        ([1, -2, -1], [1]),
        ([1, 2, 3], [1]),
        ([1, 2, -1], [3]),
        ([1, 2, -1], [-1]),
        ([1, 2, -1], [2**31 - 1]),
    ):
        total = checksum([*tokens, *positions])
        counts = (len(tokens), len(positions))
        header = struct.pack("<8sQqqQii", b"MTPTEXT1", TOKENIZER, *counts, total, VOCABULARY, 0)
        raw = struct.pack(f"<{sum(counts)}i", *tokens, *positions)
        path.write_bytes(header + raw)
        with pytest.raises(NativeError, match="tokens or positions that cannot be"):
            Corpus(path, n_vocab=VOCABULARY, tokenizer=TOKENIZER)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mtp-gguf" / "lookup"


def opened(*paths: Path) -> Corpus:
    return open_lookup_files(paths, TOKENIZER, 256, list)


def test_built_once_and_again_if_anything_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "a.py").write_text("one two three")
    (folder / "sub" / "b.py").write_text("four five six")
    (folder / ".git" / "c").write_text("seven eight nine")
    (folder / "image.png").write_bytes(b"\x89PNG\0\xff eight nine")
    (folder / "empty.txt").touch()
    with opened(folder) as corpus:
        assert bytes(corpus.propose(b"one t", 4)) == b"wo t"
        assert bytes(corpus.propose(b"five ", 9)) == b"six"  # to the end of its text
        assert corpus.match(b"eight ").length < 6
    built = list(cache.iterdir())
    monkeypatch.setattr(Corpus, "write", None)  # not called again
    opened(folder).close()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    (folder / "a.py").write_text("one two other")
    with opened(folder) as corpus:
        assert bytes(corpus.propose(b"one two ", 5)) == b"other"
    assert len(list(cache.iterdir())) == len(built) + 1

    damaged = max(cache.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    damaged.write_bytes(damaged.read_bytes()[:-4])
    with pytest.warns(UserWarning, match="it is built again"):
        opened(folder).close()
    opened(folder).close()


def test_the_cache_does_not_grow_for_ever(tmp_path: Path, cache: Path) -> None:
    for i in range(lookup_files._KEPT + 3):
        (tmp_path / "a.txt").write_text(f"text number {i}")
        opened(tmp_path / "a.txt").close()
    assert len(list(cache.iterdir())) == lookup_files._KEPT


def test_bad_files_are_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(path: Path) -> str:
        with pytest.raises(MtpGgufError) as found:
            opened(path)
        assert not cache.exists() or not list(cache.iterdir())
        return str(found.value)

    path = tmp_path / "a.txt"
    assert "a.txt: cannot be opened: No such file" in fault(path)
    path.touch()
    assert "expected text to draft from, found none" in fault(path)
    path.write_bytes(b"a\0b")
    assert "expected UTF-8 text to draft from, found zero bytes" in fault(path)
    path.write_bytes(b"\xff\xfe")
    assert "expected UTF-8 text to draft from, found invalid start byte" in fault(path)
    os.mkfifo(tmp_path / "pipe")
    assert "expected a file, found a device or pipe" in fault(tmp_path / "pipe")
    path.write_text("x" * 2000)
    monkeypatch.setattr(lookup_files, "LARGEST_FILE", 1000)
    assert "MiB of text, found" in fault(path)
    monkeypatch.setattr(lookup_files, "LARGEST_FILE", 4000)
    monkeypatch.setattr(lookup_files, "LARGEST_TEXT", 1000)
    assert "MiB of lookup files in all" in fault(path)
    monkeypatch.setattr(lookup_files, "LARGEST_TEXT", 4000)
    monkeypatch.setattr(lookup_files, "MOST_TOKENS", 1000)
    assert "expected at most 1000 tokens, found 2001" in fault(path)
    (tmp_path / "mtp-gguf").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "cannot be made" in fault(path)


def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.txt"
    path.write_text("some text")
    read = FileSource.read

    def read_and_append(source: Any, offset: int, length: int) -> bytes:
        raw = read(source, offset, length)
        with path.open("a") as file:
            file.write("more")
        return raw

    monkeypatch.setattr(FileSource, "read", read_and_append)
    with pytest.raises(MtpGgufError, match="the file changed while it was read"):
        opened(path)


def test_a_search_does_not_cross_the_end_of_a_text(tmp_path: Path) -> None:
    with written(tmp_path / "a.index", [[1, 2], [3, 4]]) as corpus:
        for search in (corpus.match, lambda tokens: corpus.propose(tokens, 5)):
            with pytest.raises(NativeError, match="tokens: expected 0 to 2147483647, found -1"):
                search([2, -1, 3])


def test_an_index_that_changes_while_it_is_mapped(tmp_path: Path) -> None:
    """Positions beyond the texts, written after the check, are not followed."""
    path = tmp_path / "a.index"
    with written(path, [[1, 2]]) as corpus, path.open("r+b") as file:
        assert corpus.match([1]) == Match(1, 1)
        for position in (-1, 3, 2**31 - 1):
            file.seek(HEADER)
            file.write(struct.pack("<4i", 1, 2, 1, position))  # the end of the text is gone, too
            file.flush()
            assert corpus.match([1]) == Match(0, 0)


def test_wrong_tokens_are_not_written(tmp_path: Path) -> None:
    for token in (-2, VOCABULARY):
        with pytest.raises(NativeError, match="tokens: expected -1 to 8"):
            written(tmp_path / "a.index", [[1, token]])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RequestError, match="cannot be written"):
        written(tmp_path / "none" / "a.index", [[1]])


def test_mtp_llama_drafts_from_files(dial: Any, tmp_path: Path, cache: Path) -> None:
    """The same text as without, drafted from the file that contains it."""
    path = dial("tiny")
    with closing(MTPLlama(str(path), n_ctx=256, n_threads=1, depth=0, profile=False)) as plain:
        prompt = [7]
        expected = list(islice(plain.generate(prompt, temp=0.0), 60))
    (tmp_path / "text.txt").write_text("any text")
    with closing(
        MTPLlama(
            str(path), n_ctx=256, n_threads=1, lookup_files=[tmp_path / "text.txt"], profile=False
        )
    ) as llm:
        session = llm.session
        with written_for(llm, tmp_path, expected) as corpus:
            session.set_corpus(corpus)
            session.set_costs([10.0 + i for i in range(13)], [10.0] * 4)
            assert list(islice(llm.generate(prompt, temp=0.0), 60)) == expected
            session.set_corpus(None)
        assert llm.mtp_stats.text_accepted > 0
        with pytest.raises(NativeError, match="corpus: expected one of"):
            session.set_corpus(written(tmp_path / "other.index", [[1, 2]]))
    with pytest.raises(NativeError, match="lookup_files: expected a list of paths"):
        MTPLlama(str(path), lookup_files=str(tmp_path))


def test_an_index_lives_as_long_as_its_session(dial: Any, tmp_path: Path) -> None:
    """Also if the session refuses the next one."""
    with closing(MTPLlama(str(dial("tiny")), n_ctx=256, lookup=True, profile=False)) as llm:
        corpus = written_for(llm, tmp_path, [1, 2])
        used = weakref.ref(corpus)
        llm.session.set_corpus(corpus)
        del corpus
        with pytest.raises(NativeError, match="corpus: expected one of"):
            llm.session.set_corpus(written(tmp_path / "other.index", [[1, 2]]))
        gc.collect()
        assert used() is not None
        llm.session.set_corpus(None)
        gc.collect()
        assert used() is None


def written_for(llm: MTPLlama, folder: Path, text: list[int]) -> Corpus:
    """An index of these tokens; the synthetic model's text does not survive its tokenizer."""
    known = {"n_vocab": llm.n_vocab(), "tokenizer": llm.session.tokenizer()}
    Corpus.write(folder / "own.index", [text], **known)
    return Corpus(folder / "own.index", **known)
