"""Answer a conversation: a model's chat template, its thinking, and pictures."""

import codecs
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from mtp_gguf.gguf_tools.errors import RequestError

from .errors import ContextFullError
from .generate import chat_renderer
from .llama import MTPLlama
from .pictures import Pictures, has_pictures
from .sampling import Sampling

# OpenAI's: `role`, and `content` as a text or a list of parts.
Message: TypeAlias = dict[str, Any]

THINK, END_THINK = "<think>", "</think>"


class Piece(NamedTuple):
    """A part of an answer.

    origin: of its token (`MTPLlama.token_origin`). thinking: whether it is not yet the answer.
    """

    text: str
    origin: int
    thinking: bool


class Prompt(NamedTuple):
    """A conversation as the model reads it.

    tokens: for `MTPLlama.generate`. thinking: whether the answer begins with thinking.
    """

    tokens: list[int]
    thinking: bool


class Chat:
    """A model that answers conversations in its chat template.

    thinking: whether the template is told to let the model think (its variable `enable_thinking`);
    None to leave that to the template. mmproj: the file with the vision tower. RequestError if the
    model has no chat template, or an invalid one.
    """

    def __init__(
        self, llm: MTPLlama, *, thinking: bool | None = None, mmproj: Path | None = None
    ) -> None:
        render = chat_renderer(llm.metadata.get("tokenizer.chat_template"))
        if render is None:
            raise RequestError(
                f"{llm.model_path}: expected a model with a chat template, found none; use "
                "mtp-gguf generate"
            )
        self.llm = llm
        self.generated: Counter[int] = Counter()  # tokens of all answers, by origin
        self.pictures = None if mmproj is None else Pictures(llm, mmproj)
        self._render = render
        self._variables = {} if thinking is None else {"enable_thinking": thinking}

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Return the prompt that ends where the answer begins; pictures are evaluated at once.

        RequestError if the template refuses the messages; ContextFullError if they leave no room
        for an answer.
        """
        if has_pictures(messages):
            if self.pictures is None:
                raise RequestError(
                    f"{self.llm.model_path}: expected a vision tower for pictures, found none; "
                    "name its mmproj file"
                )
            text, tokens = self.pictures.prompt(messages, self._render, **self._variables)
        else:
            text = self._render(messages, **self._variables)
            tokens = self.llm.tokenize(text.encode(), special=True)
        if len(tokens) >= self.llm.n_ctx():
            raise ContextFullError(
                f"the message: expected fewer than {self.llm.n_ctx()} tokens, found {len(tokens)}"
            )
        return Prompt(tokens, text.rstrip().endswith(THINK))

    def answer(
        self,
        prompt: Prompt,
        sampling: Sampling,
        most: int = 0,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[Piece]:
        """Generate the answer, which ends with the model's turn.

        most: tokens to generate at most; 0 for as many as the context holds. stopped: asked after
        each token whether to stop.
        """
        llm = self.llm
        room = llm.n_ctx() - len(prompt.tokens)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        thinking = ThinkingText(prompt.thinking)
        with closing(llm.generate(prompt.tokens, **asdict(sampling))) as stream:
            for token in islice(stream, min(most, room) if most > 0 else room):
                if stopped() or llm.is_end(token):
                    break
                origin = llm.token_origin
                text = decoder.decode(llm.detokenize([token]))
                self.generated[origin] += 1
                for part, thought in thinking.add(text):
                    yield Piece(part, origin, thought)
        for part, thought in [*thinking.add(decoder.decode(b"", final=True)), *thinking.end()]:
            yield Piece(part, 0, thought)


class ThinkingText:
    """Separates a model's thinking, between THINK and END_THINK, from its answer."""

    def __init__(self, thinking: bool) -> None:
        """thinking: the text begins with it, because the prompt ends with THINK."""
        self._thinking = thinking
        self._waiting = ""  # text that may be the beginning of a mark

    def add(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield the text that is known to be no mark, and whether it is thinking."""
        text = self._waiting + text
        while True:
            mark = END_THINK if self._thinking else THINK
            before, found, text_after = text.partition(mark)
            if not found:
                break
            if before:
                yield before, self._thinking
            self._thinking, text = not self._thinking, text_after
        n = next(n for n in range(len(mark) - 1, -1, -1) if text.endswith(mark[:n]))
        self._waiting = text[len(text) - n :]
        if text := text[: len(text) - n]:
            yield text, self._thinking

    def end(self) -> Iterator[tuple[str, bool]]:
        """Yield what was waiting for the rest of a mark."""
        if self._waiting:
            yield self._waiting, self._thinking
