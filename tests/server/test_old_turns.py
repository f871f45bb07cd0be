"""`truncation: "auto"`: chats that outgrow the context lose their oldest turns, in both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.errors import MtpGgufError
from mtp_gguf.native import MTPLlama
from support.real_server import Server, chunks_of, opened, post
from support.tools import OPEN_PATH

pytestmark = pytest.mark.server

CONTEXT, MOST = 512, 16
ROOM = CONTEXT - MOST  # for the messages
TEMPLATE = Path(__file__).with_name("templates") / "strict.jinja"
SYSTEM = {"role": "system", "content": "Be brief."}
OPTIONS = {"truncation": "auto", "max_tokens": MOST, "temperature": 0}


def question(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"question {number}: " + "what is it? " * (number % 4)}


def turns(n: int, *, calls: bool = False) -> list[Any]:
    """A chat with n turns and another question."""
    messages: list[Any] = [SYSTEM]
    call = {"id": "1", "type": "function", "function": {"name": "open_path", "arguments": "{}"}}
    for number in range(n):
        messages.append(question(number))
        if calls:
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": f"result {number}"},
            ]
        messages.append({"role": "assistant", "content": f"answer {number}"})
    return [*messages, question(n)]


@pytest.fixture(scope="module")
def model(templated: Callable[[str], Path]) -> Path:
    return templated(TEMPLATE.read_text())


@pytest.fixture(scope="module", params=[0, 3], ids="depth-{}".format)
def python(model: Path, request: pytest.FixtureRequest) -> Iterator[MTPLlama]:
    with closing(
        MTPLlama(str(model), n_ctx=CONTEXT, n_threads=1, n_threads_batch=1, depth=request.param)
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def port(server: Server, model: Path) -> Iterator[int]:
    given = ("--ctx-size", CONTEXT, "--parallel", 1)
    with server.running(model, *given, options=["--depth", 3]) as client:
        yield client.port


def answered(port: int, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    status, found = post(port, path, body)
    assert status == 200, found
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("calls", [False, True], ids=["talk", "calls"])
@pytest.mark.parametrize("n", [0, 10, 17, 24, 40, 90])
def test_whole_turns_are_left_out(n: int, calls: bool, port: int, python: Any) -> None:
    body: dict[str, Any] = {"messages": turns(n, calls=calls), "tools": [OPEN_PATH], **OPTIONS}
    theirs, ours = answered(port, body), python.create_chat_completion(**body)
    for key in ("message", "finish_reason"):
        assert theirs["choices"][0][key] == ours["choices"][0][key]
    dropped = ours.get("dropped_messages", 0)
    assert theirs.get("dropped_messages", 0) == dropped
    length = ours["usage"]["prompt_tokens"]
    assert theirs["usage"]["prompt_tokens"] == length == python.count_chat_tokens(**body)
    assert answered(port, body, "/v1/chat/completions/input_tokens")["input_tokens"] == length
    rest = {**body, "messages": [SYSTEM, *body["messages"][1 + dropped :]]}
    del rest["truncation"]
    assert rest["messages"][1]["role"] == "user"
    assert python.count_chat_tokens(**rest) == length
    total = python.count_chat_tokens(**{**body, "truncation": "disabled"})
    assert (dropped > 0) == (total > ROOM)
    assert length <= ROOM
    if dropped:  # no more than the next quarter of the room, and the rest of a turn
        assert length > ROOM - ROOM // 4 - 80


@pytest.mark.thorough
def test_what_remains_is_in_the_cache(port: int, python: Any) -> None:
    """A growing chat loses turns seldom; in between only what is new is read."""
    for program in ("server", "python"):
        messages: list[Any] = [SYSTEM]
        dropped, read, changes = 0, [], 0
        for number in range(60):
            messages.append(question(number))
            body = {"messages": messages, **OPTIONS}
            if program == "server":
                found = answered(port, body)
                new = found["timings"]["prompt_n"]
            else:
                found = python.create_chat_completion(**body)
                new = python.prompt_reuse.tokens - python.prompt_reuse.reused
            now = found.get("dropped_messages", 0)
            assert now >= dropped
            if now == dropped:
                read.append(new)
            changes += now != dropped
            dropped = now
            answer = found["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": answer})
        assert dropped > 60
        assert changes <= 15
        assert max(read[1:]) < 100


def test_a_stream_says_it_at_its_end(port: int, python: Any) -> None:
    body = {"messages": turns(40), **OPTIONS, "stream": True}
    chunks = [*python.create_chat_completion(**body)]
    with opened(port, "/v1/chat/completions", body) as answer:
        theirs = [*chunks_of(answer)]
    wanted = python.create_chat_completion(**{**body, "stream": False})["dropped_messages"]
    for found in (chunks, theirs):
        assert [chunk.get("dropped_messages") for chunk in found[:-1]] == [None] * (len(found) - 1)
        assert found[-1]["dropped_messages"] == wanted > 0


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_other_protocols_have_it(path: str, port: int) -> None:
    messages = turns(40)[1:]
    if path == "/v1/responses":
        for message in messages[1::2]:
            message["content"] = [{"type": "output_text", "text": message["content"]}]
            message["type"] = "message"
    sent = {"input" if path == "/v1/responses" else "messages": messages}
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    found = answered(port, {**sent, most: MOST, "truncation": "auto"}, path)
    assert found["dropped_messages"] > 0
    status, refused = post(port, path, {**sent, most: MOST})
    assert status == 400
    assert "context" in refused["error"]["message"]


def test_the_last_turn_has_to_fit(port: int, python: Any) -> None:
    long = [*turns(3)[:-1], {"role": "user", "content": "what is it? " * 400}]
    for messages in (long, long[-1:]):
        body = {"messages": messages, **OPTIONS}
        status, found = post(port, "/v1/chat/completions", body)
        assert (status, found["error"]["type"]) == (400, "exceed_context_size_error")
        with pytest.raises((MtpGgufError, ValueError), match="context"):
            python.create_chat_completion(**body)


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"truncation": "maybe"}, 'truncation: expected "auto" or "disabled", found "maybe"'),
        ({"truncation": 5}, 'truncation: expected "auto" or "disabled", found 5'),
        (
            {"messages": [{"role": "user", "content": [PICTURE]}]},
            'truncation: expected "disabled" for messages with pictures or sound, found "auto"',
        ),
    ],
)
def test_what_is_refused(given: Any, sentence: str, port: int, python: Any) -> None:
    body = {"messages": turns(1), **OPTIONS, **given}
    status, found = post(port, "/v1/chat/completions", body)
    assert (status, found["error"]["message"]) == (400, sentence)
    with pytest.raises(MtpGgufError) as refused:
        python.create_chat_completion(**body)
    assert str(refused.value) == sentence
