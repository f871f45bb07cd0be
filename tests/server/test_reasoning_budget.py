"""Budgets for thinking of llama-server, with templates that begin to think in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native import MTPLlama
from support.real_server import Server, post

pytestmark = pytest.mark.server

# What a template puts after the beginning of an answer, and whether that has thinking.
OPENINGS = {
    "<think>": True,
    "<think>\n": True,
    "<think>\n\n": True,
    "<think>\n\n</think>\n\n": False,
    "<think></think>": False,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)
ASKED = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def model(templated: Callable[[str], Path]) -> Path:
    """The demo model with a template that begins an answer with the argument `opening`."""
    return templated(TEMPLATE)


@pytest.fixture(scope="module", params=["--depth 3", "--no-draft"])
def port(server: Server, model: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    with server.running(model, options=request.param.split()) as client:
        yield client.port


@pytest.fixture(scope="module")
def python(model: Path) -> Iterator[MTPLlama]:
    with closing(MTPLlama(str(model), n_ctx=512, n_threads=1, n_threads_batch=1)) as llm:
        yield llm


@pytest.mark.parametrize("budget", [0, 1, 4, None])
@pytest.mark.parametrize("opening", OPENINGS)
def test_a_budget_ends_thinking(opening: str, budget: int | None, port: int, python: Any) -> None:
    """The demo model never ends its thinking by itself; what follows is the answer."""
    body: dict[str, Any] = {**ASKED, "chat_template_kwargs": {"opening": opening}}
    if budget is not None:
        body |= {"reasoning_budget_tokens": budget, "reasoning_budget_message": " So:"}
    status, found = post(port, "/v1/chat/completions", body)
    assert status == 200, found
    message = found["choices"][0]["message"]
    assert message == python.create_chat_completion(**body)["choices"][0]["message"]
    thoughts = message.get("reasoning_content", "")
    assert bool(thoughts) == OPENINGS[opening]
    assert bool(message["content"]) == (not thoughts or budget is not None)
    assert thoughts.endswith(" So:") == (OPENINGS[opening] and budget is not None)
    assert "think>" not in message["content"]
