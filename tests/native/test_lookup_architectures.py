"""Drafts from the text for models without an MTP head, of architectures that have none."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from mtp_gguf.native import MTPLlama
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
    with closing(MTPLlama(str(model), depth=0, n_ctx=256, n_threads=1)) as llm:
        prompt = list(islice(llm.generate(PROMPT, temp=0.0), TOKENS))  # repeats itself
        expected = list(islice(llm.generate(prompt, temp=0.0), 80))
        other = list(islice(llm.generate(prompt[:100], temp=0.0), 20))
    with closing(
        MTPLlama(str(model), lookup=True, rollback=rollback, n_ctx=256, n_threads=1)
    ) as llm:
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
        depth = None if lookup else 0
        with closing(
            MTPLlama(str(model), depth=depth, lookup=lookup, n_ctx=256, n_threads=1)
        ) as llm:
            stream = llm.generate([VOCABULARY - 1] * 200, temp=0.0)
            texts.append(list(islice(stream, llm.n_ctx() - 200)))
    assert texts[0] == texts[1]
