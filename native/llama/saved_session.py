"""Session files of a model: what it has evaluated, written and read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.errors import FormatError

from ..checkpoint import Checkpoint, CheckpointKind
from ..errors import ContextFullError, NativeError
from ..sessions.session_file import SessionHeader, read_session, write_session
from .evaluation import EvaluatingModel
from .session_identity import check_identity, identity_of


def save_session(llm: EvaluatingModel, file: Path, extra: Mapping[str, Any]) -> None:
    """Write what a model has evaluated, as `MTPLlama.save_session` does."""
    session = llm.session
    llm._sync_session()
    tokens = llm._input_ids
    if len(tokens) == 0:
        raise NativeError("save_session: expected evaluated tokens, found none")
    with session.save(CheckpointKind.WHOLE) as saved:
        data = saved.to_array()
    write_session(file, tokens, data, identity_of(llm), extra, llm._prompts.to_arrays(session))


def load_session(llm: EvaluatingModel, file: Path) -> dict[str, Any]:
    """Continue the session in a file, as `MTPLlama.load_session` does; return its `extra`."""
    session = llm.session
    if llm._logits_all:
        raise NativeError("load_session: expected logits_all=False, found True")

    def check(header: SessionHeader) -> None:
        check_identity(file, header.identity, identity_of(llm))
        if header.n_tokens >= llm.n_ctx():
            raise ContextFullError(
                f"{file}: n_ctx: expected more than the {header.n_tokens} tokens of the "
                f"session, found {llm.n_ctx()}"
            )

    saved = read_session(file, check)
    if saved.tokens.max() >= llm.n_vocab():
        raise FormatError(
            f"{file}: tokens: expected ids below {llm.n_vocab()}, found {saved.tokens.max()}"
        )
    try:
        with Checkpoint.from_bytes(saved.checkpoint, borrow=True) as checkpoint:
            length, kind = checkpoint.length, checkpoint.kind
            if length != len(saved.tokens) or kind is not CheckpointKind.WHOLE:
                raise FormatError(
                    f"{file}: checkpoint: expected a whole one of {len(saved.tokens)} "
                    f"tokens, found {kind.name.lower()} of {length}"
                )
            session.restore(checkpoint)
    except NativeError as error:
        if session.length() != llm.n_tokens:
            llm.reset()
        raise type(error)(f"{file}: {error}") from None
    try:
        llm._prompts.load(session, saved.header.earlier, saved.earlier)
    except NativeError as error:
        llm.reset()
        raise type(error)(f"{file}: {error}") from None
    llm._set_evaluated(saved.tokens)
    return saved.header.extra
