"""llama.cpp's own trunk and MTP graphs, driven row by row as its draft-mtp drives them.

Follows common/speculative.cpp: the trunk hands out its hidden states after the final norm
(`llama_set_embeddings_nextn`); a second context of type MTP eats rows of (token, hidden state of
the position before), the first one with zeros; each later draft step feeds the drafted token with
the hidden state that the MTP context itself handed out. With several layers, which share the cells
of the context's memory, each layer drafts one step and is first fed the tokens drafted so far.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from mtp_gguf.native.runtime import llama_cpp

from llama_cpp import llama_cpp_ext  # isort: skip
from numpy.typing import NDArray

F32 = NDArray[np.float32]

CONTEXT = 256
THREADS = 2


class LlamaMtp:
    """A GGUF file with an MTP head; same methods as `ReferenceModel`. Use it in a `with`.

    Caches are F32 and flash attention and repacked weights are off, so that all that is left of a
    difference to the reference is rounding in F32 and what the file's types lost.
    """

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_log_set(_SILENCE, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._cleanup = ExitStack()
        params = llama_cpp.llama_model_default_params()
        params.load_mtp, params.use_extra_bufts, params.n_gpu_layers = True, False, 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._cleanup.callback(llama_cpp.llama_model_free, self._model)
        self.hidden = llama_cpp.llama_model_n_embd_out(self._model)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.layers = llama_cpp.llama_model_n_layer_nextn(self._model)

    def __enter__(self) -> LlamaMtp:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cleanup.close()

    def _context(self, stack: ExitStack, ctx_type: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = CONTEXT
        params.n_outputs_max = CONTEXT
        params.n_threads = params.n_threads_batch = THREADS
        params.ctx_type = ctx_type
        params.type_k = params.type_v = GGMLQuantizationType.F32.value
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama.cpp does not make a context")
        stack.callback(llama_cpp.llama_free, context)
        return context

    def _process(
        self, context: Any, tokens: Sequence[int], h: F32 | None, first: int, outputs: range
    ) -> tuple[F32, F32]:
        """Decode rows at positions first, ...; return (logits, hidden states) of `outputs`."""
        with ExitStack() as stack:
            batch = llama_cpp.llama_batch_ext_init(context)
            stack.callback(llama_cpp.llama_batch_ext_free, batch)
            for i, token in enumerate(tokens):
                index = llama_cpp.llama_batch_ext_add_token(batch, 0, int(token))
                assert index == i
                position = (llama_cpp.llama_pos * 4)(first + i, 0, 0, 0)
                assert llama_cpp.llama_batch_ext_set_pos(batch, i, position)
                if h is not None:
                    row = h[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
                    embd = llama_cpp.llama_embd(row, 1, self.hidden)
                    assert llama_cpp.llama_batch_ext_set_embd_token(batch, i, embd)
                if i in outputs:
                    assert llama_cpp.llama_batch_ext_set_output_logits(batch, i, True)
            kind = llama_cpp.LLAMA_PROCESS_TYPE_DECODE
            code = llama_cpp.llama_process(context, kind, batch)
        if code:
            raise RuntimeError(f"llama_process returned {code}")

        def rows(get: Any, width: int) -> F32:
            found = [np.ctypeslib.as_array(get(context, i), (width,)).copy() for i in outputs]
            return np.array(found, np.float32)

        return (
            rows(llama_cpp.llama_get_logits_ith, self.vocab_size),
            rows(llama_cpp_ext.llama_get_embeddings_nextn_ith, self.hidden),
        )

    def trunk(self, tokens: Sequence[int]) -> tuple[F32, F32]:
        """Return (logits [n, V], hidden states after the final norm [n, H])."""
        with ExitStack() as stack:
            context = self._context(stack, llama_cpp.LLAMA_CONTEXT_TYPE_DEFAULT)
            llama_cpp_ext.llama_set_embeddings_nextn(context, True, False)
            return self._process(context, tokens, None, 0, range(len(tokens)))

    def draft(
        self, tokens: Sequence[int], h: F32, depth: int, *, follow: Sequence[int] | None = None
    ) -> tuple[list[int], F32]:
        """Draft after `tokens` as `ReferenceModel.draft` does (with its row of zeros)."""
        zeros = np.zeros((1, self.hidden), np.float32)
        rows = np.concatenate([zeros, h[: len(tokens) - 1]]).astype(np.float32)
        ids, logits = [], []
        with ExitStack() as stack:
            context = self._context(stack, llama_cpp.LLAMA_CONTEXT_TYPE_MTP)
            llama_cpp_ext.llama_set_embeddings_nextn(context, True, True)
            # The known rows first, without outputs: in a batch of more rows than outputs the MTP
            # graph's hidden states are not picked by output, and those of row 0 would come back.
            known = len(tokens) - 1
            for layer in range(self.layers if known else 0):
                self._select(context, layer, 0)
                self._process(context, tokens[:known], rows[:known], 0, range(0))
            fed, states, first = [tokens[-1]], rows[known:], known
            for step in range(depth):
                if self.layers > 1:
                    self._select(context, step, known)
                last = range(len(fed) - 1, len(fed))
                step_logits, row = self._process(context, fed, states, first, last)
                logits.append(step_logits[0])
                ids.append(int(step_logits[0].argmax()))
                token = ids[-1] if follow is None else int(follow[step])
                if self.layers > 1:
                    fed, states = [*fed, token], np.concatenate([states, row])
                else:
                    fed, states, first = [token], row, first + 1
        return ids, np.stack(logits)

    def _select(self, context: Any, layer: int, first: int) -> None:
        """Run the given layer from here on, which will compute its own rows from `first` on."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 0, first, -1)
        llama_cpp_ext.llama_set_nextn_layer_offset(context, layer)


def _ignore(_level: int, _text: bytes, _user_data: object) -> None:
    pass


_SILENCE = llama_cpp.llama_log_callback(_ignore)
