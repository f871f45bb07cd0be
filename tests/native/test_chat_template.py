"""Conversations as OpenAI's clients send them, rendered as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.native import MessagesError, MTPLlama
from mtp_gguf.native.chat.chat_layer import ChatTemplate
from support.gguf_files import Rewrite
from support.models import DEMO, Dial

# Ways in which templates write the arguments of a call.
WAYS = {
    "items": (
        "{% for k, v in f.arguments|items %}<{{k}}={{v if v is string else v|tojson}}>{% endfor %}"
    ),
    "tojson": "{{ f.arguments | tojson }}",
    "string or tojson": "{{ f.arguments if f.arguments is string else f.arguments | tojson }}",
    "text": "{{ f.arguments }}",
    "sum": "{{ '(' + f.arguments + ')' }}",
    "tilde": "{{ '(' ~ f.arguments ~ ')' }}",
    "method": "{{ f.arguments.strip() }}",
}
TEXT_ONLY = ("text", "sum", "tilde", "method")  # templates for arguments as JSON text
ARGUMENTS = {"path": "a/ß", "lines": [1, 2], "deep": {"x": None}}


def template(arguments: str, content: str = "{{ m.content }}") -> str:
    return (
        "{% for m in messages %}[{{ m.role }}]" + content + "{% for c in m.tool_calls or [] %}"
        "{% set f = c.function %}{{ f.name }}:" + arguments + "{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )


def conversation(arguments: Any, **message: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": arguments}}
    return [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": "", "tool_calls": [call, call], **message},
        {"role": "tool", "tool_call_id": "1", "name": "read", "content": "42"},
    ]


def ours(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source).render({"messages": messages, **options}).prompt


@pytest.fixture(scope="module")
def theirs() -> Callable[..., str]:
    """transformers' rendering."""
    if find_spec("transformers") is None:
        pytest.skip("needs the `upstream` extra")
    import transformers  # noqa: PLC0415  (slow)

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)

    def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages,
                chat_template=source,
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        )

    return render


@pytest.mark.upstream
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", ["text", "object"])
def test_arguments_of_calls(way: str, given: str, theirs: Callable[..., str]) -> None:
    """Templates get the form of the arguments that they are written for."""
    text = json.dumps(ARGUMENTS, ensure_ascii=False, separators=(",", ":"))
    source = template(WAYS[way])
    want = theirs(source, conversation(text if way in TEXT_ONLY else ARGUMENTS))
    assert ours(source, conversation(text if given == "text" else ARGUMENTS)) == want


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("empty", ["", None, {}, "{}"])
def test_empty_arguments(way: str, empty: object) -> None:
    source = template(WAYS[way])
    assert ours(source, conversation(empty)) == ours(source, conversation("{}"))


def test_messages_stay_as_they_are() -> None:
    messages = conversation('{"a": 1}')
    before = json.dumps(messages)
    ours(template(WAYS["items"]), messages)
    assert json.dumps(messages) == before


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
EACH = "{% for p in m.content %}{{ p.text }}{% endfor %}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + EACH + "{% endif %}"


@pytest.mark.parametrize(
    ("content", "given", "want"),
    [
        ("{{ m.content }}", None, ""),
        ("{{ m.content + '!' }}", None, "!"),
        ("{{ m.content }}", PARTS, "a\nb"),
        ("{{ m.content + '!' }}", PARTS, "a\nb!"),
        ("{% if m.content is string %}{{ m.content }}{% endif %}", PARTS, "a\nb"),
        (EITHER, PARTS, "ab"),
        (EITHER, "ab", "ab"),
        (EACH, PARTS, "ab"),
        (EACH, "ab", "ab"),
        (EACH, None, ""),
    ],
)
def test_contents(content: str, given: Any, want: str) -> None:
    message = {"role": "user", "content": given}
    assert ours(template("", content), [message]) == f"[user]{want}[assistant]"
    if given is None:
        assert ours(template("", content), [{"role": "user"}]) == f"[user]{want}[assistant]"


def test_developers_are_the_system() -> None:
    message = {"role": "developer", "content": "x"}
    assert ours(template(""), [message]) == "[system]x[assistant]"


