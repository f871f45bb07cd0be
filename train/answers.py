"""Lets a trunk continue texts, several of them at once, in a context of its own."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.native.errors import NativeError
from mtp_gguf.native.llama.mtp_llama import MTPLlama
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Session, last_hidden

# Eight texts take 2.5 to 3 times as long as one. More gain less with recurrent states, which take
# 150 MiB each at 27B.
SLOTS = 8
_TOP_P = 0.95
# Jobs behind an unfinished answer, so that slots are busy though few texts of a list need one.
_WAITING = 10 * SLOTS


@dataclass(frozen=True)
class Job:
    """A text to read, or a prompt to answer: greedily, or sampled with a seed.

    length: most tokens of prompt and answer; 0 for a text.
    """

    tokens: tuple[int, ...]
    held_out: bool
    length: int = 0
    seed: int | None = None


@dataclass
class _Text:
    """A job's text so far. slot: where it is being continued, None if it is complete.

    ends: whether its last token ends it, which is a token to draft, too. states: of its tokens,
    [n, width] in parts; the last token has none while the text is continued.
    """

    job: Job
    tokens: list[int]
    states: list[NDArray[np.float16]] = field(default_factory=list)
    slot: int | None = None
    ends: bool = False


@dataclass
class Writer:
    """A context manager, of a model that must outlive it.

    length: most tokens of a text. temperature: of answers with a seed.
    """

    llm: MTPLlama
    length: int
    temperature: float
    _free: list[int] = field(default_factory=lambda: list(range(SLOTS)))

    def __enter__(self) -> "Writer":
        params = type(self.llm.context_params).from_buffer_copy(self.llm.context_params)
        params.n_seq_max, params.n_ctx, params.kv_unified = SLOTS, SLOTS * self.length, False
        self._context: Any = llama_cpp.llama_init_from_model(self.llm.model, params)
        if not self._context:
            raise RequestError(
                f"{self.llm.model_path}: llama.cpp makes no context for {SLOTS} texts of "
                f"{self.length} tokens; pass a smaller --length"
            )
        with ExitStack() as stack:
            stack.callback(llama_cpp.llama_free, self._context)
            self._batch = llama_cpp.llama_batch_init(SLOTS, 0, 1)
            stack.callback(llama_cpp.llama_batch_free, self._batch)
            self._session = Session(self._context, None, max_depth=0)
            stack.callback(self._session.close)
            self._session.want_hidden()
            self._close = stack.pop_all().close
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def texts(
        self, jobs: Iterable[Job]
    ) -> Iterator[tuple[Job, list[int], NDArray[np.float16] | None]]:
        """Each job, in this order, with the tokens of its text and answer, and with their states.

        The states are [n, width], and None for a job without an answer. An answer depends on its
        job alone, if the kernels' results do not depend on the batch.
        """
        source = iter(jobs)
        queue: deque[_Text] = deque()
        while True:
            while self._free and len(queue) < _WAITING and (job := next(source, None)) is not None:
                queue.append(text := _Text(job, list(job.tokens)))
                if job.length:
                    self._begin(text)
            if not queue:
                return
            if busy := {text.slot: text for text in queue if text.slot is not None}:
                self._advance(busy)
            while queue and queue[0].slot is None:
                text = queue.popleft()
                yield text.job, text.tokens, np.concatenate(text.states) if text.states else None

    def _begin(self, text: _Text) -> None:
        text.slot = slot = self._free.pop()
        self._session.remove(0, slot)
        n_batch = llama_cpp.llama_n_batch(self._context)
        for at in range(0, len(text.tokens), n_batch):
            part = text.tokens[at : at + n_batch]
            self._session.decode(part, slot)
            text.states.append(self._session.hidden(len(part)).astype(np.float16))
        self._append(text, -1)

    def _advance(self, texts: dict[int, _Text]) -> None:
        """Append a token to each text, by its slot."""
        batch = self._batch
        batch.n_tokens = len(texts)
        # llama.cpp computes sequences together as long as their numbers rise by one.
        rows = sorted(texts.items())
        for row, (slot, text) in enumerate(rows):
            batch.token[row], batch.pos[row] = text.tokens[-1], len(text.tokens) - 1
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, slot, True
        if code := llama_cpp.llama_decode(self._context, batch):
            raise NativeError(f"llama_decode: expected 0, found {code}")
        states = last_hidden(self._context, len(rows)).astype(np.float16)
        for row, (_, text) in enumerate(rows):
            text.states.append(states[row : row + 1])
            self._append(text, row)

    def _append(self, text: _Text, row: int) -> None:
        """Append the token that follows by these logits, unless the text has ended."""
        if not text.ends and len(text.tokens) < text.job.length:
            token = self._next(text, row)
            vocabulary = llama_cpp.llama_model_get_vocab(self.llm.model)
            text.tokens.append(token)
            text.ends = llama_cpp.llama_vocab_is_eog(vocabulary, token)
            return
        assert text.slot is not None
        self._free.append(text.slot)
        text.slot = None

    def _next(self, text: _Text, row: int) -> int:
        session, seed = self._session, text.job.seed
        try:
            if seed is None:
                return session.argmax(row)
            # Each token has random numbers of its own, whichever texts are written beside it.
            own = seed << 32 | len(text.tokens)
            session.set_sampling(self.temperature, top_p=_TOP_P, seed=own)
            return session.sample(row)
        except NativeError:
            raise RequestError(
                f"{self.llm.model_path}: expected logits to choose a token by, found NaN, infinity "
                "or the same for all tokens; nothing can be learned from this trunk"
            ) from None
