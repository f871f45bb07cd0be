"""The logits of a reference, in the format of llama-perplexity's `--save-all-logits`.

A file: `_logits_` | u32 tokens of a window | i32 size of the vocabulary | i32 windows | i32 tokens
of all windows | for each window and each token of its second half but the last a row: F32 scale |
F32 smallest log-probability | u16 for each token of the vocabulary, padded to an even number. A
log-probability is scale times the u16 plus the smallest one, which is at most 16 below the largest.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.files.output import check_space, is_full, write_fault

MAGIC = b"_logits_"
_HEADER = struct.Struct("<8sIii")
_RANGE = np.float32(16)
_STEPS = np.float32(65535)
_PARTIAL = ".partial"

Logits = NDArray[np.float32]
Packed = NDArray[np.uint16]


def first_row(length: int) -> int:
    """The first token of a window whose logits are compared: those before lack context."""
    return length // 2


def pack(logits: Logits) -> Packed:
    """Rows of the file for rows of logits [n, vocabulary]."""
    highest = logits.max(axis=1, keepdims=True)
    lowest = np.maximum(logits.min(axis=1, keepdims=True), highest - _RANGE)
    log_sum = np.log(np.exp(logits - highest).sum(axis=1, keepdims=True, dtype=np.float64))
    scale = (highest - lowest) / _STEPS
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    columns = logits.shape[1] + logits.shape[1] % 2
    out = np.zeros((len(logits), columns + 4), np.uint16)
    floats = np.concatenate([scale, lowest - highest - log_sum.astype(np.float32)], axis=1)
    out[:, :4] = floats.astype("<f4").view("<u2")
    out[:, 4 : 4 + logits.shape[1]] = np.rint(np.maximum(logits - lowest, 0) * inverse)
    return out


def unpack(rows: Packed, n_vocab: int) -> Logits:
    """Log-probabilities [n, n_vocab] of rows of the file."""
    floats = np.ascontiguousarray(rows[:, :4]).view("<f4")
    values: Logits = rows[:, 4 : 4 + n_vocab] * floats[:, :1] + floats[:, 1:]
    return values


class LogitFile:
    """A file of logits of these windows, [windows, length]: complete, or begun."""

    def __init__(self, path: Path, windows: NDArray[np.int32], n_vocab: int) -> None:
        self.path = path
        self.partial = path.with_name(path.name + _PARTIAL)
        self.n_vocab = n_vocab
        self.windows = windows
        count, length = windows.shape
        self._begin = _HEADER.pack(MAGIC, length, n_vocab, count) + windows.astype("<i4").tobytes()
        self._rows = length - 1 - first_row(length)
        self._columns = n_vocab + n_vocab % 2 + 4
        self._window_bytes = 2 * self._rows * self._columns
        self.nbytes = len(self._begin) + count * self._window_bytes

    def complete(self) -> bool:
        """Whether the file has the logits of all windows; FormatError if it is of another text."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            begin = file.read(len(self._begin))
        if begin != self._begin or self.path.stat().st_size != self.nbytes:
            raise FormatError(
                f"{self.path}: expected the logits of {len(self.windows)} windows of "
                f"{self.windows.shape[1]} tokens of this text and a vocabulary of {self.n_vocab}, "
                "found others; name another file"
            )
        return True

    def begun(self) -> bool:
        """Whether there is a file to read or to go on with."""
        return self.path.exists() or self.partial.exists()

    def check_space(self) -> None:
        """OutputError if the disk has no space for what `write` would add."""
        written = self.partial.stat().st_size if self.partial.exists() else 0
        check_space(self.path, self.nbytes - written)

    def write(self, read: Callable[[int], Logits], progress: Callable[[int], None]) -> None:
        """Write the logits of all windows; go on from a file that an interrupted call began.

        If the disk is full, what was written is removed.

        read: returns the logits [rows, vocabulary] of a window.
        """
        try:
            with self.partial.open("ab+") as file:
                file.seek(0)
                same = file.read(len(self._begin)) == self._begin
                size = file.seek(0, os.SEEK_END) if same else 0
                done = max(size - len(self._begin), 0) // self._window_bytes if same else 0
                file.truncate(len(self._begin) + done * self._window_bytes if same else 0)
                if not same:
                    file.write(self._begin)
                for window in range(done, len(self.windows)):
                    file.write(pack(read(window)).tobytes())
                    file.flush()
                    progress(window + 1)
            self.partial.replace(self.path)
        except OSError as error:
            if is_full(error):
                self.partial.unlink(missing_ok=True)
            raise write_fault(self.path, self.nbytes, error) from None

    def window(self, index: int) -> Packed:
        """The rows of a window."""
        offset = len(self._begin) + index * self._window_bytes
        return np.fromfile(self.path, "<u2", self._rows * self._columns, offset=offset).reshape(
            self._rows, self._columns
        )
