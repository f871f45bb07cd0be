"""Renders conversations as OpenAI's clients send them with a model's chat template.

Templates are written for transformers: the arguments of a tool call are an object there, and a
content is never null. What a template does not support is found by trying it, as in llama.cpp.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from .errors import MessagesError
from .runtime import llama_cpp

_Jinja2ChatFormatter: Any = llama_cpp.llama_chat_format.Jinja2ChatFormatter
_PROBE = "a text to be found"


class ChatTemplate(_Jinja2ChatFormatter):  # type: ignore[misc]
    """A chat template; as llama_cpp's formatter, for messages of OpenAI's API.

    tools_template: the template for conversations with tools, if the model has another one.
    MessagesError if the messages are malformed, or if the template refuses them.
    """

    def __init__(self, template: str, *, tools_template: str | None = None, **options: Any) -> None:
        super().__init__(template=template, **options)
        self._with_tools = (
            None if tools_template is None else ChatTemplate(tools_template, **options)
        )

    def __call__(
        self, *, messages: Sequence[Any], tools: Any = None, tool_choice: Any = None, **options: Any
    ) -> Any:
        """Render messages; a `tool_choice` of "none" leaves the tools out."""
        if tool_choice == "none":
            tools = None
        if tools and self._with_tools is not None:
            return self._with_tools(messages=messages, tools=tools, **options)
        options |= {"tools": tools, "tool_choice": tool_choice}
        given = [self._message(at, message) for at, message in enumerate(_listed(messages))]
        try:
            return super().__call__(messages=given, **options)
        except Exception as error:  # a template is code from the model file: anything may be raised
            cause = error
        try:
            return super().__call__(messages=_with_text_arguments(given), **options)
        except Exception:
            where = self._place(given, cause, options)
        # A template refuses messages with a ValueError; other errors are of no use to a client.
        says = cause if isinstance(cause, ValueError) else f"{type(cause).__name__} in the template"
        raise MessagesError(
            f"{where}: expected what the model's chat template can render, found: {says}"
        ) from cause

    def _place(self, messages: list[Any], error: Exception, options: dict[str, Any]) -> str:
        """Name the message without which the template would not fail like this."""
        for count in range(1, len(messages)):
            try:
                super().__call__(messages=messages[:count], **options)
            except Exception as earlier:
                if str(earlier) == str(error):
                    return "messages" if count == 1 else f"messages[{count - 1}]"
        return f"messages[{len(messages) - 1}]" if len(messages) > 1 else "messages"

    def _message(self, at: int, message: Any) -> dict[str, Any]:
        """Check a message and return it as the template wants it."""
        where = f"messages[{at}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise MessagesError(f"{where}: expected an object with a role, found {message!r:.80}")
        out = {**message, "content": self._content(where, message.get("content"))}
        if out["role"] == "developer" and "developer" not in self.template:
            out["role"] = "system"
        if calls := out.get("tool_calls"):
            out["tool_calls"] = [*_tool_calls(f"{where}.tool_calls", calls)]
        return out

    def _content(self, where: str, content: Any) -> Any:
        if content is None or isinstance(content, str):
            text = content or ""
            return text if self._takes_text else [{"type": "text", "text": text}]
        if not isinstance(content, list | tuple):
            raise MessagesError(
                f"{where}.content: expected text or a list of parts, found {content!r:.80}"
            )
        for at, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else part
            if kind != "text":
                raise MessagesError(
                    f"{where}.content[{at}]: expected a part of type text, found {kind!r:.80}; "
                    "pictures need the model's mmproj file"
                )
            if not isinstance(part.get("text"), str):
                raise MessagesError(
                    f"{where}.content[{at}].text: expected text, found {part.get('text')!r:.80}"
                )
        return [*content] if self._takes_parts else "\n".join(part["text"] for part in content)

    @cached_property
    def _takes_parts(self) -> bool:
        rendered = self._probe([{"type": "text", "text": _PROBE}])
        return _PROBE in rendered and "'type'" not in rendered

    @cached_property
    def _takes_text(self) -> bool:
        return _PROBE in self._probe(_PROBE) or not self._takes_parts

    def _probe(self, content: Any) -> str:
        """Render one message; "" if the template refuses it."""
        try:
            return str(super().__call__(messages=[{"role": "user", "content": content}]).prompt)
        except Exception:
            return ""


class _Arguments(dict[str, Any]):
    """The arguments of a tool call, as an object for templates that read it, else as JSON text."""

    def __init__(self, text: str, arguments: dict[str, Any]) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _listed(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, list | tuple) or not messages:
        raise MessagesError(f"messages: expected a list of messages, found {messages!r:.80}")
    return messages


def _tool_calls(where: str, calls: Any) -> Iterator[dict[str, Any]]:
    """Yield calls with arguments as `_Arguments`; empty ones are an empty object."""
    if not isinstance(calls, list | tuple):
        raise MessagesError(f"{where}: expected a list of calls, found {calls!r:.80}")
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MessagesError(
                f"{where}[{at}]: expected a function with a name, found {call!r:.80}"
            )
        given = function.get("arguments")
        try:
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            arguments = json.loads(text) if given else {}
        except (TypeError, ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise MessagesError(
                f"{where}[{at}].function.arguments: expected a JSON object, found {given!r:.80}"
            )
        held = _Arguments(text if given else "{}", arguments)
        yield {**call, "function": {**function, "arguments": held}}


def _with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for templates that need arguments as text."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": str(function["arguments"])}}

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]