@pytest.mark.upstream
def test_template_for_tools(theirs: Callable[..., str]) -> None:
    plain, with_tools = "{{ messages[0].content }}", "{{ tools[0].function.name }}"
    formatter = ChatTemplate(plain, tools_template=with_tools)
    messages = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "read"}}]
    for options in ({}, {"tools": tools}):
        want = theirs(
            {"default": plain, "tool_use": with_tools}["tool_use" if options else "default"],
            messages,
            **options,
        )
        assert formatter.render({"messages": messages, **options}).prompt == want


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('The system message must be first.') }}{% elif m.role == 'robot' %}"
    "{{ raise_exception('Unexpected role.') }}{% endif %}{{ m.role + m.content }}{% endfor %}"
    "{% if messages | selectattr('role', 'eq', 'user') | list | length == 0 %}"
    "{{ raise_exception('No user message.') }}{% endif %}"
)
USER, SYSTEM = {"role": "user", "content": "x"}, {"role": "system", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], ("messages:", "a list of messages, found []")),
        ("x", ("messages:", 'a list of messages, found "x"')),
        (["x"], ("messages[0]:", "an object with a role", '"x"')),
        ([USER, {"content": "x"}], ("messages[1]:", "with a role")),
        ([USER, SYSTEM, USER], ("messages[1]:", "must be first")),
        ([USER, USER, {"role": "robot"}], ("messages[2]:", "Unexpected role.")),
        ([SYSTEM], ("messages:", "No user message.")),
        ([SYSTEM, SYSTEM], ("messages[1]:", "must be first")),
        ([{"role": "user", "content": 5}], ("messages[0].content:", "text or a list", "found 5")),
        (
            [{"role": "user", "content": ["x"]}],
            ("messages[0].content[0]:", "part of type text", 'found "x"'),
        ),
        (
            [{"role": "user", "content": [PARTS[0], {"type": "sound"}]}],
            ("messages[0].content[1]:", "part of type text", 'found "sound"'),
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            ("messages[0].content[0].text:", "expected text, found null"),
        ),
        (
            conversation("{"),
            ("messages[1].tool_calls[0].function.arguments:", "JSON object", '"{"'),
        ),
        (conversation("[1]"), ("arguments:", 'expected a JSON object, found "[1]"')),
        (conversation("[" * 100_000), ("arguments:", "expected a JSON object")),
        (conversation({1, 2}), ("messages:", "expected values of JSON", "set")),
        (conversation("{}", tool_calls=5), ("messages[1].tool_calls:", "a list of calls, found 5")),
        (conversation("{}", tool_calls=["x"]), ("messages[1].tool_calls[0]:", "with a name")),
    ],
)
def test_what_is_wrong_is_named(messages: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(MessagesError) as caught:
        ours(STRICT, messages)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_internals_of_templates_are_kept_from_clients() -> None:
    with pytest.raises(MessagesError) as caught:
        ours("{{ messages[0].content.none() }}", [USER])
    assert str(caught.value) == (
        "messages: expected what the model's chat template can render, found an error in the "
        "template"
    )


def test_of_a_model(dial: Dial, rewrite: Rewrite) -> None:
    """create_chat_completion renders with the model's template, as the formatter does."""
    source = template(WAYS["items"])
    tools = template(WAYS["tojson"])
    keys = {
        "tokenizer.chat_template": Value(ValueType.STRING, source),
        "tokenizer.chat_template.tool_use": Value(ValueType.STRING, tools),
    }
    messages = conversation('{"a": 1}', content=None)
    with MTPLlama(str(rewrite(dial("tiny"), keys)), n_ctx=256, n_threads=1) as llm:

        def read(**options: Any) -> str:
            answer = llm.create_chat_completion(messages, max_tokens=1, temperature=0, **options)
            ids = llm.input_ids[: answer["usage"]["prompt_tokens"]].tolist()
            return str(llm.detokenize(ids, special=True).decode())

        assert read() == ours(source, messages)
        listed = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
        assert read(tools=listed) == ours(tools, messages)
        with pytest.raises(MessagesError, match=r"messages\[1\]\.tool_calls\[0\]"):
            llm.create_chat_completion(conversation("{"))
        assert read() == ours(source, messages)
