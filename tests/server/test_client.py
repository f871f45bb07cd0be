"""A real client against a real server with our patches: drafting changes no answer.

The demo model knows next to nothing, so the answers mean little; what is shown is that they come,
in the form that was asked for, and are those of a server that does not draft.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.models import Files
from support.real_server import DEPTH, Server

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.server

QUESTIONS = ["What does os.path.join do?", "Write a function that adds two numbers.", "Hello!"]
FIELDS = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["file", "folder"]},
        "hidden": {"type": "boolean"},
        "mode": {"enum": ["read", "write", "append"]},
    },
    "required": ["kind", "hidden", "mode"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "path", "schema": FIELDS}}


def check_fields(text: str) -> None:
    """The text is one JSON object of the schema above."""
    value = json.loads(text)
    assert value.keys() == FIELDS["properties"].keys()  # type: ignore[attr-defined]
    assert value["kind"] in ("file", "folder")
    assert isinstance(value["hidden"], bool)
    assert value["mode"] in ("read", "write", "append")


def conversation(server: Server, model: Path, options: Sequence[object]) -> list[Any]:
    """What a user sees of chats, streams and JSON."""
    seen: list[Any] = []
    with (
        server.running(model, options=options) as running,
        openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none") as client,
    ):

        def ask(question: str, **more: Any) -> Any:
            return client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=96,
                **more,
            )

        for question in QUESTIONS:
            whole = ask(question).choices[0].message.content
            parts = [chunk.choices for chunk in ask(question, stream=True)]
            assert whole == "".join(c.delta.content or "" for choices in parts for c in choices)
            seen.append(whole)
        answer = ask("Describe a path.", response_format=FORMAT).choices[0].message.content
        check_fields(answer)
        with pytest.raises(openai.BadRequestError):
            ask("Hello!", response_format={"type": "no such format"})
        return [*seen, answer]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["plain", "ids", "table"])
def test_a_client_is_answered_as_without_drafting(
    layout: str, server: Server, files: Files
) -> None:
    model = files(layout, "demo")
    want = conversation(server, model, ["--no-draft"])
    assert conversation(server, model, ["--spec-draft-n-max", DEPTH]) == want
