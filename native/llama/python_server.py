"""Fits llama_cpp's own server to the clients of OpenAI's API, where it runs MTPLlama."""

import re
import sys
from typing import Any

from ..runtime import llama_cpp

# How messages about the arguments of a request begin.
_ARGUMENTS = (
    *("messages", "tools", "tool_choice", "response_format", "grammar", "prompt", "logprobs"),
    *("max_tokens", "max_completion_tokens", "reasoning_budget_tokens", "reasoning_effort"),
)
_SCHEMA = "the JSON schema at "  # of response_format
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
    if errors is not None:
        errors.RouteErrorHandler.pattern_and_formatters[_MISTAKE] = _formatted


def _formatted(_: Any, match: re.Match[str]) -> tuple[int, dict[str, Any]]:
    return 400, {
        "message": match.string,
        "type": "invalid_request_error",
        "param": match["param"] or "response_format",
        "code": None,
    }
