"""lm-evaluation-harness over llama_cpp's server with MTPLlama: the numbers of its `hf` backend."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from support.harness import check_chats, check_completions
from support.models import Models
from support.python_server import python_server


@pytest.mark.ecosystem
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the `ecosystem` extra")
def test_numbers_and_answers_are_those_of_transformers(models: Models, tmp_path: Path) -> None:
    with python_server(models.gguf("demo", "F32", "F32"), tmp_path) as port:
        check_completions(tmp_path, port, 1, tokenized_requests=False)
        check_chats(tmp_path, port)
