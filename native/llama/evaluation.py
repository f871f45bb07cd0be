"""Evaluating tokens: the text that a model has read, its logits, and pictures in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import CheckpointKind
from ..errors import NativeError
from ..runtime import llama_cpp
from ..sessions.prompt_checkpoints import PromptCheckpoints
from .loaded import LoadedModel, exclusive
from .options import Options

# For prompts with at least this many new tokens the recurrent state is copied. The copy is made a
# margin before the end of the prompt: when the chat continues, its template may render the last few
# tokens differently. The margin is still large enough for an efficient batch.
MIN_CHECKPOINTED_PROMPT = 256
CHECKPOINT_MARGIN = 64


class EvaluatingModel(LoadedModel):
    """Evaluates tokens after those before, and keeps checkpoints near the ends of long prompts."""

    def __init__(self, how: Options, given: dict[str, Any], /) -> None:
        """Load a model that has evaluated nothing."""
        self._prompts = PromptCheckpoints(how.arguments.keep_prompt)
        self._n_tokens = self._pictures = 0
        super().__init__(how, given)

    @property
    def n_tokens(self) -> int:
        """Number of evaluated positions; llama_cpp's handlers set it after a picture."""
        return self._n_tokens

    @n_tokens.setter
    def n_tokens(self, length: int) -> None:
        session = self._session
        if session is not None and not session.closed and length > session.length():
            held = llama_cpp.llama_memory_seq_pos_max(self._ctx.memory, 0) + 1
            if held > session.length():
                self._skip_pictures(length)
        if length != self._n_tokens:
            self._requires_eval = True  # the logits are those of another token
        self._n_tokens = length

    @exclusive
    def reset(self) -> None:
        """Forget all tokens."""
        self.n_tokens = 0
        self._requires_eval = True
        self.session.remove(0)

    @exclusive
    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after those evaluated so far; ContextFullError if they do not fit."""
        self._sync_session()
        for batch in self._batches_of(tokens):
            self._decode(batch, all_logits=self._logits_all)

    def _decode(self, batch: Sequence[int], *, all_logits: bool) -> None:
        self.session.decode(batch, all_logits=all_logits)
        at = self.n_tokens
        self.input_ids[at : at + len(batch)] = batch
        if self._logits_all:
            for i in range(len(batch)):
                self._store_scores(at + i, i)
        self.n_tokens += len(batch)
        self._requires_eval = False

    def _check_logits(self, method: str) -> None:
        if self._requires_eval:
            raise NativeError(
                f"{method}: expected the logits of the last token, which a loaded state, `reset` "
                "and `generate` do not leave, found none; call eval first"
            )

    @property
    def eval_logits(self) -> deque[list[float]]:
        """The logits of all evaluated tokens with logits_all=True, else those of the last one.

        NativeError if these are not there, as for `sample`.
        """
        with self._model_lock.hold():
            self._check_open()
            if self._logits_all:
                return super().eval_logits
            self._check_logits("eval_logits")
            return deque([self._logits(-1).tolist()], maxlen=1)

    def _shorten(self, most: int) -> int:
        """Cut the session to `most` tokens, or to the last checkpoint before; return its length.

        0 if there is none: the session is then as it was, or empty.
        """
        try:
            self.session.remove(most)
        except NativeError:
            return self._prompts.restore(self.session, most)
        return most

    def _sync_session(self) -> None:
        """Remove tokens beyond n_tokens: a stream may have stopped between accepted drafts.

        If the recurrent state cannot be rolled back that far, all tokens are evaluated again.
        """
        if self.session.length() == self.n_tokens:
            return
        try:
            self.session.remove(self.n_tokens)
        except NativeError:
            tokens = self._input_ids.tolist()
            self.session.remove(0)
            if min(tokens, default=0) < 0:
                self.n_tokens = 0
            check_text(tokens)
            if tokens:
                self.session.decode(tokens)

    def _picture_at(self, position: int) -> int | None:
        """Return the id of the picture at a position, which is negative; None for text."""
        found = int(self.input_ids[position])
        return found if found < 0 else None

    def _skip_pictures(self, length: int) -> None:
        """Skip the positions before `length`, where llama_cpp's handler has evaluated a picture.

        The handler evaluates it without the session. The positions get an id of their own, so that
        no prompt takes the picture for another one or for text.
        """
        known = self.session.length()
        self.session.skip(length)
        self._pictures += 1
        self.input_ids[known:length] = -self._pictures
        self._requires_eval = True

    def _set_evaluated(self, tokens: NDArray[np.intc]) -> None:
        """Note the tokens of a session that was restored; its pictures get new ids."""
        length = len(tokens)
        self.input_ids[:length] = tokens
        for picture in np.unique(tokens[tokens < 0]):
            self._pictures += 1
            self.input_ids[:length][tokens == picture] = -self._pictures
        self._n_tokens = length
        self._requires_eval = True

    def _batches_of(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """Yield tokens in batches.

        The session decodes no more at once, and llama.cpp has the logits of the last batch only.
        """
        most = min(self.n_batch, llama_cpp.llama_n_ubatch(self._ctx.ctx))
        for start in range(0, len(tokens), most):
            yield list(tokens[start : start + most])

    def _eval_prompt(self, tokens: Sequence[int], *, keep: bool) -> None:
        """Evaluate a prompt, until `stop` is called.

        keep: if it is long, save a checkpoint for the next prompt.
        """
        if keep and len(tokens) >= MIN_CHECKPOINTED_PROMPT:
            self._eval_until_stopped(tokens[:-CHECKPOINT_MARGIN])
            if self._model_lock.stopped:
                return
            self._prompts.add(self.session, self.session.save(CheckpointKind.HOST))
            tokens = tokens[-CHECKPOINT_MARGIN:]
        self._eval_until_stopped(tokens)

    def _eval_until_stopped(self, tokens: Sequence[int]) -> None:
        self._sync_session()
        for batch in self._batches_of(tokens):
            self.eval(batch)
            if self._model_lock.stopped:
                return

    def _logits(self, row: int) -> NDArray[np.float32]:
        """The logits of a row of the last batch, valid until the next one; -1 is the last row."""
        logits = llama_cpp.llama_get_logits_ith(self._ctx.ctx, row)
        return np.ctypeslib.as_array(logits, shape=(self._n_vocab,))

    def _store_scores(self, position: int, row: int) -> None:
        self.scores[position, :] = self._logits(row)


def check_text(tokens: Sequence[int]) -> None:
    """NativeError if tokens stand for a picture, which can only be evaluated by its handler."""
    if min(tokens, default=0) < 0:
        raise NativeError(
            "prompt: expected text, found the place of a picture that is no longer in the context; "
            "ask with the picture again"
        )
