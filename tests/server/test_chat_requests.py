"""Requests, valid and broken: the server and MTPLlama answer them alike, never with 500.

docs/server.md lists what differs, with reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.errors import MtpGgufError
from mtp_gguf.native import MTPLlama
from support.client_requests import (
    BROKEN,
    COMPLETIONS,
    DIFFERENT,
    TOOL,
    USER,
    VALID,
    completion,
    request,
    tool,
    tools,
)
from support.real_server import Server, post
from support.same_answers import (
    EVERYWHERE,
    NO_VALUE,
    ask_python,
    ask_server,
    differing_by_row,
    rows_of_the_docs,
)

pytestmark = pytest.mark.server

TEMPLATE = Path(__file__).with_name("templates") / "strict.jinja"
ANSWERED = {name: request(given) for name, given in VALID.items()} | {
    f"completion: {name}": completion(**options) for name, options in COMPLETIONS.items()
}
NO_FORMAT = "a required call, if the chat template has no format for calls"


@pytest.fixture(scope="module")
def strict(templated: Callable[[str], Path]) -> Path:
    """The demo model with the template."""
    return templated(TEMPLATE.read_text())


@pytest.fixture(scope="module")
def python(strict: Path) -> Iterator[MTPLlama]:
    with closing(MTPLlama(str(strict), n_ctx=2048, n_threads=1, n_threads_batch=1)) as llm:
        yield llm


@pytest.fixture(scope="module")
def port(server: Server, strict: Path) -> Iterator[int]:
    with server.running(strict, options=["--depth", 3]) as client:
        yield client.port


@pytest.mark.sample(60)
@pytest.mark.parametrize("name", ANSWERED)
def test_what_is_valid_is_answered_alike(name: str, port: int, python: MTPLlama) -> None:
    body = ANSWERED[name]
    found, wanted = ask_server(port, body), ask_python(python, body)
    assert "error" not in wanted
    assert differing_by_row(found, wanted, body).get("", {}) == {}


@pytest.mark.sample(60)
@pytest.mark.parametrize("name", ANSWERED)
def test_a_stream_is_the_whole_answer_in_parts(name: str, port: int, python: MTPLlama) -> None:
    body = ANSWERED[name]
    if body.get("logprobs") and body.get("tools"):
        body = {**body, "logprobs": False, "top_logprobs": None}  # the server refuses them
    streamed = {**body, "stream": True}
    found, wanted = (
        {"choices": answer["choices"]}
        for answer in (ask_server(port, streamed), ask_python(python, streamed))
    )
    if name == "an answer to continue":  # llama.cpp b11549 streams only what it adds
        message = found["choices"][0]["message"]
        message["content"] = "def" + message["content"].removeprefix("def")
    assert differing_by_row(found, wanted, body).get("", {}) == {}
    if "continue_final_message" in body:  # both leave out what is continued
        return
    for parts, whole in ((found, ask_server(port, body)), (wanted, ask_python(python, body))):
        for choice in whole["choices"]:
            if "message" in choice:  # no text has no part
                choice["message"]["content"] = choice["message"]["content"] or None
        rows = differing_by_row(parts, {"choices": whole["choices"]}, body)
        assert rows.keys() <= {NO_VALUE}, rows


@pytest.mark.thorough
def test_each_difference_is_in_the_docs_and_exists(port: int, python: MTPLlama) -> None:
    assert {*rows_of_the_docs()} == {*EVERYWHERE, *DIFFERENT, NO_FORMAT}
    seen: set[str] = set()
    for body in ANSWERED.values():
        seen |= differing_by_row(ask_server(port, body), ask_python(python, body), body).keys()
        if seen >= {*EVERYWHERE}:
            return
    assert seen >= {*EVERYWHERE}


@pytest.mark.parametrize("row", DIFFERENT)
def test_what_is_listed_differs_in_these_fields(row: str, port: int, python: MTPLlama) -> None:
    pattern, requests = DIFFERENT[row]
    for given in requests:
        body = given if "prompt" in given else request({"messages": [USER], **given})
        found, wanted = ask_server(port, body), ask_python(python, body)
        differ = differing_by_row(found, wanted, body).get("")
        assert differ, body
        assert [place for place in differ if not re.fullmatch(pattern, place)] == []


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_with_the_same_sentence(
    name: str, port: int, python: MTPLlama
) -> None:
    given, sentence = BROKEN[name]
    body = request(given)
    status, found = post(port, "/v1/chat/completions", body)
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")
    assert found["error"]["message"].startswith(sentence)
    assert len(found["error"]["message"]) < 300
    with pytest.raises(MtpGgufError) as refused:
        python.create_chat_completion(**body)
    assert str(refused.value) == found["error"]["message"]


def test_templates_without_a_format_for_calls(
    server: Server, strict: Path, python: MTPLlama, tmp_path: Path
) -> None:
    """NO_FORMAT"""
    plain = tmp_path / "plain.jinja"
    plain.write_text("{{ messages[0].content }}")
    body = request(tools(TOOL, tool_choice="required"))
    with server.running(strict, "--chat-template-file", plain) as client:
        found = ask_server(client.port, body)
    wanted = ask_python(python, {**body, "chat_template": plain.read_text()})
    assert found["choices"][0]["message"]["content"]
    assert "tool_calls" not in found["choices"][0]["message"]
    (call,) = wanted["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "f"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses"])
def test_other_protocols_are_refused_alike(path: str, port: int) -> None:
    messages = [{"role": "wizard", "content": "x"}]
    body = {"messages": messages, "input": messages, "max_tokens": 4}
    status, found = post(port, path, body)
    assert status == 400, found
    assert "Jinja" not in found["error"]["message"]


def test_the_function_that_is_chosen_is_the_one_that_is_called(port: int) -> None:
    """Of two tools only the chosen one is in the grammar of the answer."""
    given = [tool(name=name, parameters={"type": "object", "properties": {}}) for name in "fg"]
    body = tools(*given, tool_choice={"type": "function", "function": {"name": "g"}})
    status, found = post(port, "/apply-template", body)
    assert status == 200
    assert "<tool>g</tool>" in found["prompt"]
    assert "<tool>f</tool>" not in found["prompt"]
