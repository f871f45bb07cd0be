"""A llama.cpp model and context of our own, so that sessions can be tested without MTPLlama."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np


class Trunk:
    """One thread, no repacked weights."""

    def __init__(self, path: Path, n_rs_seq: int, n_ctx: int = 256, n_seq_max: int = 1) -> None:
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self.model
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = n_ctx * n_seq_max, 64, 64
        context.n_rs_seq, context.n_seq_max = n_rs_seq, n_seq_max
        context.n_threads = context.n_threads_batch = 1
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        assert self.context
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)

    def logits(self, row: int = -1) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)
