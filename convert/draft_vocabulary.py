"""Choosing a FastMTP draft vocabulary: which target ids, in which order.

The list is ranked, most useful first, so that a runtime can use a shorter prefix of it. The
tokens that no list may lack (turn ends, tools, thinking) stand in front: every prefix has them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.fastmtp import COVERAGE_KEY, IDS_KEY, SOURCE_KEY
from mtp_gguf.gguf_tools.format import Value, ValueType

DEFAULT_SIZE = 32768
COVERAGE_SIZES = (8192, 16384, 32768, 65536)
_CORPUS_CHUNK = 1 << 20  # characters tokenized at a time


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """A ranked list of target ids.

    source: how it was ranked, in a few words. coverage: the share of the corpus's tokens that is
    in the list, by list size up to the whole; empty when no corpus was counted.
    """

    ids: NDArray[np.int64]
    source: str
    coverage: dict[int, float]

    def metadata(self, with_ids: bool) -> dict[str, Value]:
        """The keys that describe the list, with the list itself in the `ids` layout."""
        keys = {}
        if with_ids:
            keys[IDS_KEY] = Value(ValueType.U32, self.ids.tolist())
        keys[SOURCE_KEY] = Value(ValueType.STRING, self.source)
        if self.coverage:
            keys[COVERAGE_KEY] = Value(ValueType.F32, self.coverage[len(self.ids)])
        return keys


def default_size(n_vocab: int) -> int:
    """The size when none is given: 32K as in FastMTP, a quarter of a small vocabulary."""
    return min(DEFAULT_SIZE, max(n_vocab // 4, 1))


def rank_by_corpus(
    files: Sequence[Path], tokenizer: Tokenizer, required: Sequence[int], n_vocab: int, size: int
) -> DraftVocabulary:
    """Rank by how often the tokens occur in text files; RequestError when none can be counted."""
    counts = np.zeros(n_vocab, np.int64)
    for path in files:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise RequestError(
                f"--fastmtp-corpus: {path}: cannot be read: {error.strerror}"
            ) from None
        chunks = [text[i : i + _CORPUS_CHUNK] for i in range(0, len(text), _CORPUS_CHUNK)]
        for encoding in tokenizer.encode_batch(chunks, add_special_tokens=False):
            counts += np.bincount(np.asarray(encoding.ids, np.int64), minlength=n_vocab)[:n_vocab]
    if not counts.sum():
        raise RequestError(f"--fastmtp-corpus: no text in {', '.join(map(str, files))}")
    ranked = np.argsort(-counts, kind="stable")  # equally frequent tokens by id
    ids = _with_required(ranked, required, n_vocab, size)
    covered = np.cumsum(counts[ids]) / counts.sum()
    sizes = {n for n in COVERAGE_SIZES if n < len(ids)} | {len(ids)}
    source = f"counted on {counts.sum()} tokens of {len(files)} files"
    return DraftVocabulary(ids, source, {n: float(covered[n - 1]) for n in sorted(sizes)})


def rank_by_id(required: Sequence[int], n_vocab: int, size: int) -> DraftVocabulary:
    """Rank by id: in a byte-level BPE the order in which tokens were merged into being."""
    return DraftVocabulary(
        _with_required(np.arange(n_vocab), required, n_vocab, size), "by id (merge rank)", {}
    )


def rank_by_list(
    path: Path, required: Sequence[int], n_vocab: int, size: int | None
) -> DraftVocabulary:
    """Take the ranking from a file of ids; RequestError names the first id that cannot be.

    size: how many to keep; None keeps all, and adds what is required.
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
    if size is None:
        size = len(given) + len(np.setdiff1d(required, given))
    return DraftVocabulary(_with_required(given, required, n_vocab, size), f"from {path.name}", {})


def _with_required(
    ranked: NDArray[np.int64], required: Sequence[int], n_vocab: int, size: int
) -> NDArray[np.int64]:
    if not len(required) <= size < n_vocab:
        raise RequestError(
            f"--fastmtp: expected a size from {max(len(required), 1)} (the special tokens) "
            f"to {n_vocab - 1} (below the vocabulary's), found {size}"
        )
    front = np.asarray(required, np.int64)
    rest = ranked[~np.isin(ranked, front)]
    return np.concatenate([front, rest])[:size]


def _read_ids(path: Path) -> NDArray[np.int64]:
    """Ids from JSON, .npy or text with one id per line or blank."""
    expected = f"--fastmtp-ids: {path}: expected whole numbers as JSON list, .npy or text"
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
        else:
            text = path.read_text(encoding="utf-8")
            numbers = json.loads(text) if text.lstrip().startswith("[") else text.split()
            array = np.array([_whole(n) for n in numbers], np.int64)
    except OSError as error:
        raise RequestError(f"--fastmtp-ids: {path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(f"{expected}: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(f"{expected}, found {array.ndim} dimensions of {array.dtype}")
    return np.asarray(array, np.int64)


def _whole(value: object) -> int:
    if isinstance(value, str):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"found {value!r}")
