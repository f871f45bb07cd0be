"""Chooses a FastMTP draft vocabulary: which target ids, in which order.

The list is ranked, most useful first, so that a runtime can use a prefix of it. Required tokens
(end of turn, tools, thinking) come first, so every prefix contains them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError, raising
from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.heads.fastmtp import COVERAGE_KEY, IDS_KEY, SOURCE_KEY, default_size

from ..options import DraftOptions

# Below this many counted tokens for each of the list, most of the list was hardly counted, or not.
_COUNTED_PER_ID = 4
COVERAGE_SIZES = (8192, 16384, 32768, 65536)
_LARGEST_I64 = (1 << 63) - 1
_CORPUS_CHUNK = 1 << 20  # approximate number of characters
_CHUNKS_AT_ONCE = 8  # chunks that are tokenized in parallel


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """A ranked list of target ids.

    source: how it was ranked, in a few words. coverage: maps sizes (this one and the common ones)
    to the share of the corpus's tokens that a list of that size contains; empty without a corpus.
    counted: the number of tokens that it was ranked by; None if it was not ranked by a count.
    """

    ids: NDArray[np.int64]
    source: str
    coverage: dict[int, float]
    counted: int | None = None

    @property
    def warning(self) -> str | None:
        """A sentence if so few tokens were counted that others would give another list."""
        enough = _COUNTED_PER_ID * len(self.ids)
        if self.counted is None or self.counted >= enough:
            return None
        return (
            f"{self.counted} tokens are too few to rank a draft vocabulary of {len(self.ids)}: it "
            "lacks words of other texts, and its coverage is only that of these tokens; count "
            f"{enough} or more"
        )

    def metadata(self, with_ids: bool) -> dict[str, Value]:
        """The keys that describe the list, including the list itself for the `ids` layout."""
        keys = {}
        if with_ids:
            keys[IDS_KEY] = Value(ValueType.U32, self.ids.tolist())
        keys[SOURCE_KEY] = Value(ValueType.STRING, self.source)
        if self.coverage:
            keys[COVERAGE_KEY] = Value(ValueType.F32, self.coverage[len(self.ids)])
        return keys


class Encoder(Protocol):
    """A tokenizer for counting: that of a checkpoint, or llama.cpp's for a GGUF."""

    def encode_batch(self, input: list[str], *, add_special_tokens: bool) -> Sequence[Any]:  # noqa: A002
        """The tokens of each text, as objects with `ids`."""


def rank(
    asked: DraftOptions,
    required: Sequence[int],
    n_vocab: int,
    open_tokenizer: Callable[[], AbstractContextManager[Encoder]],
) -> DraftVocabulary:
    """The requested draft vocabulary; RequestError if it does not fit the vocabulary.

    open_tokenizer: called if a corpus is counted.
    """
    size = asked.size or default_size(n_vocab, len(required))
    if asked.ids_file:
        return rank_by_list(asked.ids_file, required, n_vocab, asked.size)
    if asked.corpus:
        with open_tokenizer() as tokenizer:
            return rank_by_corpus(asked.corpus, tokenizer, required, n_vocab, size)
    return rank_by_id(required, n_vocab, size)


def rank_by_corpus(
    files: Sequence[Path], tokenizer: Encoder, required: Sequence[int], n_vocab: int, size: int
) -> DraftVocabulary:
    """Rank by token frequency in text files; RequestError if they contain no text."""
    _check_size(size, required, n_vocab)
    counts = np.zeros(n_vocab, np.int64)
    for path in files:
        chunks = _chunks(path)
        while batch := list(islice(chunks, _CHUNKS_AT_ONCE)):
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                counts += np.bincount(np.asarray(encoding.ids, np.int64), minlength=n_vocab)[
                    :n_vocab
                ]
    total = counts.sum()
    if not total:
        raise RequestError(f"--fastmtp-corpus: no text in {', '.join(map(str, files))}")
    source = f"counted on {total} tokens of {len(files)} file{'s' if len(files) > 1 else ''}"
    return rank_by_counts(counts, source, required, size)


