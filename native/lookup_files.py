"""Drafts from files of the user: the index over them, built once and kept in the user's cache."""

import ctypes
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from mtp_gguf.gguf_tools.errors import RequestError, raising
from mtp_gguf.gguf_tools.hub.sources import FileSource
from mtp_gguf.gguf_tools.machine.system import cache_root

from ._bindings import check, library
from ._owner import Owner
from .errors import NativeError
from .suffix_index import Match

LARGEST_FILE = 16 << 20  # bytes; a larger one in a folder is skipped
LARGEST_TEXT = 64 << 20  # bytes of all files
MOST_TOKENS = 16_777_216  # mtp.h: MTP_MAX_INDEXED
END = -1  # follows each text

_KEPT = 16  # indexes in the cache

Tokenize = Callable[[bytes], Sequence[int]]


class Corpus(Owner):
    """An index of texts, mapped from a file. Close it after the sessions that use it.

    tokenizer: the fingerprint of the vocabulary, as from `Session.tokenizer`. Raises
    ModelRefusedError if the file is damaged or was written for another vocabulary.
    """

    _what = "index of lookup files"

    def __init__(self, path: Path, *, n_vocab: int, tokenizer: int) -> None:
        self.path = path
        handle = self._own(library().mtp_corpus_free)
        name = os.fsencode(path)
        check(library().mtp_corpus_open(name, n_vocab, tokenizer, ctypes.byref(handle)))

    @staticmethod
    def write(path: Path, texts: Iterable[Sequence[int]], *, n_vocab: int, tokenizer: int) -> None:
        """Write an index of texts, given as token ids. The file appears complete or not at all."""
        parts = [np.asarray([*text, END], np.int32) for text in texts]
        tokens = np.concatenate(parts) if parts else np.asarray([END], np.int32)
        if len(tokens) > MOST_TOKENS:
            raise RequestError(
                f"lookup files: expected at most {MOST_TOKENS} tokens, found {len(tokens)}; "
                "name fewer files"
            )
        with raising(RequestError, f"{path.parent}: cannot be written"):
            file, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        os.close(file)
        part = Path(name)
        try:
            pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            raw = os.fsencode(part)
            check(library().mtp_corpus_write(raw, pointer, len(tokens), n_vocab, tokenizer))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def match(self, tokens: Sequence[int]) -> Match:
        """Return the longest suffix of `tokens` that occurs in a text and does not end it."""
        values = (ctypes.c_int32 * len(tokens))(*tokens)
        length, after = ctypes.c_int64(), ctypes.c_int64()
        out = (ctypes.byref(length), ctypes.byref(after))
        self._call(library().mtp_corpus_match, values, len(tokens), *out)
        return Match(length.value, after.value)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return up to n tokens that follow the match, to the end of its text."""
        values = (ctypes.c_int32 * len(tokens))(*tokens)
        out, count = (ctypes.c_int32 * max(n, 0))(), ctypes.c_int32()
        arguments = (values, len(tokens), out, n, ctypes.byref(count))
        self._call(library().mtp_corpus_propose, *arguments)
        return out[: count.value]


def open_lookup_files(
    paths: Sequence[str | Path], tokenizer: int, n_vocab: int, tokenize: Tokenize
) -> Corpus:
    """Return the index over files and folders; built only if their content is new.

    tokenizer, n_vocab: of the model, as for Corpus. A folder stands for the text files in it,
    without hidden ones. RequestError or FormatError if a file is missing, changes while it is read,
    is no text or too large.
    """
    texts = list(_read(map(Path, paths)))
    if not texts:
        raise RequestError(f"{paths[0]}: expected text to draft from, found none")
    digest = hashlib.sha256(f"{tokenizer} {n_vocab}".encode())
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    folder = cache_root() / "lookup"
    with raising(RequestError, f"{folder}: cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest.hexdigest()[:32]}.index"
    if path.exists():
        try:
            corpus = Corpus(path, n_vocab=n_vocab, tokenizer=tokenizer)
        except NativeError as error:
            warnings.warn(f"{error}; it is built again", stacklevel=2)
        else:
            with suppress(OSError):
                path.touch()  # the most recently used ones are kept
            return corpus
    tokens = (tokenize(text) for text in texts)
    Corpus.write(path, tokens, n_vocab=n_vocab, tokenizer=tokenizer)
    _prune(folder)
    return Corpus(path, n_vocab=n_vocab, tokenizer=tokenizer)


def _read(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yield the texts of files and folders, each named file or a sentence why not."""
    total = 0
    for path in paths:
        for file in sorted(_files_in(path)) if path.is_dir() else [path]:
            text = _text(file, named=file == path)
            total += len(text)
            if total > LARGEST_TEXT:
                raise RequestError(
                    f"{path}: expected at most {LARGEST_TEXT >> 20} MiB of lookup files in all; "
                    "name fewer"
                )
            if text.strip():
                yield text


def _files_in(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(root, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _text(path: Path, *, named: bool) -> bytes:
    """Return a file's UTF-8 text; b"" for another file of a folder, an error for a named one."""
    with closing(FileSource(path)) as source:
        if source.size > LARGEST_FILE:
            if not named:
                return b""
            raise RequestError(
                f"{path}: expected at most {LARGEST_FILE >> 20} MiB of text, found "
                f"{source.size >> 20} MiB; split it, or name another"
            )
        text = source.read(0, source.size) if source.size else b""
        source.check_unchanged()
    try:
        text.decode("utf-8")
        fault = "zero bytes" if b"\0" in text else ""
    except UnicodeDecodeError as error:
        fault = error.reason
    if fault and named:
        raise RequestError(f"{path}: expected UTF-8 text to draft from, found {fault}")
    return b"" if fault else text


def _prune(folder: Path) -> None:
    """Delete the indexes that were not used for longest."""
    with suppress(OSError):
        found = sorted(folder.glob("*.index"), key=lambda p: p.stat().st_mtime, reverse=True)
        for path in found[_KEPT:]:
            path.unlink(missing_ok=True)
