"""Tool calls and thinking of MTPLlama, as the openai package reads them, at depths 0 and 3.

The demo model has never seen a tool. As in tests/server/test_tool_calls.py the first token of a
call is lifted; the grammar holds the model to the call's form from there on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_cpp.llama_grammar import LlamaGrammar

from mtp_gguf.native import MessagesError, MTPLlama, NativeError
from support.generation import load
from support.models import DEMO, Models
from support.tools import OPEN_PATH, SET_FLAGS, TEMPLATE

openai = pytest.importorskip("openai")

NAMED = {"type": "function", "function": {"name": "set_flags"}}
ASKED: list[Any] = [{"role": "user", "content": "Open the path."}]
CALL = "<tool_call>"


@pytest.fixture(scope="module")
def model(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(DEMO, tmp_path_factory.mktemp("tools") / "demo")
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return models.gguf(folder, "F32", "F32")


@pytest.fixture(scope="module", params=[0, 3], ids="depth-{}".format)
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[MTPLlama]:
    with load(model, n_ctx=2048, depth=request.param) as llm:
        yield llm


def ask(llm: MTPLlama, *, lift: bool = True, **options: Any) -> Any:
    (token,) = llm.tokenize(CALL.encode(), add_bos=False, special=True)
    given: dict[str, Any] = {"tools": [OPEN_PATH, SET_FLAGS], "temperature": 0, "max_tokens": 256}
    given |= {"parallel_tool_calls": False} | ({"logit_bias": {token: 100}} if lift else {})
    return llm.create_chat_completion(ASKED, **{**given, **options})


def whole(llm: MTPLlama, **options: Any) -> Any:
    return openai.types.chat.ChatCompletion.model_validate(ask(llm, **options)).choices[0]


def streamed(llm: MTPLlama, **options: Any) -> Any:
    """The answer that the openai package puts together of a stream."""
    from openai.lib.streaming.chat import ChatCompletionStreamState  # noqa: PLC0415

    state = ChatCompletionStreamState()
    for chunk in ask(llm, stream=True, **options):
        state.handle_chunk(openai.types.chat.ChatCompletionChunk.model_validate(chunk))
    return state.current_completion_snapshot.choices[0]


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls or []
    ]


@pytest.mark.parametrize("answer", [whole, streamed])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED, None], ids=str)
def test_calls(llm: MTPLlama, choice: Any, answer: Any) -> None:
    found = answer(llm, tool_choice=choice)
    assert found.finish_reason == "tool_calls"
    assert not found.message.content
    (call,) = found.message.tool_calls
    assert (call.type, call.id[:5]) == ("function", "call_")
    ((name, values),) = calls_of(found)
    if choice == NAMED:
        assert name == "set_flags"
    if name == "set_flags":
        assert set(values["flags"]) <= {"r", "w"}
        assert 2 <= len(values["flags"]) <= 3
    else:
        assert values.keys() == {"place", "write"}


def test_several_calls(llm: MTPLlama) -> None:
    """The last one is cut off."""
    options = {"parallel_tool_calls": True, "max_tokens": 120}
    found, again = whole(llm, **options), streamed(llm, **options)
    assert len(found.message.tool_calls) > 1
    assert len({call.id for call in found.message.tool_calls}) == len(found.message.tool_calls)
    for one, other in zip(found.message.tool_calls, again.message.tool_calls, strict=True):
        assert one.function.name == other.function.name
        assert one.function.arguments == other.function.arguments


def test_no_call_is_read_if_none_is_allowed(llm: MTPLlama) -> None:
    for answer in (whole, streamed):
        found = answer(llm, tool_choice="none", lift=False, max_tokens=8)
        assert found.message.content
        assert not found.message.tool_calls
        assert found.finish_reason == "length"


@pytest.mark.thorough
@pytest.mark.sample(1)
def test_a_call_that_is_cut_off(llm: MTPLlama) -> None:
    """Wherever it is cut off, the answer is read, and its reason is the length."""
    tokens = ask(llm)["usage"]["completion_tokens"]
    complete = calls_of(whole(llm))
    for most in range(1, tokens, 5):
        answer = ask(llm, max_tokens=most)
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls") or []:
            assert call["function"]["name"] == complete[0][0]
    assert calls_of(whole(llm)) == complete


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"grammar": "x"}, "tools: expected no grammar beside it, found one"),
        ({"tool_choice": "any"}, 'tool_choice: expected "none", "auto", "required" or one'),
        ({"chat_template": 5}, "chat_template: expected text, found 5"),
        ({"reasoning_format": 5}, "reasoning_format: expected text, found 5"),
        ({"reasoning_budget_tokens": -2}, "reasoning_budget_tokens: expected a number of tokens"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs: expected an object, found 5"),
        (
            {"chat_template": "{{ messages[0].content }}", "tool_choice": "required"},
            'tool_choice: expected "none", "auto" or a function by name, because the chat template',
        ),
    ],
)
def test_mistakes(llm: MTPLlama, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((MessagesError, NativeError)) as caught:
        ask(llm, **options)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("answer", [whole, streamed])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
def test_templates_without_calls(llm: MTPLlama, choice: Any, answer: Any) -> None:
    """The answer is the arguments of the only function that may be called."""
    plain = "{{ messages[0].content }}"
    found = answer(llm, tools=[SET_FLAGS], tool_choice=choice, chat_template=plain, lift=False)
    assert found.finish_reason == "tool_calls"
    ((name, values),) = calls_of(found)
    assert name == "set_flags"
    assert set(values["flags"]) <= {"r", "w"}


def test_a_text_that_ends_the_answers_of_a_family(llm: MTPLlama) -> None:
    """Models of Laguna can spell the end of their turn, which is no token then."""
    spelled = LlamaGrammar.from_string('root ::= "yes</assistant>no"', verbose=False)
    laguna = "{# laguna_glm_thinking #}{{ messages[0].content }}"
    for answer in (whole, streamed):
        found = answer(llm, chat_template=laguna, grammar=spelled, tools=None, lift=False)
        assert (found.message.content, found.finish_reason) == ("yes", "stop")


def test_tokens_are_counted_without_generating(llm: MTPLlama) -> None:
    for options in ({}, {"tools": [OPEN_PATH]}, {"tools": [OPEN_PATH, SET_FLAGS]}):
        used = llm.create_chat_completion(ASKED, max_tokens=1, **options)["usage"]
        before = llm.n_tokens
        assert llm.count_chat_tokens(ASKED, **options) == used["prompt_tokens"]
        assert llm.n_tokens == before


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize("answer", [whole, streamed])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_ends_thinking(llm: MTPLlama, budget: int, answer: Any) -> None:
    """The demo model never ends its thinking by itself; what follows is the answer."""
    options: Any = {"chat_template": THINKING, "tools": None, "lift": False, "max_tokens": 24}
    endless = answer(llm, **options)
    assert endless.message.reasoning_content
    assert not endless.message.content
    found = answer(llm, reasoning_budget_tokens=budget, reasoning_budget_message=" So:", **options)
    thoughts = found.message.reasoning_content
    assert thoughts.endswith(" So:")
    assert endless.message.reasoning_content.startswith(thoughts.removesuffix(" So:"))
    assert found.message.content
    none = answer(llm, chat_template_kwargs={"enable_thinking": False}, **options)
    assert not getattr(none.message, "reasoning_content", None)
    effort = answer(llm, reasoning_effort="none", **options)
    assert effort.message.content == none.message.content
    inline = answer(llm, reasoning_format="none", **options)
    assert endless.message.reasoning_content in inline.message.content


def test_depth_changes_nothing(model: Path) -> None:
    """The same answers with and without drafts: calls, several calls, and after a budget."""
    seen = []
    for depth in (0, 3):
        with load(model, n_ctx=2048, depth=depth) as llm:
            thinking: Any = {"chat_template": THINKING, "tools": None, "lift": False}
            found = [
                ask(llm),
                ask(llm, parallel_tool_calls=True, max_tokens=60),
                ask(llm, **thinking, reasoning_budget_tokens=7, max_tokens=64),
            ]
            for answer in found:
                for call in answer["choices"][0]["message"].get("tool_calls") or []:
                    del call["id"]
            seen.append([answer["choices"][0] for answer in found])
    assert seen[0] == seen[1]
