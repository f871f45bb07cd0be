"""Drafts from the text for models without an MTP head, of architectures that have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.generation import load, take
from support.tiny_llama import VOCABULARY, write_tiny_llama, write_tiny_mamba

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 3
TOKENS = 150
RESIDUAL = 0.05  # the text repeats itself, but not without end


@pytest.fixture(scope="module", params=["llama", "qwen3", "mamba"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf"
    if request.param == "mamba":
        return write_tiny_mamba(path, RESIDUAL)
    return write_tiny_llama(path, request.param, RESIDUAL)


@pytest.mark.filterwarnings("ignore:.*drafting only from the text")
@pytest.mark.parametrize("rollback", ["snapshot", "checkpoint", "two-phase", "host"])
def test_greedy_text_is_the_same(model: Path, rollback: str) -> None:
    """Rejected drafts leave cache or state: nothing later in the text depends on them."""
    with load(model, depth=0) as llm:
        prompt = take(llm, TOKENS, PROMPT)  # repeats itself
        expected = take(llm, 80, prompt)
        other = take(llm, 20, prompt[:100])
    with load(model, lookup=True, rollback=rollback) as llm:
        session = llm.session
        for _ in range(10):  # as if learned long ago: all alike, so that every match is tried
            session.set_costs([10.0] * 16, [])
        for text, answer in ((prompt, expected), (prompt[:100], other)):
            session.remove(0)
            session.decode(text)
            tokens = [session.argmax()]
            while len(tokens) < len(answer):
                session.set_costs([10.0] * 16, [])
                tokens += session.step(tokens[-1], 0)
            assert tokens[: len(answer)] == answer
        stats = session.stats()
    assert stats.text_drafted > stats.text_accepted > 0
    assert (stats.rollbacks > 0) is (rollback != "two-phase")


@pytest.mark.filterwarnings("ignore:.*drafting only from the text")
def test_prompts_of_one_token_and_full_contexts(model: Path) -> None:
    """A prompt of one repeated token, up to the last position of the context."""
    texts = []
    for lookup in (False, True):
        with load(model, depth=None if lookup else 0, lookup=lookup) as llm:
            texts.append(take(llm, llm.n_ctx() - 200, [VOCABULARY - 1] * 200))
    assert texts[0] == texts[1]
