"""Answers that must call a function, as the openai package reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from mtp_gguf.native import MTPLlama, NativeError
from mtp_gguf.native.tool_calls import ForcedCall, forced_call
from support.models import Dial
from support.schemas import check

AREA = {
    "type": "object",
    "properties": {
        "area": {"enum": ["server", "converter"]},
        "level": {"type": "integer", "minimum": 3, "maximum": 5},
    },
    "required": ["area", "level"],
    "additionalProperties": False,
}
FILE = {"type": "function", "function": {"name": "file_ticket", "parameters": AREA}}
READ = {"type": "function", "function": {"name": "read"}}
MESSAGES: Any = [{"role": "user", "content": "aha"}]
NAMED = {"type": "function", "function": {"name": "file_ticket"}}


@pytest.fixture(scope="module", params=[0, 3], ids="depth-{}".format)
def llm(dial: Dial, request: pytest.FixtureRequest) -> Iterator[MTPLlama]:
    with closing(MTPLlama(str(dial("tiny")), n_ctx=256, n_threads=1, depth=request.param)) as llm:
        yield llm


def ask(llm: MTPLlama, **options: Any) -> Any:
    given = {"tools": [FILE, READ], "tool_choice": NAMED, "temperature": 0, "max_tokens": 64}
    return llm.create_chat_completion(MESSAGES, **{**given, **options})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"tools": [FILE], "tool_choice": "required"}, {"temperature": 1.0, "seed": 2}],
    ids=str,
)
def test_calls(llm: MTPLlama, options: dict[str, Any], stream: bool) -> None:
    openai = pytest.importorskip("openai")
    if stream:
        from openai.lib.streaming.chat import ChatCompletionStreamState  # noqa: PLC0415

        state = ChatCompletionStreamState()
        names = []
        for chunk in ask(llm, stream=True, **options):
            state.handle_chunk(openai.types.chat.ChatCompletionChunk.model_validate(chunk))
            for call in chunk["choices"][0]["delta"].get("tool_calls") or []:
                names.append(call["function"].get("name"))
        assert names[0] == "file_ticket"
        assert not any(names[1:])  # clients put the pieces of names together, too
        answer = state.get_final_completion()
    else:
        answer = openai.types.chat.ChatCompletion.model_validate(ask(llm, **options))
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert (call.type, call.function.name) == ("function", "file_ticket")
    assert call.id.startswith("call_")
    check(call.function.arguments, AREA)


def test_a_call_that_is_cut_off(llm: MTPLlama) -> None:
    for stream in (False, True):
        answer = ask(llm, max_tokens=3, stream=stream)
        choice = (list(answer)[-1] if stream else answer)["choices"][0]
        assert choice["finish_reason"] == "length"


def test_a_function_without_parameters(llm: MTPLlama) -> None:
    answer = ask(llm, tool_choice={"type": "function", "function": {"name": "read"}})
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {}


def test_other_choices_are_the_models(llm: MTPLlama) -> None:
    for choice in (None, "auto", "none"):
        message = ask(llm, tool_choice=choice, max_tokens=4)["choices"][0]["message"]
        assert message["content"]
        assert "tool_calls" not in message


@pytest.mark.parametrize(
    "parameters",
    [{"type": "object", "not": {"type": "null"}}, {"type": "nonsense"}, {"$ref": "#/none"}],
)
def test_schemas_that_a_grammar_cannot_express(parameters: dict[str, Any]) -> None:
    """They are llama_cpp's, or any object's."""
    assert "root ::=" in ForcedCall("f", parameters).grammar()


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        (5, None, r"tools: expected a list of tools, found 5"),
        (["x"], None, r"tools\[0\]: expected a function with a name, found 'x'"),
        ([{"function": {"name": "f", "parameters": 5}}], None, r"tools\[0\].function.parameters"),
        ([FILE], {"function": {"name": "g"}}, r"tool_choice: .*the tools \(file_ticket\), found"),
        ([FILE], "any", r"tool_choice: expected .*found 'any'"),
        (None, "required", r"tool_choice: .*\(there are none\), found 'required'"),
        ([FILE, READ], "required", r"tool_choice: expected .*; name one"),
        ([FILE], {"function": 5}, r"tool_choice: expected"),
    ],
)
def test_mistakes(tools: Any, choice: Any, words: str) -> None:
    with pytest.raises(NativeError, match=words):
        forced_call(tools, choice)


def test_a_grammar_beside_a_call_is_refused(llm: MTPLlama) -> None:
    for name in ("grammar", "response_format"):
        with pytest.raises(NativeError, match=f"tool_choice: expected no {name}"):
            ask(llm, **{name: {"type": "json_object"}})


def test_formats_that_read_calls_are_llama_cpps(dial: Dial) -> None:
    options: Any = {"n_ctx": 512, "n_threads": 1, "chat_format": "chatml-function-calling"}
    with closing(MTPLlama(str(dial("tiny")), **options)) as llm:
        assert "function_call" in ask(llm)["choices"][0]["message"]
