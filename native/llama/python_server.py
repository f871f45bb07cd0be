"""Fits llama_cpp's own server to the clients of OpenAI's API, where it runs MTPLlama."""

import re
import sys
from functools import wraps
from typing import Any

from ..runtime import llama_cpp

# How messages about the arguments of a request begin.
_ARGUMENTS = (
    *("messages", "tools", "tool_choice", "response_format", "grammar", "prompt", "logprobs"),
    *("max_tokens", "max_completion_tokens", "reasoning_budget_tokens", "reasoning_effort"),
    *("temperature", "top_p", "min_p", "top_k", "seed", "stop", "logit_bias", "top_logprobs"),
    *("presence_penalty", "frequency_penalty", "repeat_penalty"),
)
_SCHEMA = "the JSON schema at |JSON schema "  # of response_format, or of a tool
_MISTAKE = re.compile(rf"\A(?:(?P<param>{'|'.join(_ARGUMENTS)})\b[^:\s]*: |{_SCHEMA})")
# Parts of a request that MTPLlama checks itself. The server's own types refuse what clients send,
# such as null as the content beside tool calls, and its errors list a dozen types for each message.
_CHECKED = {
    "ChatCompletionRequestMessage": dict[str, Any],
    "ChatCompletionTool": dict[str, Any],
    "ChatCompletionToolChoiceOption": str | dict[str, Any],
    "ChatCompletionRequestResponseFormat": dict[str, Any],
    "ChatCompletion": dict[str, Any],  # of an answer, which has its thinking apart from its content
}


def take_what_clients_send() -> None:
    """Widen the types of the server's requests, unless this process has loaded it before."""
    if "llama_cpp.server.types" not in sys.modules:
        for name, kind in _CHECKED.items():
            setattr(llama_cpp, name, kind)


def answer_mistakes_with_400() -> None:
    """Extend the errors that the server knows, if this process has loaded it; others are 500."""
    errors: Any = sys.modules.get("llama_cpp.server.errors")
    if errors is None:
        return
    handler = errors.RouteErrorHandler
    handler.pattern_and_formatters[_MISTAKE] = _formatted
    wrapped = handler.error_message_wrapper
    if hasattr(wrapped, "__wrapped__"):
        return

    @wraps(wrapped)
    def answer(self: Any, error: Any, body: Any = None) -> tuple[int, dict[str, Any]]:
        # The server answers requests whose fields have wrong types with 500 and places in its code.
        if type(error).__name__ != "RequestValidationError":
            return tuple(wrapped(self, error, body))
        fault = error.errors()[0]
        place = [str(key) for key in fault["loc"][1:2]]
        expected = fault["msg"].removeprefix("Input should be ")
        found = f"{fault.get('input')!r:.80}"
        return _mistake(f"{''.join(place)}: expected {expected}, found {found}", *place)

    handler.error_message_wrapper = answer


def _formatted(_: Any, match: re.Match[str]) -> tuple[int, dict[str, Any]]:
    return _mistake(match.string, match["param"] or "response_format")


def _mistake(sentence: str, param: str | None = None) -> tuple[int, dict[str, Any]]:
    return 400, {"message": sentence, "type": "invalid_request_error", "param": param, "code": None}
