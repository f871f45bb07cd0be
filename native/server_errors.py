"""Makes llama_cpp's own server answer a client's mistakes with status 400 instead of 500."""

import re
import sys
from typing import Any

# How messages about the arguments of a request begin.
_ARGUMENTS = (
    *("messages", "tools", "tool_choice", "response_format", "grammar", "prompt", "logprobs"),
    *("max_tokens", "max_completion_tokens"),
)
_SCHEMA = "the JSON schema at "  # of response_format
_MISTAKE = re.compile(rf"\A(?:(?P<param>{'|'.join(_ARGUMENTS)})\b[^:\s]*: |{_SCHEMA})")


def answer_mistakes_with_400() -> None:
    """Extend the errors that llama_cpp's server knows, if this process has loaded it."""
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
