"""Mistakes in the arguments of a completion, each said in one sentence."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from ..errors import NativeError
from ..runtime import llama_cpp
from .chat_layer import AnswerSampling

_NUMBERS = (
    *("max_tokens", "temperature", "top_p", "min_p", "typical_p", "top_k", "seed", "logprobs"),
    *("presence_penalty", "frequency_penalty", "repeat_penalty"),
)


def check_completion(arguments: Mapping[str, Any]) -> None:
    """NativeError for arguments of `create_completion` that llama_cpp would fail on, or ignore."""
    prompt = arguments["prompt"]
    if not isinstance(prompt, str) and not _is_list(prompt, Integral):
        _refuse("prompt", "one text, or the tokens of one in a list", prompt)
    for name in _NUMBERS:
        if not isinstance(value := arguments.get(name), Real | None):
            _refuse(name, "a number", value)
    if (logprobs := arguments.get("logprobs")) is not None and logprobs < 0:
        _refuse("logprobs", "0 or more", logprobs)
    biases = arguments.get("logit_bias")
    if biases is not None and not (
        isinstance(biases, Mapping) and all(isinstance(bias, Real) for bias in biases.values())
    ):
        _refuse("logit_bias", "numbers by token", biases)
    stop = arguments.get("stop")
    if not isinstance(stop, str | None) and not _is_list(stop, str):
        _refuse("stop", "text or a list of texts", stop)
    grammar = arguments.get("grammar")
    if not isinstance(grammar, llama_cpp.llama_grammar.LlamaGrammar | AnswerSampling | None):
        _refuse("grammar", "a LlamaGrammar", grammar)


def _is_list(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _refuse(name: str, expected: str, found: Any) -> None:
    raise NativeError(f"{name}: expected {expected}, found {found!r:.80}")
