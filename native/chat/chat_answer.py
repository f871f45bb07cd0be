"""Answers of chats as OpenAI's clients expect them, made of llama_cpp's completions."""

import secrets
from collections.abc import Iterator
from typing import Any

from ..errors import NativeError
from .chat_layer import AnswerReader, Rendered


class ChatAnswer:
    """Reads the completion of a rendered conversation: its thinking, its text and its calls.

    The text of an answer that is not in the format of the model's family is its content. function:
    the function whose arguments the content is, if the template has no format for calls.
    """

    def __init__(self, rendered: Rendered, function: str | None = None) -> None:
        self._reader = AnswerReader(rendered)
        self._function = function
        dropped = rendered.dropped_messages
        self._dropped = {"dropped_messages": dropped} if dropped else {}
        self._id = f"call_{secrets.token_hex(12)}"
        self._text = ""
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Return the chat completion of a completion."""
        choice = completion["choices"][0]
        self.add(choice["text"], is_last=True)
        own = {"message": self.message, "finish_reason": self._reason(choice["finish_reason"])}
        answer = _chat(completion, "chat.completion", choice, own)
        return {**answer, "usage": completion["usage"], **self._dropped}

    def stream(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed chat completion for those of a completion."""
        begins = {"role": "assistant"}
        for chunk in chunks:
            choice = chunk["choices"][0]
            reason = choice["finish_reason"]
            if begins:
                yield _chunk(chunk, {**choice, "logprobs": None}, begins, None)
                begins = {}
            deltas = self.add(choice["text"], is_last=reason is not None)
            if not deltas and choice["logprobs"] and reason is None:
                deltas = [{}]  # of tokens whose text waits for more
            for delta in deltas:
                yield _chunk(chunk, choice, delta, None)
                choice = {**choice, "logprobs": None}
            if reason is not None:
                yield _chunk(chunk, choice, {}, self._reason(reason)) | self._dropped

    def add(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """Read more text; return the deltas of the message."""
        self._text += text
        if not text and not is_last:
            return []
        try:
            self.message, deltas = self._reader.add(text, is_last=is_last)
        except NativeError:  # the model wrote something else
            deltas = self._as_content() if is_last else []
        if self._function is not None:
            deltas = [self._as_call(self._function, delta) for delta in deltas]
            arguments = self.message["content"]
            function = {"name": self._function, "arguments": arguments}
            call = {"id": self._id, "type": "function", "function": function}
            self.message |= {"content": None, "tool_calls": [call]}
        return deltas

    def _as_call(self, function: str, delta: dict[str, Any]) -> dict[str, Any]:
        """Make the content of a delta the arguments of a call."""
        if "content" not in delta:
            return delta
        begins = self.message["content"] == delta["content"]
        head = {"id": self._id, "type": "function"} if begins else {}
        name = {"name": function} if begins else {}
        call = {"index": 0, **head, "function": {**name, "arguments": delta["content"]}}
        return {"tool_calls": [call]}

    def _as_content(self) -> list[dict[str, Any]]:
        """Take what was not read for content."""
        if any(self.message.get(key) for key in ("content", "reasoning_content", "tool_calls")):
            return []
        self.message["content"] = self._text
        return [{"content": self._text}]

    def _reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.message.get("tool_calls") else reason


def _chunk(
    chunk: dict[str, Any], choice: dict[str, Any], delta: dict[str, Any], reason: str | None
) -> dict[str, Any]:
    own = {"delta": delta, "finish_reason": reason}
    return _chat(chunk, "chat.completion.chunk", choice, own)


def _chat(
    completion: dict[str, Any], kind: str, choice: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": "chat" + completion["id"],
        "object": kind,
        "created": completion["created"],
        "model": completion["model"],
        "choices": [{"index": 0, "logprobs": choice["logprobs"], **own}],
    }
