"""Completions as clients of OpenAI's API expect them, made of llama_cpp's."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cache, cached_property, partial
from typing import Any

from .loaded import LoadedModel
from .logprobs import Entry, TokenLogprobs, chat_logprobs, completion_logprobs


class Answer:
    """Adds the prompt (`echo`) and log-probabilities to the chunks of a completion.

    record: has the log-probabilities of the tokens that were generated so far; None for none.
    nothing: whether the client asked for no tokens. chat: whether log-probabilities have the form
    of a chat completion's.
    """

    def __init__(
        self,
        llm: LoadedModel,
        prompt: str | list[int],
        record: TokenLogprobs | None,
        *,
        echo: bool,
        nothing: bool,
        chat: bool,
    ) -> None:
        def text_of(token: int, *, special: bool) -> bytes:
            # After another token, because the first one of a text can lose its space. The places of
            # pictures, which are negative, have no text.
            return (
                b""
                if token < 0
                else bytes(llm.detokenize([token], prev_tokens=[token], special=special))
            )

        self._llm = llm
        self._text_of = cache(text_of)
        self._record = record
        self._echo, self._nothing, self._chat = echo, nothing, chat
        self._given = prompt
        # A token that llama_cpp puts before a text is not part of it.
        self._hidden = int(isinstance(prompt, str) and llm._model.add_bos_token())
        self._shown = 0  # characters of the answer
        self._sent = self._read = self._taken = 0  # bytes sent and read, tokens taken

    @cached_property
    def _prompt(self) -> str:
        """Its text; only for tokens that were evaluated, since llama.cpp aborts on wrong ids."""
        if isinstance(self._given, str):
            return self._given
        text = b"".join(self._text_of(token, special=True) for token in self._given)
        return text.decode("utf-8", "ignore")

    def stream(self, chunks: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield the chunks of a stream; the prompt has one of its own."""
        echo = self._echo
        for chunk in chunks:
            choice = chunk["choices"][0]
            if echo:
                echo = False
                logprobs = None if self._record is None else self._prompt_logprobs()
                own = {"text": self._prompt, "logprobs": logprobs, "finish_reason": None}
                yield {**chunk, "choices": [{**choice, **own}]}
            self._end(choice)
            if self._record is not None:
                last = choice["finish_reason"] is not None
                entries = self._others() if last else self._take(choice["text"])
                if entries or not last:
                    choice["logprobs"] = self._logprobs(entries)
                self._shown += len(choice["text"])
            yield chunk

    def whole(self, chunks: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield the only chunk of an answer that is not streamed."""
        for chunk in chunks:
            choice = chunk["choices"][0]
            self._end(choice)
            if self._record is not None:
                entries = self._generated(chunk["usage"]["completion_tokens"])
                choice["logprobs"] = logprobs = self._logprobs(entries)
                if self._echo:
                    for name, values in self._prompt_logprobs().items():
                        logprobs[name] = [*values, *logprobs[name]]
            if self._echo:
                choice["text"] = self._prompt + choice["text"]
            yield chunk

    def _end(self, choice: dict[str, Any]) -> None:
        if self._nothing and choice["finish_reason"] is not None:
            choice["finish_reason"] = "length"

    def _take(self, text: str) -> Sequence[Entry]:
        """Return the entries of the tokens that a chunk with this text is made of."""
        assert self._record is not None
        first = self._taken
        self._sent += len(text.encode())
        while self._read < self._sent and self._taken < len(self._record.generated):
            token = self._record.generated[self._taken].token
            self._read += len(self._text_of(token, special=False))
            self._taken += 1
        return self._record.generated[first : self._taken]

    def _others(self) -> Sequence[Entry]:
        """Return the entries of tokens in no chunk: of a stop string, or the end of text.

        The token that llama_cpp generates although the client asked for none is not among them.
        """
        assert self._record is not None
        return [] if self._nothing else self._record.generated[self._taken :]

    def _generated(self, n_tokens: int) -> Sequence[Entry]:
        """Return the entries of the answer's tokens.

        The end of text is one of them, though it is not counted: harnesses that read the prompt's
        log-probabilities take the last entry of an answer to be that of a generated token.
        """
        assert self._record is not None
        end = self._record.generated[n_tokens : n_tokens + 1]
        n_tokens += bool(end) and self._llm.is_end(end[0].token)
        return self._record.generated[:n_tokens]

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        text_of = partial(self._text_of, special=False)
        if self._chat:
            return chat_logprobs(entries, text_of)
        return completion_logprobs(entries, text_of, len(self._prompt) + self._shown)

    def _prompt_logprobs(self) -> dict[str, Any]:
        assert self._record is not None
        entries = self._record.prompt[self._hidden :]
        entries[:1] = [entry._replace(logprob=None) for entry in entries[:1]]
        return completion_logprobs(entries, partial(self._text_of, special=True), 0)
