"""`session_dir`: what a model has evaluated is written to a folder and continued from there."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError

from ..checkpoint import CheckpointKind
from ..runtime import llama_cpp
from ..sessions.session_file import SessionHeader
from ..sessions.session_folder import SessionFolder
from .evaluation import EvaluatingModel
from .loaded import LoadedModel
from .saved_session import load_session
from .session_identity import check_identity, identity_of

DEFAULT_BYTES = 20 * 10**9


def is_windowed(llm: LoadedModel) -> bool:
    """Whether some layers keep the last tokens only, so that a state cannot be cut far back."""
    return llama_cpp.llama_model_n_swa(llm.model) > 0 and not llm.context_params.swa_full


def continues_from_end_only(llm: LoadedModel) -> bool:
    """Whether a state without checkpoints is of no use at an earlier position.

    That is so if it is recurrent or has a sliding window.
    """
    model = llm.model
    return bool(
        is_windowed(llm)
        or llama_cpp.llama_model_is_recurrent(model)
        or llama_cpp.llama_model_is_hybrid(model)
    )


class SessionStore:
    """Writes the sessions of one model to a folder, and loads them.

    windowed: `is_windowed`.
    """

    def __init__(self, llm: EvaluatingModel, folder: SessionFolder) -> None:
        self._folder = folder
        self._identity = identity_of(llm)
        self._writable = True
        self.windowed = is_windowed(llm)
        self._whole = continues_from_end_only(llm)

    def store(self, llm: EvaluatingModel) -> None:
        """Write what is evaluated; a text with pictures is not.

        If that fails, as on a full disk, a warning says so, and nothing more is written.
        """
        tokens = llm.input_ids[: llm.n_tokens]
        if not self._writable or len(tokens) == 0 or tokens.min() < 0:
            return
        try:
            if llm.session.length() != len(tokens):  # drafts that nobody read
                llm.session.remove(len(tokens))
            if self._folder.has(tokens, self._identity):
                return
            with llm.session.save(CheckpointKind.WHOLE) as saved:
                data = saved.to_array()
            earlier = llm._prompts.to_arrays(llm.session)
            written = self._folder.write(tokens, data, self._identity, earlier)
            if written and not self._whole:
                self._folder.remove_prefixes(tokens, self._identity)
        except MtpGgufError as error:
            self._writable = False
            warnings.warn(f"session_dir: sessions are no longer saved: {error}", stacklevel=4)

    def load(self, llm: EvaluatingModel, tokens: Sequence[int], known: int) -> tuple[int, str]:
        """Load the session that spares the most of a prompt, if that is more than `known` tokens.

        Returns how many tokens are evaluated now, and why a session with more of them cannot be
        loaded, "" if there is none. A session that cannot be loaded is skipped.
        """
        unfit: dict[Path, str] = {}

        def fits(header: SessionHeader) -> bool:
            try:
                check_identity(header.path, header.identity, self._identity)
            except RequestError as error:
                unfit[header.path] = str(error)
                return False
            return header.n_tokens < llm.n_ctx()

        for match in self._folder.find(tokens, fits, more_than=known, whole=self._whole):
            try:
                load_session(llm, match.path)
                length = llm._shorten(match.length)
            except MtpGgufError as error:
                unfit[match.path] = str(error)
                if llm.session.length() != known:
                    llm.reset()
                    known = 0
                continue
            self._folder.used(match.path)
            known = length
            break
        return known, self._folder.best(tokens, unfit, more_than=known)
