"""A real client against a real server with our patches: drafting changes no call and no answer.

The demo model has never seen a tool. llama-server's grammar lets it talk for as long as it likes
before a call, `tool_choice="required"` or not, and holds it to the call's form from its first token
on. So the tests lift that token with the client's `logit_bias`; what follows is the model's own
choice within the grammar. The form is that of Qwen3.5, in a template beside this file. It leaves
strings free, so these tools take none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from support.models import Files
from support.real_server import DEPTH, Server, post
from support.schemas import check
from support.tools import OPEN_PATH, SET_FLAGS, TEMPLATE

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.server


class Ticket(BaseModel):
    crash: bool
    urgent: bool


def check_call(name: str, arguments: str, tools: list[dict[str, Any]]) -> None:
    """A call of one of the tools, its arguments JSON of that one's schema and no others."""
    (schema,) = [t["function"]["parameters"] for t in tools if t["function"]["name"] == name]
    check(arguments, schema)
    assert json.loads(arguments).keys() == schema["properties"].keys()


class Caller:
    """Asks the model for calls; `drafted` counts the tokens that were drafted for it."""

    def __init__(self, client: Any, call_token: int) -> None:
        self._client = client
        self._bias = {str(call_token): 100}
        self.drafted = 0

    def ask(self, messages: list[Any], **more: Any) -> Any:
        return self._client.chat.completions.create(
            model="demo", messages=messages, temperature=0, max_tokens=512, **more
        )

    def call(self, tools: list[Any], choice: Any, messages: list[Any]) -> tuple[str, str]:
        """Name and arguments of the one call that the model answers with, streamed or not."""
        request: dict[str, Any] = {"tools": tools, "tool_choice": choice, "logit_bias": self._bias}
        request["parallel_tool_calls"] = False  # the lifted token would begin another, and another
        answer = self.ask(messages, **request)
        self.drafted += answer.timings.get("draft_n", 0)
        assert answer.choices[0].finish_reason == "tool_calls"
        assert not answer.choices[0].message.content
        (call,) = answer.choices[0].message.tool_calls
        assert call.id
        whole = call.function.name, call.function.arguments
        assert self._streamed(messages, request) == whole
        return whole

    def several(self, tools: list[Any], messages: list[Any]) -> list[tuple[str, str]]:
        """Names and arguments of the complete calls of an answer; the last one is cut off."""
        asked: Any = {"tools": tools, "parallel_tool_calls": True, "logit_bias": self._bias}
        calls = self.ask(messages, **asked).choices[0].message.tool_calls
        assert len({call.id for call in calls}) == len(calls)
        return [(call.function.name, call.function.arguments) for call in calls[:-1]]

    def structured(self, messages: list[Any]) -> Ticket:
        """An answer in the schema of a pydantic model."""
        asked: Any = {"model": "demo", "temperature": 0, "max_tokens": 512}
        parsed = self._client.chat.completions.parse(
            messages=messages, response_format=Ticket, **asked
        )
        ticket: Ticket = parsed.choices[0].message.parsed
        return ticket

    def response(self, messages: list[Any]) -> str:
        """The text of an answer of the Responses API, streamed or not."""
        asked = {"model": "demo", "input": messages, "temperature": 0, "max_output_tokens": 16}
        whole: str = self._client.responses.create(**asked).output_text
        events = self._client.responses.create(**asked, stream=True)
        kind = "response.output_text.delta"
        assert "".join(event.delta for event in events if event.type == kind) == whole
        return whole

    def _streamed(self, messages: list[Any], request: dict[str, Any]) -> tuple[str, str]:
        chunks = [c.choices[0] for c in self.ask(messages, stream=True, **request) if c.choices]
        assert chunks[-1].finish_reason == "tool_calls"
        deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or []]
        assert {delta.index for delta in deltas} == {0}
        assert len(deltas) > 2  # it does come in pieces
        name = "".join(delta.function.name or "" for delta in deltas)
        return name, "".join(delta.function.arguments or "" for delta in deltas)


@contextmanager
def calling(server: Server, model: Path, options: list[object]) -> Iterator[Caller]:
    """A client of a server that knows the template with tools."""
    template = ("--jinja", "--chat-template-file", TEMPLATE)
    with (
        server.running(model, *template, options=options) as running,
        openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none") as client,
    ):
        body = {"content": "<tool_call>", "parse_special": True}
        (token,) = post(running.port, "/tokenize", body)[1]["tokens"]
        yield Caller(client, token)


def conversation(caller: Caller) -> list[Any]:
    """Calls of one and of several tools, and the text that follows an answered call."""
    question = [{"role": "user", "content": "Open the path."}]
    seen: list[Any] = []
    for tools, choice in (([OPEN_PATH], "required"), ([OPEN_PATH, SET_FLAGS], "auto")):
        seen.append(caller.call(tools, choice, question))
        name, arguments = seen[-1]
        check_call(name, arguments, tools)
    name, arguments = seen[0]
    function = {"name": name, "arguments": arguments}
    answered = [
        *question,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "No such file or directory."},
    ]
    text = caller.ask(answered, tools=[OPEN_PATH], tool_choice="none").choices[0].message
    assert text.content
    assert not text.tool_calls
    return [*seen, text.content]


QUESTIONS = ["What does os.path.join do?", "Write a function that adds two numbers.", "Hello!"]


def chats(caller: Caller) -> list[Any]:
    """Answers to chats, streamed or not."""
    seen: list[Any] = []
    for question in QUESTIONS:
        asked = [{"role": "user", "content": question}]
        whole = caller.ask(asked).choices[0].message.content
        parts = [chunk.choices for chunk in caller.ask(asked, stream=True)]
        assert whole == "".join(c.delta.content or "" for choices in parts for c in choices)
        seen.append(whole)
    with pytest.raises(openai.BadRequestError):
        caller.ask(asked, response_format={"type": "no such format"})
    return seen


def other_answers(caller: Caller) -> list[Any]:
    """A function by name, several calls at once, structured output, and the Responses API."""
    question = [{"role": "user", "content": "Open the path."}]
    tools = [OPEN_PATH, SET_FLAGS]
    named = caller.call(tools, {"type": "function", "function": {"name": "set_flags"}}, question)
    assert named[0] == "set_flags"
    several = caller.several(tools, question)
    assert len(several) > 1
    for name, arguments in [named, *several]:
        check_call(name, arguments, tools)
    response = caller.response(question)
    assert response == caller.ask(question).choices[0].message.content[: len(response)]
    return [named, several, caller.structured(question), response]


@pytest.mark.thorough
def test_a_client_gets_the_tool_calls_that_it_gets_without_drafting(
    server: Server, files: Files
) -> None:
    model = files("ids", "demo")
    with calling(server, model, ["--no-draft"]) as caller:
        want = conversation(caller), other_answers(caller), chats(caller)
        assert caller.drafted == 0
    with calling(server, model, ["--spec-draft-n-max", DEPTH]) as caller:
        assert (conversation(caller), other_answers(caller), chats(caller)) == want
        assert caller.drafted > 8
