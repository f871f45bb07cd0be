"""One copy of the weights, and the contexts, heads and sessions that use it one after another."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.machine.huge_pages import read_in_huge_pages
from mtp_gguf.gguf_tools.model import shard_paths
from mtp_gguf.native import log
from mtp_gguf.native.chat.generate import chat_writer
from mtp_gguf.native.checks.model_file import check_trunk
from mtp_gguf.native.errors import ModelRefusedError
from mtp_gguf.native.head import Head
from mtp_gguf.native.imatrix import ImatrixCollector
from mtp_gguf.native.libraries.loaded import device_name
from mtp_gguf.native.libraries.replay import keeps_snapshots
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Rollback, Session
from mtp_gguf.native.vocabulary import tokenize

N_BATCH = 512


@dataclass(frozen=True)
class Setting:
    """The settings of a session that cannot change from cycle to cycle.

    max_depth: 0 runs without a head. draft_threads: 0 for as many as the trunk. lookup: tokens
    drafted from the text at most.
    """

    max_depth: int
    fastmtp_size: int = 0
    rollback: Rollback = Rollback.SNAPSHOT
    draft_threads: int = 0
    lookup: int = 0


class Reader:
    """A trunk without its head that reads windows of a text."""

    def __init__(self, session: Session, context: Any, n_vocab: int) -> None:
        self._session = session
        self._context = context
        self._n_vocab = n_vocab

    def read(self, window: NDArray[np.int32], *, all_logits: bool = False) -> None:
        """Read a window in one batch. all_logits: compute those of all its tokens."""
        self._session.remove(0)
        self._session.decode(window.tolist(), all_logits=all_logits)

    def hidden(self, window: NDArray[np.int32], *, all_logits: bool = False) -> NDArray[np.float32]:
        """Read a window; the hidden states of its tokens, [tokens, n_embd]."""
        self._session.want_hidden()
        self.read(window, all_logits=all_logits)
        return self._session.hidden(len(window))

    def logits(self, window: NDArray[np.int32], first: int) -> NDArray[np.float32]:
        """Read a window; the logits of its tokens from `first` on, valid until the next call."""
        self.read(window[:first])
        self._session.decode(window[first:].tolist(), all_logits=True)
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (len(window) - first, self._n_vocab))


class BenchModel:
    """A loaded trunk, used as a context manager.

    Raises ModelRefusedError if llama.cpp cannot load the file.
    """

    def __init__(
        self, path: Path, *, n_ctx: int, threads: int, gpu_layers: int = 0, head: Path | None = None
    ) -> None:
        self.architecture = check_trunk(path)
        self.path = path
        self.n_ctx = n_ctx
        self.threads = threads
        self.gpu_layers = gpu_layers
        self.device = device_name(gpu_layers)
        self._head_path = head
        # Contexts by snapshots, and heads by rows and threads, that no session uses now.
        self._contexts: dict[int, list[Any]] = {}
        self._heads: dict[tuple[int, int], list[Head]] = {}
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.load_mtp = False
        log.listen(False)
        read_in_huge_pages(shard_paths(path))
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise ModelRefusedError(f"{path}: llama.cpp cannot load it{log.indented_log()}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        template = llama_cpp.llama_model_chat_template(self._model, None)
        self.write_chat = chat_writer(template.decode(errors="replace") if template else None)

    def __enter__(self) -> BenchModel:
        return self

    def __exit__(self, *_: object) -> None:
        for heads in self._heads.values():
            for head in heads:
                head.close()
        for contexts in self._contexts.values():
            for context in contexts:
                llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(self._model)

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; none are added. special: recognize special tokens in it."""
        tokens = tokenize(self._vocab, text.encode("utf-8", "replace"), special=special)
        return [*map(int, tokens)]

    @property
    def bos(self) -> int | None:
        """The token that the model's texts begin with, if they do."""
        wanted = llama_cpp.llama_vocab_get_add_bos(self._vocab)
        return int(llama_cpp.llama_vocab_bos(self._vocab)) if wanted else None

    def piece(self, token: int) -> bytes:
        """The bytes of a token; its name, such as <|im_end|>, for a control token."""
        out = ctypes.create_string_buffer(256)
        n = llama_cpp.llama_token_to_piece(self._vocab, token, out, len(out), 0, True)
        return out.raw[: max(n, 0)]

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text or the assistant's message."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    @contextmanager
    def session(self, setting: Setting) -> Iterator[Session]:
        """An empty session with a context and a head of its own.

        The context has as many snapshots as the session drafts, and rolls back by checkpoint where
        llama.cpp keeps none, as MTPLlama configures it. It is reused by later sessions of the same
        kind, until another kind is needed.
        """
        depth, mode = setting.max_depth, setting.rollback
        snapshots = max(depth, setting.lookup) if mode is Rollback.SNAPSHOT else 0
        contexts = self._contexts.setdefault(snapshots, [])
        context = contexts.pop() if contexts else self._new_context(snapshots)
        if snapshots and not keeps_snapshots(context):
            mode = Rollback.CHECKPOINT
        heads = self._heads.setdefault(
            (setting.fastmtp_size, setting.draft_threads or self.threads), []
        )
        head: Head | None = None
        try:
            if depth:
                head = heads.pop() if heads else self._new_head(setting, context)
            with Session(
                context, head, max_depth=depth, rollback=mode, max_lookup=setting.lookup
            ) as session:
                try:
                    yield session
                finally:
                    session.remove(0)
        finally:
            contexts.append(context)
            if head:
                heads.append(head)

    @contextmanager
    def reader(self, length: int, collector: ImatrixCollector | None = None) -> Iterator[Reader]:
        """The trunk, to read windows of up to `length` tokens, each in an empty context.

        collector: collects the trunk's activations meanwhile.
        """
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = length
        if collector is not None:
            collector.listen(params)
        context = self._make_context(params)
        try:
            with Session(context, None, max_depth=0) as session:
                yield Reader(session, context, self.n_vocab)
        finally:
            llama_cpp.llama_free(context)

    def head(self, *, n_ctx: int, n_seq_max: int = 1) -> Head:
        """The model's head with a cache of its own, to be closed by the caller."""
        return self._load_head(n_ctx=n_ctx, n_seq_max=n_seq_max)

    def _new_context(self, snapshots: int) -> Any:
        for others in self._contexts.values():  # free memory that the new context may need
            while others:
                llama_cpp.llama_free(others.pop())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_rs_seq = self.n_ctx, snapshots
        params.n_batch = params.n_ubatch = N_BATCH
        return self._make_context(params)

    def _make_context(self, params: Any) -> Any:
        params.n_threads = params.n_threads_batch = self.threads
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise ModelRefusedError(
                f"{self.path}: no context of {params.n_ctx} positions{log.indented_log()}"
            )
        return context

    def _new_head(self, setting: Setting, context: Any) -> Head:
        return self._load_head(
            n_threads=setting.draft_threads or self.threads,
            n_ctx=llama_cpp.llama_n_ctx_seq(context),
            fastmtp_size=setting.fastmtp_size,
        )

    def _load_head(self, **options: Any) -> Head:
        return Head(
            self._head_path or self.path,
            trunk=self.path if self._head_path else None,
            device=self.device,
            **{"n_threads": self.threads, **options},
        )
