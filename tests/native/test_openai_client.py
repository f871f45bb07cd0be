"""The openai package over llama_cpp's own server with MTPLlama, at loopback."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from support.models import Dial
from support.python_server import python_server

NEEDED = ("openai", "fastapi", "starlette_context", "sse_starlette")
if any(importlib.util.find_spec(name) is None for name in NEEDED):
    pytest.skip("needs openai and llama-cpp-python[server]", allow_module_level=True)

import openai  # noqa: E402


class Ticket(BaseModel):
    area: Literal["server", "converter"]
    urgent: bool


TOOL: Any = openai.pydantic_function_tool(Ticket, name="file_ticket")
NAMED: Any = {"type": "function", "function": {"name": "file_ticket"}}
GREEDY: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 48}
USER: Any = {"role": "user", "content": [{"type": "text", "text": "aha"}]}


@pytest.fixture(scope="module")
def client(dial: Dial, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        python_server(dial("tiny"), tmp_path_factory.mktemp("served")) as port,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60
        ) as client,
    ):
        yield client


def test_structured_output(client: Any) -> None:
    answer = client.chat.completions.parse(messages=[USER], response_format=Ticket, **GREEDY)
    assert isinstance(answer.choices[0].message.parsed, Ticket)


def test_a_round_of_an_agent(client: Any) -> None:
    """Its answer goes back as the package writes it, with null as the content beside the call."""
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, USER]
    options: Any = {"tools": [TOOL], "tool_choice": NAMED, **GREEDY}
    message = client.chat.completions.create(messages=messages, **options).choices[0].message
    (call,) = message.tool_calls or []
    assert call.type == "function"
    Ticket.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    messages += [message.model_dump(), result]
    tools: Any = {"tools": [TOOL]}
    said = client.chat.completions.create(messages=messages, **tools, **GREEDY).choices[0].message
    assert said.content
    with client.chat.completions.stream(messages=messages, **options) as stream:
        streamed = stream.get_final_completion().choices[0].message
    (again,) = streamed.tool_calls or []
    assert again.function.name == "file_ticket"
    Ticket.model_validate_json(again.function.arguments)


def test_log_probabilities(client: Any) -> None:
    options: Any = {"logprobs": True, "top_logprobs": 2, **GREEDY, "max_tokens": 8}
    whole = client.chat.completions.create(messages=[USER], **options).choices[0].logprobs
    chunks = client.chat.completions.create(messages=[USER], stream=True, **options)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert whole
    assert whole.content
    streamed = [entry for part in parts if part for entry in part.content or []]
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in whole.content]
    echoed = client.completions.create(
        prompt="aha aha", echo=True, logprobs=1, model="default", max_tokens=1, temperature=0
    ).choices[0]
    assert echoed.text.startswith("aha aha")
    assert echoed.logprobs
    assert "".join(echoed.logprobs.tokens or []) == echoed.text
