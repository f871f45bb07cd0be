"""llama_cpp's own server over MTPLlama: the requests that its clients send."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest

from mtp_gguf.native import MTPLlama
from mtp_gguf.native.runtime import llama_cpp
from support.models import Dial
from support.schemas import check

if TYPE_CHECKING:
    from pathlib import Path

# What llama-cpp-python[server] brings.
NEEDED = ("fastapi", "starlette_context", "sse_starlette")
if any(importlib.util.find_spec(name) is None for name in NEEDED):
    pytest.skip("needs llama-cpp-python[server]", allow_module_level=True)

PROMPT = "aha aha"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["a"],
}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}
USER: dict[str, Any] = {"role": "user", "content": PROMPT}
CHAT = "chat/completions"
BAD_CALL = {"role": "assistant", "content": None, "tool_calls": [CALL]}
BAD_SCHEMA = {"type": "json_object", "schema": {"type": "object", "not": {}}}
UNKNOWN = {"type": "function", "function": {"name": "g"}}
# Requests that are the client's mistake, and what the error begins with; llama_cpp.Llama has 500
# for them, or crashes.
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0]"),
    (CHAT, {"messages": [USER], "tools": [{}]}, "tools[0]"),
    (CHAT, {"messages": [USER], "response_format": {"type": "prose"}}, "response_format"),
    (CHAT, {"messages": [USER, BAD_CALL]}, "messages[1].tool_calls[0].function.arguments"),
    (CHAT, {"messages": [USER], "response_format": BAD_SCHEMA}, "the JSON schema at #"),
    (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": UNKNOWN}, "tool_choice"),
    ("completions", {"prompt": PROMPT, "grammar": "root ::= other"}, "grammar"),
    ("completions", {"prompt": ""}, "prompt"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [USER], "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": [USER], "top_logprobs": 3}, "top_logprobs"),
    ("completions", {"prompt": PROMPT, "max_tokens": -5}, "max_tokens"),
    ("completions", {"prompt": None}, "prompt"),
]


def mistake(response: Any) -> tuple[int, str, str, str]:
    """The status, and what the error names, begins with and is."""
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"].split(":")[0], error["type"]


def answers(path: Path, llama: type) -> dict[str, Any]:
    """What a client is told, request by request; texts and reasons alone, which do not vary."""
    from llama_cpp.server.app import create_app  # noqa: PLC0415  (slow)
    from llama_cpp.server.settings import ModelSettings, ServerSettings  # noqa: PLC0415
    from starlette.testclient import TestClient  # noqa: PLC0415

    settings = ModelSettings(
        model=str(path), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False
    )
    out: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_cpp, "Llama", llama)  # what docs/native.md says
        app = create_app(server_settings=ServerSettings(), model_settings=[settings])
        client = TestClient(app)

        def post(name: str, route: str, **body: Any) -> None:
            response = client.post(
                f"/v1/{route}", json={"temperature": 0, "max_tokens": 24, **body}
            )
            assert response.status_code == 200, response.text
            if body.get("stream"):
                lines = [x[6:] for x in response.text.splitlines() if x.startswith("data: ")]
                assert lines[-1] == "[DONE]"
                choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
                texts = [c.get("text") or c.get("delta", {}).get("content") or "" for c in choices]
                out[name] = ("".join(texts), choices[-1]["finish_reason"])
            else:
                out[name] = response.json()["choices"]

        messages = [USER]
        post("completion", "completions", prompt=PROMPT)
        post("stream", "completions", prompt=PROMPT, stream=True)
        post("stop", "completions", prompt=PROMPT, stop=out["stream"][0][4:6])
        post("logprobs", "completions", prompt=PROMPT, logprobs=2)
        post("chat", "chat/completions", messages=messages)
        post("chat stream", "chat/completions", messages=messages, stream=True)
        post(
            "schema",
            "chat/completions",
            messages=messages,
            response_format={"type": "json_object", "schema": SCHEMA},
        )
        post("grammar", "completions", prompt=PROMPT, grammar='root ::= [a-c]+ "!"')
        out["models"] = [m["id"] for m in client.get("/v1/models").json()["data"]]
        bad = client.post("/v1/completions", json={"prompt": PROMPT * 200, "max_tokens": 4})
        out["too long"] = bad.status_code, "context window" in bad.text
        post("after", "completions", prompt=PROMPT)
        if issubclass(llama, MTPLlama):
            out["mistakes"] = [mistake(client.post(f"/v1/{r}", json=b)) for r, b, _ in MISTAKES]
            forced = {"messages": messages, "tools": [TOOL], "tool_choice": NAMED}
            post("forced", "chat/completions", **forced)
            post("after mistakes", "completions", prompt=PROMPT)
            assert out["after mistakes"] == out["after"]
    return out


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of anyio's streams
def test_clients_are_told_the_same(dial: Dial) -> None:
    loaded: list[MTPLlama] = []

    class Kept(MTPLlama):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "depth": 3})
            loaded.append(self)

    theirs = answers(dial("tiny"), llama_cpp.Llama)
    ours = answers(dial("tiny"), Kept)
    for name in theirs:
        if name in ("logprobs", "schema"):
            continue
        assert ours[name] == theirs[name], name
    for got, want in zip(ours["logprobs"], theirs["logprobs"], strict=True):
        assert got["text"] == want["text"]
        assert got["logprobs"]["tokens"] == want["logprobs"]["tokens"]
        assert got["logprobs"]["token_logprobs"] == pytest.approx(
            want["logprobs"]["token_logprobs"], abs=0.05
        )
    for found, (*_, begins) in zip(ours["mistakes"], MISTAKES, strict=True):
        param = "response_format" if "schema" in begins else begins.partition("[")[0]
        assert found == (400, param, begins, "invalid_request_error")
    (call,) = ours["forced"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    check(call["function"]["arguments"], SCHEMA)
    check(ours["schema"][0]["message"]["content"], SCHEMA)  # theirs ignores the bounds
    assert loaded[0].mtp_stats.tokens_per_cycle > 1.2  # drafts were accepted on the way
    loaded[0].close()
