"""What a model has evaluated, in files, states and caches, and prompts that continue from it."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .._interrupts import DeferredInterrupts
from ..checkpoint import Checkpoint, CheckpointKind
from ..errors import ContextFullError, NativeError
from ..sessions.prompt_reuse import PromptReuse, explain
from ..sessions.session_folder import SessionFolder, shared_length
from .evaluation import MIN_CHECKPOINTED_PROMPT, EvaluatingModel, check_text
from .loaded import exclusive
from .options import Options
from .saved_session import load_session, save_session
from .session_store import SessionStore
from .state_cache import StateCache


class StoringModel(EvaluatingModel):
    """Continues a prompt from the longest beginning that is evaluated, here or in `session_dir`."""

    _store: SessionStore | None = None
    _prompt_reuse: PromptReuse | None = None

    def __init__(self, how: Options, given: dict[str, Any], /) -> None:
        """Load a model, with the folder of its sessions."""
        folder = None
        if how.arguments.session_dir is not None:
            folder = SessionFolder(Path(how.arguments.session_dir), how.arguments.session_size)
        super().__init__(how, given)
        if folder is not None:
            try:
                self._open_store(folder)
            except BaseException:
                self.close()
                raise

    @property
    def prompt_reuse(self) -> PromptReuse | None:
        """How much of the last prompt was evaluated already, and why no more; None before one.

        A prompt of a completion with `echo` and `logprobs` is evaluated anew and is not counted.
        """
        return self._prompt_reuse

    @exclusive
    def set_cache(self, cache: Any) -> None:
        """Set llama_cpp's cache of states, such as LlamaRAMCache or LlamaDiskCache; None: no cache.

        A completion continues from the state with the most tokens of its prompt. States of other
        models and settings are not used. `session_dir` does the same without pickled files.
        """
        super().set_cache(None if cache is None else StateCache(self, cache))

    @exclusive
    def save_state(self) -> Any:
        """Return llama_cpp.Llama's state, with that of the drafts as bytes in `mtp_head`.

        `mtp_earlier` has the checkpoints of earlier prompts by length, if the model is recurrent.
        """
        self._sync_session()
        state: Any = super().save_state()
        state.mtp_logits_all = self._logits_all
        state.mtp_head = b""
        fed = self._head is not None and self._head.next_position()
        if fed or (self._max_lookup and self.session.length()):
            with self.session.save(CheckpointKind.HEAD) as saved:
                state.mtp_head = saved.to_bytes()
        state.mtp_earlier = self._prompts.to_arrays(self.session) if self.session.length() else {}
        return state

    @exclusive
    def load_state(self, state: Any) -> None:
        """Load a state, with that of the drafts if it has one (llama_cpp.Llama's states have none).

        Raises ContextFullError if it has more tokens than the context, RuntimeError if llama.cpp
        rejects the state, which leaves nothing evaluated, and NativeError if it lacks logits that
        this model needs, if it has fewer tokens than it says, or if the part of the drafts is
        rejected, which leaves the trunk's state loaded.
        """
        if state.n_tokens > self.n_ctx():
            raise ContextFullError(
                f"load_state: n_ctx: expected at least the {state.n_tokens} tokens of the state, "
                f"found {self.n_ctx()}"
            )
        if self._logits_all and not getattr(state, "mtp_logits_all", True):
            raise NativeError(
                "load_state: expected the state of a model with logits_all=True, found one without "
                "the logits of its tokens"
            )
        loaded = copy(state)
        loaded.input_ids = np.zeros(self.n_ctx(), np.intc)  # the state's may be of another n_ctx
        loaded.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
        loaded.scores = state.scores[-len(self.scores) :]  # as many rows as there is room for
        try:
            super().load_state(loaded)
        except BaseException:
            self.session.sync()
            self.reset()
            raise
        self.session.sync()
        if self.session.length() < state.n_tokens:
            length = self.session.length()
            self.reset()
            raise NativeError(
                f"load_state: expected a state of {state.n_tokens} tokens, found one of {length}"
            )
        drafting = getattr(state, "mtp_head", b"")
        if drafting and (self._head is not None or self._max_lookup):
            with Checkpoint.from_bytes(drafting) as saved:
                self.session.restore(saved)
        earlier = getattr(state, "mtp_earlier", {})
        self._prompts.load(self.session, list(earlier), list(earlier.values()))

    def save_session(
        self, path: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Write the evaluated tokens and all that the model computed for them to a file.

        extra: a JSON object that `load_session` returns. An older file stays as it was until the
        new one is complete. Raises NativeError if nothing is evaluated, and OutputError if the file
        cannot be written. docs/sessions.md describes the file.
        """
        with self._model_lock.hold():
            self._check_open()
            save_session(self, Path(path), extra or {})

    def load_session(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Replace what is evaluated by the session in a file; return its `extra`.

        A prompt that begins with the session's tokens is read from their end. Pictures get new ids,
        because those of another process may mean others here. Raises FormatError
        for a damaged file, RequestError for the session of another model or of other settings, and
        ContextFullError for more tokens than the context holds. All of them leave the model usable.
        """
        with self._model_lock.hold():
            self._check_open()
            return load_session(self, Path(path))

    def close(self) -> None:
        """Write the session to session_dir, and free everything; a second call does nothing.

        While another thread uses the session, NativeError is raised and nothing is freed.
        """
        with DeferredInterrupts():
            self._close_store()
            super().close()
            self._prompts.close()

    def _reuse_prefix(self, tokens: list[int]) -> list[int]:
        """Reuse the longest evaluated prefix of `tokens` if possible; return the other tokens.

        At least one token is returned if its logits are needed. The recurrent state can be rolled
        back only by a few tokens or to the prompt's checkpoint; otherwise everything is evaluated
        again.
        """
        if not self._requires_eval and tokens == self._input_ids.tolist():
            self._prompt_reuse = PromptReuse(len(tokens), len(tokens), "")
            return []  # the last token's logits are available
        common = shared_length(self._input_ids, tokens[:-1])
        kept, shared, unfit = self.n_tokens, common, ""
        if self._store is not None and self.n_tokens - common >= MIN_CHECKPOINTED_PROMPT:
            self._store_session()
            common = min(common, self.n_tokens)
        while 0 < common < self.n_tokens and self.input_ids[common - 1] == self._picture_at(common):
            common -= 1  # to the beginning of a picture
        if 0 < common < self.session.length():
            common = self._shorten(common)
        if self._store is not None and len(tokens) - common >= MIN_CHECKPOINTED_PROMPT:
            self._n_tokens = common
            common, unfit = self._store.load(self, tokens, common)
        check_text(tokens[common:])
        if common == 0:
            self.reset()
        self.n_tokens = common
        self._requires_eval = True
        self._prompt_reuse = explain(len(tokens), common, kept, shared, unfit)
        return tokens[common:]

    def _open_store(self, folder: SessionFolder) -> None:
        """Write sessions to a folder, also when Python ends without closing the model."""
        if self._without_session:
            raise NativeError("session_dir: expected a model with a session, found one without")
        self._store = SessionStore(self, folder)
        self._at_exit = partial(_store_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def _close_store(self) -> None:
        if self._store is not None:
            atexit.unregister(self._at_exit)
            if self._session is not None and not self._session.closed:
                self._store_session()
            self._store = None

    def _store_session(self) -> None:
        """Write a long enough conversation to session_dir, before its place is taken.

        A sliding window can be continued only from where it was written. The next prompt may render
        the last answer differently, as without its thoughts, so the session is written a second
        time as of the prompt's checkpoint, where this leaves it.
        """
        if self._store is None or self.n_tokens < MIN_CHECKPOINTED_PROMPT:
            return
        self._store.store(self)
        length = self._prompts.restore(self.session, self.n_tokens) if self._store.windowed else 0
        if length:
            self.n_tokens = length
            self._requires_eval = True
            if length >= MIN_CHECKPOINTED_PROMPT:
                self._store.store(self)


def _store_at_exit(model: weakref.ref[StoringModel]) -> None:
    llm = model()
    if llm is not None and not llm._closed:
        llm._close_store()
