"""An MTP head by itself, which drafts tokens from given hidden states."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mtp_gguf.gguf_tools.errors import MtpGgufError
from mtp_gguf.gguf_tools.model import open_model

from ._bindings import DraftTask, HeadInfo, KeptRows, check, library
from ._owner import Owner
from .errors import HeadMissingError, ModelRefusedError, NativeError

LAYOUTS = ("none", "ids", "table", "sidecar", "made")


@dataclass(frozen=True)
class Draft:
    """A draft: target ids and their probabilities within the draft vocabulary.

    logits: [depth, n_draft_vocab] in rank order, or None if they were not requested.
    """

    tokens: list[int]
    probabilities: list[float]
    logits: NDArray[np.float32] | None


def check_head(
    path: str | Path,
    *,
    trunk: str | Path | None,
    device: str,
    fastmtp_size: int,
    mtp_type: str | None = None,
) -> None:
    """Raise what `Head` with these arguments would, before a large trunk is loaded for it.

    Covers the file, the draft vocabulary, and whether the device can read rows of the embedding.
    """
    params = _params(trunk, device, fastmtp_size, mtp_type)
    check(library().mtp_head_check(os.fsencode(path), ctypes.byref(params)))


def _params(trunk: str | Path | None, device: str, fastmtp_size: int, mtp_type: str | None) -> Any:
    params = library().mtp_head_default_params()
    params.trunk_path = None if trunk is None else os.fsencode(trunk)
    params.device, params.fastmtp_size = device.encode(), fastmtp_size
    params.type = None if mtp_type is None else mtp_type.encode()
    return params


@dataclass(frozen=True)
class SequenceTask:
    """What `draft_batch` does for one sequence: the arguments of `draft`.

    hidden: None for the hidden states that `keep_hidden` has kept for these tokens.
    """

    tokens: Sequence[int]
    hidden: ArrayLike | None
    first: int
    depth: int
    seq: int


class Head(Owner):
    """The MTP block and draft vocabulary of a GGUF on a ggml device. Close it, or use `with`.

    path: the file with the MTP block. trunk: the file with the embedding, if `path` has none.
    device: ggml's device name ("CPU", "CUDA0", "Metal"). n_ctx: positions of each of n_seq_max
    sequences. n_batch: maximum rows fed in one graph. fastmtp_size: how much of a ranked draft
    vocabulary to use; 0 for all, -1 for none (layout ids only). A file without one gets a list of
    this size when it is loaded: special tokens, then by id; 0 for the default. n_ring: how many of
    the last ids sessions replace by tokens of the text; 0 for the default, -1 for none. model: a
    llama_model pointer of the trunk, which must outlive the head; without a draft vocabulary its
    embedding and output are used where they are, if that is the head's GPU. mtp_type: quantize
    matrices of the block that have more bits to this type of ggml while loading ("Q4_K"); the file
    stays as it is. None for as stored.

    Raises HeadMissingError for a model without a head, ModelRefusedError for an invalid file.
    """

    _what = "head"
    _runs_threads = True

    def __init__(
        self,
        path: str | Path,
        *,
        trunk: str | Path | None = None,
        device: str = "CPU",
        n_threads: int = 2,
        n_ctx: int = 512,
        n_seq_max: int = 1,
        n_batch: int = 512,
        fastmtp_size: int = 0,
        n_ring: int = 0,
        model: Any = None,
        mtp_type: str | None = None,
    ) -> None:
        lib = library()
        params = _params(trunk, device, fastmtp_size, mtp_type)
        params.n_threads, params.n_ctx = n_threads, n_ctx
        params.n_seq_max, params.n_batch, params.n_ring = n_seq_max, n_batch, n_ring
        if model is not None:
            params.embedding, params.output = (_matrix(model, output=o) for o in (False, True))
        handle = self._own(lib.mtp_head_free)
        try:
            check(lib.mtp_head_load(os.fsencode(path), ctypes.byref(params), ctypes.byref(handle)))
        except ModelRefusedError as error:
            raise _of_another_architecture(Path(path)) or error from None
        info = HeadInfo()
        check(lib.mtp_head_get_info(handle, ctypes.byref(info)))
        self.n_embd: int = info.n_embd
        self.n_vocab: int = info.n_vocab
        self.n_draft_vocab: int = info.n_draft_vocab
        self.n_ring: int = info.n_ring
        self.block: int = info.block
        self.n_ctx: int = info.n_ctx
        self.n_seq_max: int = info.n_seq_max
        self.max_depth: int = info.max_depth
        self.layout: str = LAYOUTS[info.layout]
        self.moe: bool = info.moe
        self.tied: bool = info.tied
        self.draws: bool = info.draws
        self.weight_bytes: int = info.weight_bytes
        self.mapped_bytes: int = info.mapped_bytes
        self.cache_bytes: int = info.cache_bytes

    @property
    def vocabulary_text(self) -> str:
        """What it drafts over, in a few words for people."""
        if self.layout == "none":
            return f"drafts over all {self.n_vocab:,} tokens"
        text = f"drafts over {self.n_draft_vocab:,} of {self.n_vocab:,} tokens"
        if self.layout == "made":
            text += ", as the file has no list: the special ones and then by id"
        return text + (f"; the last {self.n_ring:,} follow the text" if self.n_ring else "")

    def draft_ids(self) -> NDArray[np.int32]:
        """Return the target ids of the draft vocabulary in rank order, [n_draft_vocab]."""
        out = np.empty(self.n_draft_vocab, np.int32)
        self._call(library().mtp_head_get_draft_ids, _ints(out), out.size)
        return out

    def next_position(self, seq: int = 0) -> int:
        """Return the first position after the rows of a sequence."""
        out = ctypes.c_int32()
        self._call(library().mtp_head_next_position, seq, ctypes.byref(out))
        return out.value

    def feed(self, tokens: Sequence[int], hidden: ArrayLike, first: int, seq: int = 0) -> None:
        """Feed rows into the cache: the token at position first + i with hidden[i].

        hidden: [len(tokens), n_embd], the trunk's hidden state at the position before each token.
        """
        ids, states = self._rows(tokens, hidden)
        rows = (_ints(ids), _floats(states), len(ids))
        self._call(library().mtp_head_feed, seq, first, *rows)

    def draft(
        self,
        tokens: Sequence[int],
        hidden: ArrayLike,
        first: int,
        depth: int,
        seq: int = 0,
        *,
        logits: bool = False,
    ) -> Draft:
        """Feed rows, then draft the next `depth` tokens, which do not stay in the cache."""
        ids, states = self._rows(tokens, hidden)
        drafted = np.empty(max(depth, 0), np.int32)
        probabilities = np.empty(max(depth, 0), np.float32)
        all_logits = np.empty((max(depth, 0), self.n_draft_vocab), np.float32) if logits else None
        self._call(
            library().mtp_head_draft,
            seq,
            first,
            _ints(ids),
            _floats(states),
            len(ids),
            depth,
            _ints(drafted),
            _floats(probabilities),
            None if all_logits is None else _floats(all_logits),
        )
        return Draft(drafted.tolist(), probabilities.tolist(), all_logits)

    def keep_hidden(self, tensor: int, backend: int, parts: Sequence[Sequence[int]]) -> list[bool]:
        """Keep hidden states on the device where llama.cpp computes them.

        tensor, backend: addresses from llama_get_embeddings_nextn_tensor. These hidden states can
        be used after llama_synchronize.
        parts: for each sequence its number, how many it has already, the first row of `tensor` and
        how many rows to keep. Returns for each whether they are kept: on the head's device, if it
        is a GPU, at most MAX_DEPTH + 1.
        """
        structs = (KeptRows * len(parts))(*[KeptRows(*part) for part in parts])
        self._call(library().mtp_head_keep_hidden, tensor, backend, structs, len(parts))
        return [part.kept for part in structs]

    def draft_batch(self, tasks: Sequence[SequenceTask]) -> list[Draft]:
        """Do what `draft` does for several sequences in one graph, without the logits."""
        structs = (DraftTask * len(tasks))()
        arrays = []
        for struct, task in zip(structs, tasks, strict=True):
            if task.hidden is None:
                ids, states = np.ascontiguousarray(task.tokens, np.int32), None
            else:
                ids, states = self._rows(task.tokens, task.hidden)
            drafted = np.empty(max(task.depth, 0), np.int32)
            probabilities = np.empty(max(task.depth, 0), np.float32)
            struct.seq, struct.first, struct.depth = task.seq, task.first, task.depth
            struct.tokens, struct.hidden = _ints(ids), None if states is None else _floats(states)
            struct.n_rows = len(ids)
            struct.out_tokens, struct.out_probs = _ints(drafted), _floats(probabilities)
            arrays.append((drafted, probabilities, ids, states))
        self._call(library().mtp_head_draft_batch, structs, len(tasks))
        return [Draft(ids.tolist(), chances.tolist(), None) for ids, chances, *_ in arrays]

    def rollback(self, position: int, seq: int = 0) -> None:
        """Remove the rows at positions >= position."""
        self._call(library().mtp_head_rollback, seq, position)

    def rows(self, seq: int = 0) -> bytes:
        """Return a sequence's keys and values, for `set_rows` of a head of the same model."""
        size = ctypes.c_size_t()
        self._call(library().mtp_head_rows_size, seq, ctypes.byref(size))
        out = ctypes.create_string_buffer(size.value)
        self._call(library().mtp_head_get_rows, seq, out, size)
        return out.raw

    def set_rows(self, rows: bytes, end: int, seq: int = 0) -> None:
        """Replace the rows of a sequence; the last of `rows` is at position end - 1."""
        self._call(library().mtp_head_set_rows, seq, end, rows, len(rows))

    def ops(self) -> list[str]:
        """Return the names of the ggml ops of this head's graphs, sorted."""
        out = ctypes.c_char_p()
        self._call(library().mtp_head_ops, ctypes.byref(out))
        return (out.value or b"").decode().split()

    def built_graphs(self) -> int:
        """Return how many draft graphs have been built so far; each takes milliseconds."""
        out = ctypes.c_int64()
        self._call(library().mtp_head_built_graphs, ctypes.byref(out))
        return out.value

    def _rows(
        self, tokens: Sequence[int], hidden: ArrayLike
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        ids = np.ascontiguousarray(tokens, np.int32)
        states = np.ascontiguousarray(hidden, np.float32)
        if states.shape != (len(ids), self.n_embd):
            raise NativeError(
                f"hidden: expected shape {[len(ids), self.n_embd]}, found {list(states.shape)}"
            )
        return ids, states


def _of_another_architecture(path: Path) -> HeadMissingError | None:
    """What to say of a model that no head is for; None for others."""
    try:
        with open_model(path) as model:
            if model.architecture is None or model.head.is_known:
                return None
            return HeadMissingError(f"{path}: {model.report.reason}; expected a model with a head")
    except (MtpGgufError, OSError):
        return None


def _matrix(model: Any, *, output: bool) -> int | None:
    """The address of a loaded model's output matrix or embedding; None if llama.cpp hides it."""
    found = ctypes.c_void_p()
    pointer = ctypes.cast(model, ctypes.c_void_p)
    check(library().mtp_model_matrix(pointer, output, ctypes.byref(found)))
    return found.value


def _ints(array: NDArray[np.int32]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))


def _floats(array: NDArray[np.float32]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
