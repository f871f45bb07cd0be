"""Log-probabilities of tokens, in the form of OpenAI's completions."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROWS = 32  # that `TokenLogprobs.add` takes at a time, so that copies stay small


class Entry(NamedTuple):
    """A token with its log-probability; None for the first of a prompt, which follows nothing."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]  # the likeliest tokens, with the likeliest first


class TokenLogprobs:
    """Collects the log-probabilities of a prompt's tokens and of those generated after it.

    top: how many of the likeliest tokens to keep for each. prompt: whether to collect the prompt's,
    the first of which has none.
    """

    def __init__(self, top: int, *, prompt: bool) -> None:
        self._top = top
        self.wants_prompt = prompt
        self.prompt: list[Entry] = []
        self.generated: list[Entry] = []

    def begin_prompt(self, token: int) -> None:
        """Take the first token, which follows nothing."""
        self.prompt.append(Entry(token, None, ()))

    def add_prompt(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> None:
        """Take tokens of the prompt; row i of the logits, [n, n_vocab], is that before token i."""
        self.prompt += self._entries(logits, tokens)

    def add_generated(self, logits: NDArray[np.float32], token: int) -> None:
        """Take a token that was generated from these logits, [n_vocab]."""
        self.generated += self._entries(logits[None], [token])

    def _entries(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> list[Entry]:
        best = logits.max(axis=1)
        total = np.exp(logits - best[:, None]).sum(axis=1, dtype=np.float64)
        norms = best + np.log(total)
        chosen = logits[np.arange(len(tokens)), tokens] - norms
        entries = []
        for row, norm, token, logprob in zip(logits, norms, tokens, chosen.tolist(), strict=True):
            ids = _likeliest(row, min(self._top, len(row)))
            top = zip(ids.tolist(), (row[ids] - norm).tolist(), strict=True)
            entries.append(Entry(int(token), logprob, tuple(top)))
        return entries


def _likeliest(logits: NDArray[np.float32], n: int) -> NDArray[np.int64]:
    """The ids of the `n` largest logits, the largest first."""
    if n < 2:
        return np.array([logits.argmax()] * n, np.int64)
    ids = np.argpartition(logits, -n)[-n:]
    return ids[np.argsort(-logits[ids], kind="stable")]


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
