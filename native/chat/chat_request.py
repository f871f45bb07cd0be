"""Arguments of `create_chat_completion` as a request to llama-server's chat layer."""

import json
from collections.abc import Mapping
from inspect import signature
from math import isfinite
from typing import Any

from ..errors import MessagesError, NativeError
from ..runtime import llama_cpp
from ..schemas.json_schema import response_schema
from .chat_layer import UNLIMITED

_SIGNATURE = signature(llama_cpp.Llama.create_chat_completion)
# What the layer reads; the rest is about generating.
_READ = ("messages", "tools", "tool_choice")
_LAYER = (
    *("parallel_tool_calls", "reasoning_format", "reasoning_effort", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "truncation"),
)
# What it only checks.
_SAMPLING = (
    *("temperature", "top_p", "min_p", "typical_p", "top_k", "seed", "max_tokens", "stream"),
    *("presence_penalty", "frequency_penalty", "repeat_penalty", "logit_bias", "logprobs"),
    *("top_logprobs", "response_format"),
)
# OpenAI's, which change nothing here; the server counts tokens where `stream_options` asks for it.
_IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("verbosity", "prediction", "modalities", "stream_options", "web_search_options", "audio"),
)
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ChatRequest:
    """A chat completion that was asked for.

    layer: the request as llama-server reads and checks it. completion: for `create_completion`.
    template: the chat template to use instead of the model's. thinking_tokens: the most tokens of
    thinking. end: a text to end it with. schema: JSON schema of the answer, or None. must_call:
    whether the answer has to be a tool call. NativeError or MessagesError for malformed arguments.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        options = {
            name: value
            for name, value in options.items()
            if (value is not None or name == "messages") and name not in _IGNORED
        }
        if (n := options.pop("n", 1)) != 1:
            raise MessagesError(f"n: expected 1, or `mtp-gguf serve` for more, found {n!r:.80}")
        for name in ("chat_template", "reasoning_format", "reasoning_budget_message"):
            if not isinstance(options.get(name), str | None):
                raise MessagesError(f"{name}: expected text, found {options[name]!r:.80}")
        more = {name: options.pop(name) for name in _LAYER if name in options}
        self.template: str | None = options.pop("chat_template", None)
        self.thinking_tokens = _budget(options.pop("reasoning_budget_tokens", None))
        self.end = options.pop("reasoning_budget_message", None) or ""
        bound = _SIGNATURE.bind(None, *args, **options)
        checked = {
            name: value
            for name in _SAMPLING
            if (value := bound.arguments.get(name)) is not None and not _is_special(value)
        }
        bound.apply_defaults()
        given = dict(bound.arguments)
        del given["self"]
        given |= _from_functions(given.pop("functions"), given.pop("function_call"))
        self.layer = {
            name: value
            for name, value in [*((name, given.pop(name)) for name in _READ), *more.items()]
            if value is not None
        } | checked
        if isinstance(most := given["max_tokens"], float) and isfinite(most):
            given["max_tokens"] = int(most)  # as the server reads it
        self.schema = response_schema(given.pop("response_format"))
        if self.schema is not None:
            self.layer["json_schema"] = self.schema
        choice = self.layer.get("tool_choice")
        self.must_call = choice not in (None, "none", "auto")
        beside = {
            "tools": choice != "none" and self.layer.get("tools"),
            "response_format": self.schema is not None,
            "reasoning_budget_tokens": self.thinking_tokens != UNLIMITED,
        }
        for name, is_there in beside.items():
            if given["grammar"] is not None and is_there:
                raise NativeError(f"{name}: expected no grammar beside it, found one")
        if not isinstance(given["grammar"], llama_cpp.llama_grammar.LlamaGrammar | None):
            raise MessagesError(f"grammar: expected a LlamaGrammar, found {given['grammar']!r:.80}")
        stop = [] if given["stop"] is None else given["stop"]
        given["stop"] = [stop] if isinstance(stop, str) else stop
        if not isinstance(given["stop"], list | tuple) or not all(
            isinstance(one, str) for one in given["stop"]
        ):
            raise MessagesError(f"stop: expected text or a list of texts, found {stop!r:.80}")
        given["stop"] = [*given["stop"]]
        top = given.pop("top_logprobs")
        given["logprobs"] = (top or 0) if given["logprobs"] else None
        self.completion = given

    def with_arguments_only(self) -> tuple[dict[str, Any], str]:
        """Return the request for an answer that is the arguments of its only function, as JSON.

        For chat templates without a format for calls; and the function's name. MessagesError if
        several functions may be called.
        """
        tools, choice = self.layer["tools"], self.layer["tool_choice"]
        named = choice["function"]["name"] if isinstance(choice, dict) else None
        found = [tool["function"] for tool in tools if named in (None, tool["function"]["name"])]
        if len(found) > 1:
            raise MessagesError(
                'tool_choice: expected "none", "auto" or a function by name, because the chat '
                f"template has no format for calls, found {choice!r}"
            )
        schema = found[0].get("parameters") or _NO_PARAMETERS
        request = {**self.layer, "tool_choice": "none", "json_schema": schema}
        return request, found[0]["name"]


def _from_functions(functions: Any, call: Any) -> dict[str, Any]:
    """Tools and their choice for the functions of OpenAI's earlier API; nothing without any."""
    if functions is None:
        return {}
    tools = [{"type": "function", "function": function} for function in functions]
    if isinstance(call, Mapping):
        call = {"type": "function", "function": {"name": call.get("name")}}
    return {"tools": tools, "tool_choice": call}


def _is_special(value: Any) -> bool:
    """Whether this is a number that JSON lacks; a NumPy scalar is one, too."""
    return not isinstance(value, int | str | list | dict) and not (
        isinstance(value, float) and isfinite(value)
    )


def _budget(tokens: Any) -> int:
    if tokens is None:
        return UNLIMITED
    where = "reasoning_budget_tokens"
    if isinstance(tokens, bool) or not isinstance(tokens, int | float):
        raise MessagesError(
            f"{where}: expected a number, found {json.dumps(tokens, default=str):.80}"
        )
    if not -1 <= tokens < 2**31:
        raise MessagesError(
            f"{where}: expected a number of tokens, or -1 for no limit, found {tokens}"
        )
    return int(tokens)
