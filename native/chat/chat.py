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

from ..errors import ContextFullError
from ..llama.mtp_llama import MTPLlama
from ..llama.sampling import Sampling
from .chat_answer import ChatAnswer
from .chat_layer import UNLIMITED, AnswerSampling, Rendered, available
from .pictures import Pictures, has_pictures

# OpenAI's: `role`, and `content` as a text or a list of parts.
Message: TypeAlias = dict[str, Any]


class Piece(NamedTuple):
    """A part of an answer.

    origin: of its token (`MTPLlama.token_origin`). thinking: whether it is not yet the answer.
    """

    text: str
    origin: int
    thinking: bool


class Prompt(NamedTuple):
    """A conversation as the model reads it.

    tokens: for `MTPLlama.generate`. rendered: the conversation as text, and how to read the answer.
    messages: those that it has.
    """

    tokens: list[int]
    rendered: Rendered
    messages: Sequence[Message]


class Chat:
    """A model that answers conversations in its chat template.

    thinking: whether the template is told to let the model think (its variable `enable_thinking`);
    None to leave that to the template. most_thinking: tokens of thinking, after which it is ended;
    -1 for no limit. mmproj: the file with the vision tower. RequestError if the model has no chat
    template, ModelRefusedError if it has an invalid one.
    """

    def __init__(
        self,
        llm: MTPLlama,
        *,
        thinking: bool | None = None,
        most_thinking: int = UNLIMITED,
        mmproj: Path | None = None,
    ) -> None:
        source = llm.metadata.get("tokenizer.chat_template")
        if not source:
            raise RequestError(
                f"{llm.model_path}: expected a model with a chat template, found none; use "
                "mtp-gguf generate"
            )
        self.llm = llm
        self.generated: Counter[int] = Counter()  # tokens of all answers, by origin
        self.pictures = None if mmproj is None else Pictures(llm, mmproj)
        self._template = llm.chat_template(source)
        self._variables = {} if thinking is None else {"enable_thinking": thinking}
        self._most_thinking = most_thinking

    def prompt(self, messages: Sequence[Message], room: int | None = None) -> Prompt:
        """Return the prompt that ends where the answer begins; pictures are evaluated at once.

        room: leave out the oldest turns, as `truncation` of `create_chat_completion` does, if the
        messages leave no room for an answer of so many tokens, or of any number if it is 0; None to
        keep all. RequestError if the template refuses the messages; ContextFullError if they do not
        fit the context.
        """
        marked, more, pictures = messages, dict[str, Any](), self.pictures
        if has_pictures(messages):
            if pictures is None:
                raise RequestError(
                    f"{self.llm.model_path}: expected a vision tower for pictures, found none; "
                    "name its mmproj file"
                )
            marked, more["media"] = pictures.marked(messages)
        if room is not None and available():
            more |= {"truncation": "auto"} | ({"max_tokens": room} if room > 0 else {})
        text = self._render(marked, **more)
        first = [message for message in messages[:1] if message["role"] == "system"]
        messages = [*first, *messages[len(first) + self._rendered.dropped_messages :]]
        if pictures is not None and has_pictures(messages):
            _, tokens = pictures.prompt(messages, self._render)
        else:
            tokens = self.llm.tokenize(text.encode(), special=True)
        if len(tokens) >= (limit := self.llm.n_ctx()):
            raise ContextFullError(
                f"the message: expected fewer than {limit} tokens, found {len(tokens)}"
            )
        return Prompt(tokens, self._rendered, messages)

    def _render(self, messages: Sequence[Message], /, **more: Any) -> str:
        request = {"messages": messages, "chat_template_kwargs": self._variables, **more}
        self._rendered = self._template.render(request, self.llm.model, self.llm.n_ctx())
        return self._rendered.prompt

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
        reader = ChatAnswer(prompt.rendered)
        limit = AnswerSampling(prompt.rendered, self._most_thinking)
        options = {**asdict(sampling), "grammar": limit if limit.constrains else None}
        preserved = llm.single_tokens(prompt.rendered.preserved_tokens)
        with closing(llm.generate(prompt.tokens, **options)) as stream:
            for token in islice(stream, min(most, room) if most > 0 else room):
                if stopped() or llm.is_end(token):
                    break
                origin = llm.token_origin
                text = decoder.decode(llm.detokenize([token], special=token in preserved))
                self.generated[origin] += 1
                yield from _pieces(reader.add(text, is_last=False), origin)
        yield from _pieces(reader.add(decoder.decode(b"", final=True), is_last=True), 0)


def _pieces(deltas: Sequence[dict[str, Any]], origin: int) -> Iterator[Piece]:
    for delta in deltas:
        for key in ("reasoning_content", "content"):
            if text := delta.get(key):
                yield Piece(text, origin, key == "reasoning_content")
