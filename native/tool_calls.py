"""Answers that must be the call of one function: their text is its arguments, as JSON."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from .errors import NativeError
from .json_schema import ANY_OBJECT, schema_grammar
from .runtime import llama_cpp

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ForcedCall(NamedTuple):
    """The function that an answer must call, and the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]

    def grammar(self) -> str:
        """Return a grammar of the arguments.

        What a grammar cannot express is left out as in llama_cpp's grammars, since the schemas of
        tools are seldom their user's own.
        """
        try:
            return schema_grammar(self.parameters)
        except NativeError:
            pass
        try:
            convert = llama_cpp.llama_grammar.json_schema_to_gbnf
            return str(convert(json.dumps(self.parameters)))
        except Exception:  # of several kinds, for schemas of no kind
            return schema_grammar(ANY_OBJECT)

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Make the call of an answer, in place."""
        choice = answer["choices"][0]
        function = {"name": self.name, "arguments": choice["message"]["content"]}
        call = {"id": _id(answer), "type": "function", "function": function}
        choice["message"] |= {"content": None, "tool_calls": [call]}
        choice["finish_reason"] = _reason(choice["finish_reason"])
        return answer

    def stream(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the call of a streamed answer: its name once, then pieces of its arguments."""
        for chunk in chunks:
            choice = chunk["choices"][0]
            delta = choice["delta"]
            if "role" in delta:
                function = {"name": self.name, "arguments": ""}
                call = {"index": 0, "id": _id(chunk), "type": "function", "function": function}
                choice["delta"] = {**delta, "content": None, "tool_calls": [call]}
            elif "content" in delta:
                call = {"index": 0, "function": {"arguments": delta["content"]}}
                choice["delta"] = {"tool_calls": [call]}
            choice["finish_reason"] = _reason(choice["finish_reason"])
            yield chunk


def forced_call(tools: Any, tool_choice: Any) -> ForcedCall | None:
    """Return the function that an answer must call; None if it need not call any.

    NativeError if the tools or the choice are not those of OpenAI's API.
    """
    functions = _functions(tools)
    if tool_choice in (None, "none", "auto"):
        return None
    name = next(iter(functions), None)
    if isinstance(tool_choice, dict):
        named = tool_choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
    elif tool_choice != "required":
        name = None
    elif len(functions) > 1:
        raise NativeError(
            'tool_choice: expected "none", "auto" or a function by name with several tools, found '
            "'required'; name one, or use mtp-gguf serve"
        )
    if name not in functions:
        raise NativeError(
            f'tool_choice: expected "none", "auto", "required" or one of the tools '
            f"({', '.join(functions) or 'there are none'}), found {tool_choice!r:.80}"
        )
    return ForcedCall(name, functions[name])


def _functions(tools: Any) -> dict[str, dict[str, Any]]:
    """The parameters of the functions by name."""
    if not isinstance(tools, list | tuple | None):
        raise NativeError(f"tools: expected a list of tools, found {tools!r:.80}")
    functions = {}
    for at, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise NativeError(f"tools[{at}]: expected a function with a name, found {tool!r:.80}")
        parameters = function.get("parameters")
        if not isinstance(parameters, dict | None):
            raise NativeError(
                f"tools[{at}].function.parameters: expected a JSON schema, found {parameters!r:.80}"
            )
        functions[function["name"]] = parameters or _NO_PARAMETERS
    return functions


def _id(answer: dict[str, Any]) -> str:
    return "call_" + str(answer["id"]).removeprefix("chatcmpl-")


def _reason(reason: str | None) -> str | None:
    """A call that is complete ends with another reason than a text."""
    return "tool_calls" if reason == "stop" else reason
