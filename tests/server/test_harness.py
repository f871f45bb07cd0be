"""lm-evaluation-harness over the patched llama-server: the numbers of its `hf` backend."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from support.harness import check_chats, check_completions
from support.models import Models
from support.real_server import Server

pytestmark = [
    pytest.mark.server,
    pytest.mark.ecosystem,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the `ecosystem` extra"),
]


@pytest.mark.parametrize("tokenized", [True, False], ids=["ids", "text"])
def test_local_completions_are_the_numbers_of_transformers(
    tokenized: bool, server: Server, models: Models, tmp_path: Path
) -> None:
    model = models.gguf("demo", "F32", "F32")
    with server.running(model, "--parallel", 2, options=["--depth", 3]) as client:
        check_completions(tmp_path, client.port, 4, tokenized_requests=tokenized)


def test_local_chat_completions_are_the_answers_of_transformers(
    server: Server, models: Models, tmp_path: Path
) -> None:
    model = models.gguf("demo", "F32", "F32")
    with server.running(model, options=["--depth", 3]) as client:
        check_chats(tmp_path, client.port)
