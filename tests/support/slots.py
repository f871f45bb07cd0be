"""Sequences that are drafted in one graph and verified in one batch, as llama-server's slots."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.native.head import Head, SequenceTask
from mtp_gguf.native.runtime import llama_cpp  # first: it chooses the libraries

from . import places
from .native_trunk import Trunk, decode_rows

from llama_cpp import llama_cpp_ext  # isort: skip


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the loaded llama.cpp that llama_cpp does not declare."""
    found = getattr(llama_cpp.llama_cpp._lib, name)
    found.restype, found.argtypes = result, arguments
    return found


class Slots:
    """Greedy decoding of several sequences at one depth. texts: their tokens so far."""

    def __init__(self, trunk: Trunk, head: Head, depth: int, prompts: Sequence[list[int]]) -> None:
        self.trunk, self.head, self.depth = trunk, head, depth
        self.context = ctypes.cast(trunk.context, ctypes.c_void_p)
        self.texts = [list(prompt) for prompt in prompts]
        self.accepted = self.kept = self.cycles = 0
        llama_cpp_ext.llama_set_embeddings_nextn(trunk.context, True, False)
        on_device = _function(
            "llama_set_outputs_on_device", ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool
        )
        on_device(self.context, True)
        self.largest = _function(
            "llama_get_largest_token_ith", ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32
        )
        # For each sequence: the end of the head's rows, and the hidden states of the next ones,
        # or None if those are on the device.
        self.fed = [1] * len(prompts)
        self.waiting: list[NDArray[np.float32] | None] = []
        for seq, prompt in enumerate(prompts):
            self.decode([(seq, 0, prompt)])
            hidden = self.hidden(len(prompt))
            self.head.feed(prompt[1:], hidden[:-1], 1, seq)
            self.fed[seq] = len(prompt)
            self.waiting.append(hidden[-1:])
            self.texts[seq].append(self.choose(len(prompt) - 1))

    def decode(self, parts: Sequence[tuple[int, int, list[int]]]) -> None:
        """One batch of each sequence's tokens from a position on."""
        rows = [(seq, first + i, t) for seq, first, tokens in parts for i, t in enumerate(tokens)]
        assert decode_rows(self.trunk.context, rows) == 0

    def choose(self, row: int) -> int:
        """The most likely token of a row, which waits for the batch."""
        found: int = self.largest(self.context, row)
        return found if found >= 0 else int(np.argmax(self.trunk.logits(row)))

    def hidden(self, n: int) -> NDArray[np.float32]:
        """The hidden states of the last batch, on the host."""
        found = llama_cpp_ext.llama_get_embeddings_nextn(self.trunk.context)
        return np.ctypeslib.as_array(found, (n, self.head.n_embd)).copy()

    def keep(self, each: int, rows: Sequence[int]) -> list[bool]:
        """Keep the first `rows` hidden states on the device, of `each` per sequence in a batch."""
        find = _function(
            "llama_get_embeddings_nextn_tensor",
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_void_p),
        )
        backend = ctypes.c_void_p()
        tensor = find(self.context, ctypes.byref(backend))
        parts = [(seq, 0, seq * each, n) for seq, n in enumerate(rows)]
        if tensor is None:
            return [False] * len(parts)
        return self.head.keep_hidden(tensor, backend.value or 0, parts)

    def step(self) -> None:
        """One cycle of all sequences."""
        sequences = range(len(self.texts))
        tasks = [
            SequenceTask(text[fed:], hidden, fed, self.depth, seq)
            for seq, text, fed, hidden in zip(
                sequences, self.texts, self.fed, self.waiting, strict=True
            )
        ]
        drafts = [draft.tokens for draft in self.head.draft_batch(tasks)]
        batch = [
            (seq, len(text) - 1, [text[-1], *drafts[seq]]) for seq, text in enumerate(self.texts)
        ]
        self.decode(batch)
        each = self.depth + 1
        kept = self.keep(each, [each] * len(batch))
        self.kept += sum(kept)
        chosen = [self.choose(row) for row in range(each * len(batch))]  # waits for both
        hidden = None if all(kept) else self.hidden(each * len(batch))
        for seq in sequences:
            own = chosen[seq * each : (seq + 1) * each]
            right = next((i for i, t in enumerate(drafts[seq]) if t != own[i]), self.depth)
            self.fed[seq] = len(self.texts[seq])
            self.texts[seq] += own[: right + 1]
            self.accepted += right
            self.waiting[seq] = (
                None if kept[seq] or hidden is None else hidden[seq * each :][: right + 1]
            )
            memory = llama_cpp.llama_get_memory(self.trunk.context)
            end = len(self.texts[seq]) - 1
            assert llama_cpp.llama_memory_seq_rm(memory, seq, end, -1)
        self.cycles += 1


@contextmanager
def opened_slots(path: Path, depth: int, prompts: Sequence[list[int]]) -> Iterator[Slots]:
    """Slots on the devices of `places.current()`, with 256 positions each."""
    n = len(prompts)
    with closing(Trunk(path, depth, 256, n)) as trunk:
        real = llama_cpp.llama_n_ctx_seq(trunk.context)
        device = places.current().head
        with Head(path, device=device, n_ctx=real, n_seq_max=n, n_threads=1) as head:
            yield Slots(trunk, head, depth, prompts)
