"""One copy of the weights, and over it contexts, heads and sessions in turn."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp

from .. import _log
from .._bindings import MAX_DEPTH, library
from ..errors import ModelRefusedError
from ..generate import chat_writer
from ..head import Head
from ..session import Rollback, Session

N_BATCH = 512


@dataclass(frozen=True)
class Setting:
    """How a session drafts, as far as it cannot be changed from cycle to cycle.

    max_depth: 0 runs without a head. draft_threads: 0: as many as the trunk.
    """

    max_depth: int
    fastmtp_size: int = 0
    rollback: Rollback = Rollback.SNAPSHOT
    draft_threads: int = 0


class BenchModel:
    """A loaded trunk. ModelRefusedError when llama.cpp cannot load it. Use `with`."""

    def __init__(
        self, path: Path, *, n_ctx: int, threads: int, gpu_layers: int = 0, head: Path | None = None
    ) -> None:
        self.path = path
        self.n_ctx = n_ctx
        self.threads = threads
        self.device = library().mtp_gpu_name(0).decode() if gpu_layers else "CPU"
        self._head_path = head
        self._stack = ExitStack()
        self._context: Any = None
        self._context_key: tuple[int, bool] | None = None
        self._heads: dict[tuple[int, int], Head] = {}
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.load_mtp = False
        _log.listen(False)
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ModelRefusedError(f"{path}: llama.cpp cannot load it{_log.last_lines()}")
        self._stack.callback(llama_cpp.llama_model_free, self._model)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        template = llama_cpp.llama_model_chat_template(self._model, None)
        self.write_chat = chat_writer(template.decode(errors="replace") if template else None)

    def __enter__(self) -> BenchModel:
        return self

    def __exit__(self, *_: object) -> None:
        for head in self._heads.values():
            head.close()
        self._drop_context()
        self._stack.close()

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, special tokens parsed."""
        raw = text.encode()
        room = len(raw) + 8
        out = (ctypes.c_int32 * room)()
        n = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), out, room, False, True)
        return out[: max(n, 0)]

    def piece(self, token: int) -> bytes:
        """The bytes of a token; none for a control token."""
        out = ctypes.create_string_buffer(256)
        n = llama_cpp.llama_token_to_piece(self._vocab, token, out, len(out), 0, False)
        return out.raw[: max(n, 0)]

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text or the turn."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    @contextmanager
    def session(self, setting: Setting) -> Iterator[Session]:
        """An empty session; one at a time. Contexts and heads are kept for the next one alike."""
        snapshots = MAX_DEPTH // 2 if setting.rollback is Rollback.SNAPSHOT else 0
        context = self._get_context(max(snapshots, setting.max_depth if snapshots else 0))
        head = self._get_head(setting) if setting.max_depth else None
        depth, mode = setting.max_depth, setting.rollback
        with Session(context, head, max_depth=depth, rollback=mode) as session:
            try:
                yield session
            finally:
                session.remove(0)

    def head_rows(self, setting: Setting) -> int:
        """Rows of the head that a setting drafts from."""
        return self._get_head(setting).n_draft_vocab

    def _get_context(self, snapshots: int) -> Any:
        key = (snapshots, True)
        if self._context_key != key:
            self._drop_context()
            params = llama_cpp.llama_context_default_params()
            params.n_ctx, params.n_rs_seq = self.n_ctx, snapshots
            params.n_batch = params.n_ubatch = N_BATCH
            params.n_threads = params.n_threads_batch = self.threads
            self._context = llama_cpp.llama_init_from_model(self._model, params)
            if not self._context:
                raise ModelRefusedError(
                    f"{self.path}: no context of {self.n_ctx} positions{_log.last_lines()}"
                )
            self._context_key = key
        return self._context

    def _drop_context(self) -> None:
        if self._context:
            llama_cpp.llama_free(self._context)
        self._context = self._context_key = None

    def _get_head(self, setting: Setting) -> Head:
        key = (setting.fastmtp_size, setting.draft_threads or self.threads)
        if key not in self._heads:
            beside = self._head_path is not None
            self._heads[key] = Head(
                self._head_path or self.path,
                trunk=self.path if beside else None,
                device=self.device,
                n_threads=key[1],
                n_ctx=llama_cpp.llama_n_ctx_seq(self._context),
                fastmtp_size=key[0],
            )
        return self._heads[key]
