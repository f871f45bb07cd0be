"""MTPLlama on the libraries of another llama.cpp.

    pytest -m slow -s tests/native/test_other_versions.py

downloads the sources with pip and builds libllama, some minutes.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from support.greedy_texts import Work
from support.llama_libraries import STOCK, answer, run_on
from support.llama_sources import built
from support.models import Models

pytestmark = pytest.mark.slow

WORK = Work((0, 1, 3), prompts=(9, 60), tokens=48, n_ctx=512)
# A text goes on as before after its state was saved as bytes, and restored.
STATES = """
import itertools, json, sys
from mtp_gguf.native import MTPLlama
llm = MTPLlama(sys.argv[1], depth=2, n_ctx=256, n_threads=1)
stream = llm.generate(list(range(60)), temp=0.0)
list(itertools.islice(stream, 20))
stream.close()
whole = llm.save_state()
texts = []
for _ in range(2):
    llm.load_state(whole)
    last = [int(llm.input_ids[llm.n_tokens - 1])]
    stream = llm.generate(last, reset=False, temp=0.0)
    texts.append(list(itertools.islice(stream, 20)))
    stream.close()
print(json.dumps(texts))
"""


@pytest.fixture(scope="module")
def b11549(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("b11549")
    return built(folder, "xllamacpp", "2026.10.11549", "thirdparty/llama.cpp", "llama", "ggml")


def test_texts_and_drafts_are_those_of_the_pinned_version(b11549: Path, models: Models) -> None:
    model = models.gguf("demo", "Q4_K_M", "F16")
    written: list[Any] = [
        json.loads(run_on(libraries, "greedy_texts", model, json.dumps(asdict(WORK)), timeout=600))
        for libraries in (STOCK, b11549)
    ]
    assert written[0] == written[1]
    assert written[1][-1]["tokens_per_cycle"] > 1.3


def test_states_are_saved_and_restored(b11549: Path, models: Models) -> None:
    first, second = answer(b11549, STATES, models.gguf("demo", "Q4_K_M", "F16"))
    assert len(first) == 20
    assert first == second
