"""Log-probabilities of tokens, in the forms of OpenAI's completions and chat completions."""

import codecs
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._bindings import check, library


class Entry(NamedTuple):
    """A token with its log-probability; None for the first of a prompt, which follows nothing."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]  # the likeliest tokens, with the likeliest first


class TokenLogprobs:
    """Collects the log-probabilities of a prompt's tokens and of those generated after it.

    top: how many of the likeliest tokens to keep for each. prompt: whether to collect the prompt's,
    the first of which has none. threads: of the computation.
    """

    def __init__(self, top: int, *, prompt: bool, threads: int = 1) -> None:
        self._top = top
        self._threads = threads
        self.wants_prompt = prompt
        self.prompt: list[Entry] = []
        self.generated: list[Entry] = []

    def begin_prompt(self, token: int) -> None:
        """Take the first token, which follows nothing."""
        self.prompt.append(Entry(token, None, ()))

    def add_prompt(self, rows: Sequence[NDArray[np.float32]], tokens: Sequence[int]) -> None:
        """Take tokens of the prompt; row i has the logits, [n_vocab], before token i."""
        self.prompt += self._entries(rows, tokens)

    def add_generated(self, logits: NDArray[np.float32], token: int) -> None:
        """Take a token that was generated from these logits, [n_vocab]."""
        self.generated += self._entries([logits], [token])

    def _entries(self, rows: Sequence[NDArray[np.float32]], tokens: Sequence[int]) -> list[Entry]:
        n, n_vocab = len(tokens), len(rows[0]) if rows else 1
        top = min(self._top, n_vocab)
        floats = ctypes.POINTER(ctypes.c_float)
        logprobs = (ctypes.c_double * n)()
        top_ids, top_logprobs = (ctypes.c_int32 * (n * top))(), (ctypes.c_double * (n * top))()
        check(
            library().mtp_token_logprobs(
                (floats * n)(*(row.ctypes.data_as(floats) for row in rows)),
                (ctypes.c_int32 * n)(*tokens),
                *(n, n_vocab, top, self._threads),
                *(logprobs, top_ids, top_logprobs),
            )
        )
        likeliest = [*zip(top_ids, top_logprobs, strict=True)]
        return [
            Entry(int(token), logprob, tuple(likeliest[i * top : (i + 1) * top]))
            for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
        ]


def completion_logprobs(
    entries: Sequence[Entry], text_of: Callable[[int], bytes], offset: int
) -> dict[str, Any]:
    """Return `logprobs` of a choice of a completion. offset: characters of the text before it.

    The token itself is always among its `top_logprobs`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    out: dict[str, Any] = {
        "tokens": [],
        "text_offset": [],
        "token_logprobs": [],
        "top_logprobs": [],
    }
    for entry in entries:
        data = text_of(entry.token)
        name = data.decode("utf-8", "ignore")
        out["tokens"].append(name)
        out["text_offset"].append(offset)
        out["token_logprobs"].append(entry.logprob)
        offset += len(decoder.decode(data))
        top: dict[str, float] | None = None
        if entry.logprob is not None:
            top = {}  # of two tokens with the same text the likelier one
            for token, logprob in entry.top:
                top.setdefault(text_of(token).decode("utf-8", "ignore"), logprob)
            top[name] = entry.logprob
        out["top_logprobs"].append(top)
    return out


def chat_logprobs(entries: Sequence[Entry], text_of: Callable[[int], bytes]) -> dict[str, Any]:
    """Return `logprobs` of a choice of a chat completion; with ids, as llama-server has them."""

    def value(token: int, logprob: float | None) -> dict[str, Any]:
        data = text_of(token)
        text = data.decode("utf-8", "ignore")
        return {"id": token, "token": text, "bytes": [*data], "logprob": logprob}

    content = [
        {**value(entry.token, entry.logprob), "top_logprobs": [value(*top) for top in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}
