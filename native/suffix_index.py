"""Drafts from the text itself (prompt lookup): the longest repeated suffix of a token sequence."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from ._bindings import check, library
from ._owner import Owner


class Match(NamedTuple):
    """The longest suffix, of up to 64 tokens, that also ends before the last token.

    length: 0 if there is none. next: the position of the token that follows the earlier occurrence.
    agreeing: how many occurrences in a row up to that one were followed by the same token, at
    most 4; 0 if there was only one.
    """

    length: int
    next: int
    agreeing: int = 0


class SuffixIndex(Owner):
    """An index of a token sequence that finds its longest suffix that also occurs earlier.

    Matches are up to 64 tokens long. Appending and truncating take constant time per token, and the
    index about 65 bytes per token. A session has its own indexes; this class is for tests and other
    runtimes.
    """

    _what = "suffix index"

    def __init__(self) -> None:
        handle = self._own(library().mtp_suffix_index_free)
        check(library().mtp_suffix_index_new(ctypes.byref(handle)))

    def append(self, tokens: Sequence[int]) -> None:
        """Append token ids, each 0 or more; NativeError leaves the index unchanged."""
        values = (ctypes.c_int32 * len(tokens))(*tokens)
        self._call(library().mtp_suffix_index_append, values, len(tokens))

    def truncate(self, size: int) -> None:
        """Remove all but the first `size` tokens."""
        self._call(library().mtp_suffix_index_truncate, size)

    def match(self) -> Match:
        """Return the longest repeated suffix."""
        length, after, agreeing = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int32()
        out = (ctypes.byref(length), ctypes.byref(after), ctypes.byref(agreeing))
        self._call(library().mtp_suffix_index_match, *out)
        return Match(length.value, after.value, agreeing.value)

    def propose(self, n: int) -> list[int]:
        """Return the n tokens that follow the match; empty without a match."""
        out, count = (ctypes.c_int32 * max(n, 0))(), ctypes.c_int32()
        self._call(library().mtp_suffix_index_propose, out, n, ctypes.byref(count))
        return out[: count.value]

    @property
    def nbytes(self) -> int:
        """The index's memory in bytes."""
        size = ctypes.c_size_t()
        self._call(library().mtp_suffix_index_bytes, ctypes.byref(size))
        return size.value
