"""Sampling from a large vocabulary with fewer passes (patches/) gives the same results."""

from __future__ import annotations

from typing import Any

import pytest

from support.llama_libraries import answer
from support.models import Files
from support.real_server import TEXTS, Server, drafts_of, tokens_of

pytestmark = pytest.mark.server

# The same candidates in order of their ids, where the last tokens are found at once, and in others,
# where all candidates are looked at; the whole vocabulary, and a part of it.
CODE = """
import ctypes, json
import llama_cpp as llama
import numpy as np

N, LAST = 1000, [0, 999, 5, 5, 7, 5, 400, 999]
logits = np.random.default_rng(1).normal(size=N).astype(np.float32)

def penalized(ids):
    candidates = (llama.llama_token_data * len(ids))(*((i, logits[i], 0) for i in ids))
    array = llama.llama_token_data_array(candidates, len(ids), -1, False)
    sampler = llama.llama_sampler_init_penalties(N, 64, 1.25, 0.5, 0.25)
    for token in LAST:
        llama.llama_sampler_accept(sampler, token)
    llama.llama_sampler_apply(sampler, ctypes.byref(array))
    llama.llama_sampler_free(sampler)
    found = {c.id: c.logit for c in candidates}
    return [found.get(i) for i in range(N)]

ordered, moved = np.arange(N), np.roll(np.arange(N), 400)  # all are there, none in its place
halves = penalized(ordered[:500]), penalized(ordered[500:])
print(json.dumps([
    penalized(ordered), penalized(ordered[::-1]), penalized(moved),
    halves[0][:500] + halves[1][500:], logits.tolist(),
]))
"""


def test_penalties_find_their_tokens_wherever_they_stand(server: Server) -> None:
    ordered, *others, before = answer(server.program.parent, CODE)
    assert others == [ordered] * len(others)
    changed = [i for i, (new, old) in enumerate(zip(ordered, before, strict=True)) if new != old]
    assert changed == [0, 5, 7, 400, 999]


def test_a_draft_that_is_undone_takes_its_penalties_back(server: Server, files: Files) -> None:
    """Where the context has no snapshots, a checkpoint brings the sampler's state back, too."""
    ngrams = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", 2)
    greedy: dict[str, Any] = {"repeat_penalty": 1.3, "frequency_penalty": 0.5, "n_predict": 64}
    texts = []
    for passed in ((), ngrams):
        asked = (files("base", "demo"), [text * 4 for text in TEXTS], *passed)
        results = server.answers(*asked, options=["--no-draft"], **greedy)
        texts.append(tokens_of(results))
    assert texts[0] == texts[1]
    offered, accepted = drafts_of(results)
    assert 0 < accepted < offered
