"""The tokenizer of a file, against llama-cpp-python's."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_cpp import Llama

from mtp_gguf.native.vocabulary import Vocabulary
from support.carried_models import write_model


@pytest.mark.parametrize("text", ["", " ", "a b  c", "wörter " * 50])
def test_a_character_may_be_several_tokens(tmp_path: Path, text: str) -> None:
    """A space is the three bytes of another character in this vocabulary."""
    path = write_model(tmp_path / "model.gguf", "llama")
    llama = Llama(str(path), vocab_only=True, verbose=False)
    want = llama.tokenize(text.encode(), add_bos=False, special=False)
    with Vocabulary(path) as vocabulary:
        assert vocabulary.encode(text, special=False).tolist() == want
    assert not text or len(want) > len(text)
