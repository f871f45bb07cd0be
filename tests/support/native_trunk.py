"""A llama.cpp model and context of our own, so that sessions can be tested without MTPLlama."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mtp_gguf.native.head import Head
from mtp_gguf.native.libraries.offload import tensor_overrides
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Rollback, Session
from support import places

MODES = ["snapshot", "checkpoint", "two-phase", "host"]


class Trunk:
    """One thread, no repacked weights, on the devices of `places.current()`."""

    def __init__(
        self,
        path: Path,
        n_rs_seq: int,
        n_ctx: int = 256,
        n_seq_max: int = 1,
        unified: bool = False,
    ) -> None:
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False
        place = places.current()
        params.n_gpu_layers = place.gpu_layers
        overrides = tensor_overrides(0, {"^token_embd": place.head} if place.embedding else {})
        params.tensor_buft_overrides = ctypes.addressof(overrides)
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self.model
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = n_ctx if unified else n_ctx * n_seq_max
        context.kv_unified = unified
        context.n_batch = context.n_ubatch = 64
        context.n_rs_seq, context.n_seq_max = n_rs_seq, n_seq_max
        context.n_threads = context.n_threads_batch = 1
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        assert self.context
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)

    def logits(self, row: int = -1) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()

    def state(self) -> bytes:
        """The whole context's memory, as llama_cpp.Llama.save_state keeps it."""
        buffer = (ctypes.c_uint8 * llama_cpp.llama_state_get_size(self.context))()
        return bytes(buffer[: llama_cpp.llama_state_get_data(self.context, buffer, len(buffer))])

    def set_state(self, state: bytes) -> None:
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        assert llama_cpp.llama_state_set_data(self.context, buffer, len(state)) == len(state)

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


def decode_rows(context: Any, rows: Sequence[tuple[int, int, int]]) -> int:
    """Decode rows of sequence, position and token, with logits; the status of llama_decode."""
    batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (seq, position, token) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
        batch.seq_id[i][0] = seq
    status = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_batch_free(batch)
    return int(status)


def know_costs(session: Session, most: int, step: float = 3.0) -> None:
    """Set costs of up to `most` drafts as if learned long ago: the most likely drafts pay.

    step: milliseconds of each further token; the first takes 10.
    """
    for _ in range(50):
        session.set_costs([10.0 + step * i for i in range(most + 1)], [10.0] * 4)


@contextmanager
def opened_session(
    path: Path,
    mode: str,
    depth: int,
    n_ctx: int = 256,
    n_seq_max: int = 1,
    unified: bool = False,
    lookup: int = 0,
    fastmtp_size: int = 0,
    mtp_type: str | None = None,
) -> Iterator[tuple[Session, Trunk]]:
    """A session with a head on a trunk of its own, closed at the end.

    n_ctx: positions of each sequence; unified: of all of them together.
    """
    snapshots = max(depth, lookup) if mode == "snapshot" else 0
    with closing(Trunk(path, snapshots, n_ctx, n_seq_max, unified)) as trunk:
        # The context may be larger than asked for; the head must cover it.
        real = llama_cpp.llama_n_ctx_seq(trunk.context)
        with (
            Head(
                path,
                device=places.current().head,
                n_ctx=real,
                n_seq_max=n_seq_max,
                n_threads=1,
                fastmtp_size=fastmtp_size,
                model=trunk.model,
                mtp_type=mtp_type,
            ) as head,
            Session(
                trunk.context,
                head,
                max_depth=depth,
                rollback=Rollback.parse(mode),
                max_lookup=lookup,
            ) as session,
        ):
            yield session, trunk