def rank_by_counts(
    counts: NDArray[np.int64],
    source: str,
    required: Sequence[int],
    size: int,
    ties: NDArray[np.int64] | None = None,
) -> DraftVocabulary:
    """Rank by token frequency, then by id.

    counts: occurrences of each token, not all zero. source: how they were counted, in a few words.
    ties: other counts, which decide among tokens of one frequency.
    """
    _check_size(size, required, len(counts))
    order = counts if ties is None else counts * (int(ties.sum()) + 1) + ties
    ranked = _required_first(np.argsort(-order, kind="stable"), required)
    covered = np.cumsum(counts[ranked]) / counts.sum()
    sizes = {n for n in COVERAGE_SIZES if n < len(counts)} | {size}
    shares = {n: float(covered[n - 1]) for n in sorted(sizes)}
    return DraftVocabulary(ranked[:size], source, shares, int(counts.sum()))


def _chunks(path: Path) -> Iterator[str]:
    """The text of a file in chunks of whole lines."""
    option = f"--fastmtp-corpus: {path}"
    with (
        raising(RequestError, f"{option}: cannot be read"),
        path.open(encoding="utf-8", errors="replace") as file,
    ):
        while lines := file.readlines(_CORPUS_CHUNK):
            chunk = "".join(lines)
            if "\0" in chunk:
                raise RequestError(f"{option}: expected text in UTF-8, found binary data")
            yield chunk


def rank_by_id(required: Sequence[int], n_vocab: int, size: int) -> DraftVocabulary:
    """Rank by id, which in a byte-level BPE is the order of the merges."""
    _check_size(size, required, n_vocab)
    ids = _required_first(np.arange(n_vocab), required)[:size]
    return DraftVocabulary(ids, "by id (merge rank)", {})


def rank_by_list(
    path: Path, required: Sequence[int], n_vocab: int, size: int | None
) -> DraftVocabulary:
    """Take the ranking from a file of ids; RequestError names the first invalid id.

    size: number of ids to keep; None keeps all. Required ids that are missing are added.
    """
    given = _read_ids(path)
    if not len(given):
        raise RequestError(f"--fastmtp-ids: {path}: expected token ids, found none")
    outside = given[(given < 0) | (given >= n_vocab)]
    if len(outside):
        raise RequestError(
            f"--fastmtp-ids: {path}: expected ids from 0 to {n_vocab - 1}, found {outside[0]}"
        )
    values, counts = np.unique(given, return_counts=True)
    if len(values) < len(given):
        raise RequestError(
            f"--fastmtp-ids: {path}: expected each id once, found {values[counts > 1][0]} "
            f"{counts.max()} times"
        )
    ranked = _required_first(given, required)
    if size is None:
        size = len(ranked)
    _check_size(size, required, n_vocab)
    if size > len(ranked):
        raise RequestError(
            f"--fastmtp-ids: {path}: expected {size} ids as --fastmtp asks, found {len(ranked)} "
            "with the special tokens"
        )
    return DraftVocabulary(ranked[:size], f"from {path.name}", {})


def _check_size(size: int, required: Sequence[int], n_vocab: int) -> None:
    if not max(len(required), 1) <= size < n_vocab:
        raise RequestError(
            f"--fastmtp: expected a size from {max(len(required), 1)} (the special tokens) "
            f"to {n_vocab - 1} (below the vocabulary's), found {size}"
        )


def _required_first(ranked: NDArray[np.int64], required: Sequence[int]) -> NDArray[np.int64]:
    front = np.asarray(required, np.int64)
    return np.concatenate([front, ranked[~np.isin(ranked, front)]])


def _read_ids(path: Path) -> NDArray[np.int64]:
    """Ids from JSON, .npy, or text with ids separated by whitespace."""
    expected = f"--fastmtp-ids: {path}: expected whole numbers as JSON list, .npy or text"
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
        else:
            text = path.read_text(encoding="utf-8")
            numbers = parse_json(text) if text.lstrip().startswith("[") else text.split()
            array = np.array([_whole(n) for n in numbers], np.int64)
    except OSError as error:
        raise RequestError(f"--fastmtp-ids: {path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise RequestError(f"{expected}: {' '.join(str(error).split())}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(f"{expected}, found {array.ndim} dimensions of {array.dtype}")
    return np.asarray(array.clip(None, _LARGEST_I64), np.int64)


def _whole(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        with suppress(ValueError):
            return int(value)
    raise ValueError(f"found {value!r:.60}")
