"""llama.cpp's chat layer from Python: formats of families, hostile templates and answers."""

from __future__ import annotations

import gc
import json
from functools import cache
from typing import Any

import pytest

from mtp_gguf.native import MessagesError, ModelRefusedError
from mtp_gguf.native.chat import chat_layer
from mtp_gguf.native.chat.chat_answer import ChatAnswer
from mtp_gguf.native.chat.chat_layer import AnswerReader, ChatTemplate, Rendered
from mtp_gguf.server.upstream_source import llama_cpp_source
from support.hostile_templates import HOSTILE

USER = {"role": "user", "content": "How warm is it?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
ARGUMENTS = {"city": "Bonn", "days": 2}
_QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>"
)
_JSON = json.dumps({"name": "weather", "arguments": ARGUMENTS})
# A template of llama.cpp's tests, the thinking that it begins with, and a call as the family writes
# it: after thinking, text, and another call.
FAMILIES: dict[str, tuple[str, str, str]] = {
    "Qwen3.5-4B": ("Hm.\n</think>\n\n", "Let me see.\n\n", _QWEN),
    "Qwen3-Coder": ("", "Let me see.\n\n", _QWEN),
    "Qwen-Qwen3-0.6B": (
        "<think>\nHm.\n</think>\n\n",
        "Let me see.\n",
        f"<tool_call>\n{_JSON}\n</tool_call>",
    ),
    "GLM-4.6": (
        "\n<think>Hm.</think>\n",
        "Let me see.\n",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("Hm.\n</think>\n", "Let me see.\n", _QWEN),
}
GPT_OSS = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.weather <|constrain|>json<|message|>{json.dumps(ARGUMENTS)}"
)


@cache
def template(name: str) -> ChatTemplate:
    path = llama_cpp_source() / "models" / "templates" / f"{name}.jinja"
    return ChatTemplate(path.read_text(encoding="utf-8"))


def rendered(name: str, **options: Any) -> Rendered:
    return template(name).render({"messages": [USER], "tools": [WEATHER], **options})


def read(conversation: Rendered, text: str, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message of a text, and the one that its deltas make, with `size` characters at a time."""
    answer = ChatAnswer(conversation)
    made: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    for at, part in enumerate([*parts, ""]):
        for delta in answer.add(part, is_last=at == len(parts)):
            for key in ("content", "reasoning_content"):
                made[key] += delta.get(key, "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(made["tool_calls"]):
                    made["tool_calls"].append({"id": call["id"], "name": "", "arguments": ""})
                for key, value in call["function"].items():
                    made["tool_calls"][call["index"]][key] += value
    return answer.message, made


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call.get("function", call) for call in message.get("tool_calls", ())]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_families(name: str, size: int) -> None:
    """Thinking, a text and two calls; streamed in parts of any size."""
    thought, text, call = FAMILIES[name]
    message, made = read(rendered(name), thought + text + call + "\n" + call, size)
    for found in (message, made):
        assert (found.get("reasoning_content") or "").strip() == ("Hm." if thought else "")
        assert found["content"].strip() == "Let me see."
        assert calls_of(found) == [("weather", ARGUMENTS)] * 2
    assert [call["id"] for call in message["tool_calls"]] == [c["id"] for c in made["tool_calls"]]


@pytest.mark.parametrize("size", [1, 1000])
def test_gpt_oss(size: int) -> None:
    message, made = read(rendered("openai-gpt-oss-120b"), GPT_OSS, size)
    for found in (message, made):
        assert found["reasoning_content"] == "Hm."
        assert calls_of(found) == [("weather", ARGUMENTS)]


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_that_are_cut_off(name: str) -> None:
    """Wherever an answer ends, it is read, and nothing of it is read as something else."""
    thought, text, call = FAMILIES[name]
    whole = thought + text + call
    conversation = rendered(name)
    for end in range(0, len(whole), 3):
        message, _ = read(conversation, whole[:end], 1000)
        for found in message.get("tool_calls", ()):
            assert found["function"]["name"] == "weather"
        if end > len(thought + text):
            assert message["content"].strip().startswith("Let me see.")


def test_thinking_within_the_content() -> None:
    thought, text, call = FAMILIES["Qwen3.5-4B"]
    conversation = rendered("Qwen3.5-4B", reasoning_format="none")
    message, _ = read(conversation, thought + text + call, 1000)
    assert "Hm.\n</think>" in message["content"]
    assert "reasoning_content" not in message


def test_what_is_in_no_format_is_the_content() -> None:
    message, _ = read(rendered("openai-gpt-oss-120b"), "<|channel|><|channel|>x", 1000)
    assert "x" in message["content"]


def test_a_choice_is_in_the_grammar() -> None:
    other = json.loads(json.dumps(WEATHER))
    other["function"]["name"] = "clock"
    tools = [WEATHER, other]
    auto = rendered("Qwen3.5-4B", tools=tools)
    named = rendered("Qwen3.5-4B", tools=tools, tool_choice=other)
    none = rendered("Qwen3.5-4B", tools=tools, tool_choice="none")
    assert "weather" in auto.text
    assert "weather" not in json.loads(named.text)["grammar"]
    assert (auto.has_grammar, named.has_grammar, none.has_grammar) == (True, True, False)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates(name: str) -> None:
    """A sentence, and not a crash, an endless loop or all of the memory."""
    with pytest.raises((ModelRefusedError, MessagesError)) as caught:
        ChatTemplate(HOSTILE[name]).render({"messages": [USER]})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_hostile_messages() -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    chat = template("Qwen3.5-4B")
    for request in (
        {"messages": [{"role": "user", "content": deep}]},
        {"messages": [USER], "tools": [{"function": {"name": "f", "parameters": {"a": deep}}}]},
        {"messages": [USER], "json_schema": {"a": deep}},
        {"messages": [USER], "chat_template_kwargs": {"a": deep}},
        {"messages": [USER], "reasoning_effort": 5},
        {"messages": [USER], "reasoning_format": "loud"},
        {"messages": [USER, {"role": "user", "content": "\0\ud800"}], "tool_choice": deep},
    ):
        with pytest.raises(MessagesError) as caught:
            chat.render(request)
        assert "\n" not in str(caught.value)
    assert "a\0b" in chat.render({"messages": [{"role": "user", "content": "a\0b"}]}).prompt


def test_deep_answers() -> None:
    """A model may open as many brackets as its answer has room for."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    conversation = template("Qwen-Qwen3-0.6B").render({"messages": [USER], "tools": [tool]})
    deep = '<tool_call>\n{"name": "f", "arguments": {"a": ' + "[" * 200_000
    message, _ = read(conversation, deep, 1_000_000)
    assert message["role"] == "assistant"


def test_readers_are_independent() -> None:
    conversation = rendered("Qwen3.5-4B")
    one, other = AnswerReader(conversation), AnswerReader(conversation)
    one.add("a", is_last=False)
    assert other.add("b", is_last=False)[0]["reasoning_content"] == "b"
    assert one.add("c", is_last=False)[0]["reasoning_content"] == "ac"


def test_objects_outlive_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a program, Python may set a module's names to None before it frees objects."""
    chat = ChatTemplate("{{ messages[0].content }}")
    reader = AnswerReader(chat.render({"messages": [USER]}))
    monkeypatch.setattr(chat_layer, "_library", None)
    del chat, reader  # an exception would be a warning of pytest's
    gc.collect()
