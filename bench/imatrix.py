"""Collects an importance matrix of a model's trunk and head in one pass over a text.

The text is cut into windows of equal length, as llama-imatrix cuts it, and each begins with an
empty context. The trunk reads a window in one batch. Its hidden states are then fed to the head,
which drafts as in decoding every few tokens, for several windows in one graph.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import FormatError, RequestError
from mtp_gguf.gguf_tools.files.format import Value, ValueType, open_gguf
from mtp_gguf.gguf_tools.imatrix import (
    Activations,
    Calibration,
    merge,
    read_calibration,
    write_imatrix,
)
from mtp_gguf.gguf_tools.profile import identify
from mtp_gguf.native.head import Head, SequenceTask
from mtp_gguf.native.imatrix import ImatrixCollector

from .model import BenchModel

Tokens = NDArray[np.int32]
Hidden = NDArray[np.float32]

# Windows whose drafts share a graph, so that the head's weights are read once for all of them.
_TOGETHER = 4
# The head drafts after every so many tokens. docs/precision.md has the time that this takes.
_STRIDE = 32
_DEPTH = 3
_KEY = "mtp_gguf.imatrix.resume"


@dataclass(frozen=True)
class ImatrixSettings:
    """What to collect: windows of `length` tokens; output.weight, too; the head, too."""

    length: int = 512
    with_output: bool = False
    with_head: bool = True


def windows_of(
    tokens: Sequence[int],
    length: int,
    most: int | None,
    bos: int | None,
    option: str | None = None,
) -> Tokens:
    """Cut a text into windows, [windows, length]; what is left at its end is dropped.

    most: use at most so many. bos: the token that the model's texts begin with, if any: it comes
    before the text and replaces the first token of each window. option: the one that names the
    text, where --ctx does not choose `length`. RequestError without a window.
    """
    tokens = [*([] if bos is None else [bos]), *tokens]
    count = len(tokens) // length
    if not count:
        where, chosen = (option, "") if option else ("text", " (--ctx)")
        raise RequestError(
            f"{where}: expected at least {length} tokens{chosen}, found {len(tokens)}; "
            "give more text"
        )
    count = min(count, most or count)
    windows = np.array(tokens[: count * length], np.int32).reshape(count, length)
    if bos is not None:
        windows[:, 0] = bos
    return windows


def collect_imatrix(
    model: BenchModel,
    windows: Tokens,
    dataset: str,
    settings: ImatrixSettings,
    state: Path,
    progress: Callable[[int], None] = lambda _: None,
    save_every: float = 10.0,
) -> Calibration:
    """Read `windows` and return what was seen; `dataset` is the name of the text.

    state: a file to go on from if it is of the same model, text and settings. It is written every
    `save_every` seconds; the caller removes it. progress: called with the number of windows read.
    NativeError if an activation is not finite.
    """
    key = _digest(model.path, windows, settings)
    done = _resumed(state, key)
    size = windows.shape[1]
    start = read = done.chunks if done else 0
    saved = time.monotonic()

    def so_far() -> Calibration:
        new = Calibration(_activations(collector), (dataset,), read - start, size)
        return merge([*([("", done)] if done else []), ("", new)])

    with ExitStack() as stack:
        collector = stack.enter_context(ImatrixCollector(with_output=settings.with_output))
        head = None
        if settings.with_head:
            head = stack.enter_context(model.head(n_ctx=size + _DEPTH, n_seq_max=_TOGETHER))
            collector.listen_to_head(head)
        reader = stack.enter_context(model.reader(size, collector))
        for first in range(start, len(windows), _TOGETHER):
            group = windows[first : first + _TOGETHER]
            if head is None:
                for window in group:
                    reader.read(window, all_logits=True)
            else:
                _draft(
                    head, group, [reader.hidden(w, all_logits=settings.with_output) for w in group]
                )
            read = first + len(group)
            progress(read)
            if time.monotonic() - saved > save_every:
                write_imatrix(state, so_far(), {_KEY: Value(ValueType.STRING, key)})
                saved = time.monotonic()
        return so_far()


def _draft(head: Head, windows: Tokens, hidden: Sequence[Hidden]) -> None:
    """Feed the head with the windows' tokens, and draft every so often, as in decoding."""
    depth = min(_DEPTH, head.max_depth)
    length = windows.shape[1]
    for first in range(1, length, _STRIDE):
        last = min(first + _STRIDE, length)
        head.draft_batch(
            [
                SequenceTask(
                    window[first:last].tolist(), states[first - 1 : last - 1], first, depth, i
                )
                for i, (window, states) in enumerate(zip(windows, hidden, strict=True))
            ]
        )
    for i in range(len(windows)):
        head.rollback(0, i)


def _activations(collector: ImatrixCollector) -> dict[str, Activations]:
    return {
        name: Activations(sums, counts.astype(np.float32).reshape(-1, 1))
        for name, (sums, counts) in collector.entries().items()
    }


def _digest(model: Path, windows: Tokens, settings: ImatrixSettings) -> str:
    """What a state depends on."""
    identity = identify(model)
    words = (identity.fingerprint, identity.size, windows.shape, settings)
    return hashlib.sha256(repr(words).encode() + windows.tobytes()).hexdigest()


def _resumed(state: Path, key: str) -> Calibration | None:
    """The state, if there is one of the same work."""
    try:
        with open_gguf(state) as file:
            same = file.scalar(_KEY) == key
        return read_calibration(state) if same else None
    except (FormatError, OSError):
        return None
