"""Logits are read where the CPU computed them, and copied if they would be lost (patches/)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.llama_libraries import answer
from support.models import Files
from support.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.server

# Batches of two sequences in pieces of four tokens (n_ubatch); each token's logits against those
# that it has alone. A token is [sequence, position, whether its logits are wanted].
CODE = """
import ctypes, json, sys
import llama_cpp as llama
import numpy as np
from support.rollback_walk import load

model = load(sys.argv[1], 0)
n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

def context():
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 512, 32, 4, 2
    params.n_threads = params.n_threads_batch = 1
    return llama.llama_init_from_model(model, params)

def decode(context, rows):
    batch = llama.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (seq, position, wanted) in enumerate(rows):
        batch.token[i] = 100 * seq + 7 * position + 5
        batch.pos[i], batch.logits[i] = position, wanted
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
    assert llama.llama_decode(context, batch) == 0
    llama.llama_batch_free(batch)

def logits(context, row):
    return np.ctypeslib.as_array(llama.llama_get_logits_ith(context, row), (n_vocab,)).copy()

alone, made = {}, context()
for seq in range(2):
    for position in range(12):
        decode(made, [(seq, position, 1)])
        alone[seq, position] = logits(made, 0)

found = []
for rows in json.loads(sys.argv[2]):
    made = context()
    decode(made, rows)
    place = ctypes.cast(llama.llama_get_logits(made), ctypes.c_void_p).value
    error = max(
        float(np.abs(logits(made, i) - alone[seq, position]).max())
        for i, (seq, position, wanted) in enumerate(rows) if wanted
    )
    decode(made, [(0, 12, 0)])  # wants no logits: shows where copies go
    copies = ctypes.cast(llama.llama_get_logits(made), ctypes.c_void_p).value
    found.append([error, place != copies])
    llama.llama_free(made)
print(json.dumps(found))
"""

ROUNDING = 1e-4  # of batches; other rows' logits are units away


def rows(n: int, wanted: set[int], seq: int = 0) -> list[tuple[int, int, int]]:
    """The first n tokens of a sequence."""
    return [(seq, i, int(i in wanted)) for i in range(n)]


BATCHES = {
    "one piece": (rows(4, {0, 1, 2, 3}), True),
    "one piece, some": (rows(4, {1, 3}), True),
    "three pieces": (rows(12, set(range(12))), False),
    "of the last piece": (rows(12, {9, 11}), True),
    "of the first piece": (rows(12, {1, 2}), False),
    "of the first and the last": (rows(12, {1, 11}), False),
    "two sequences alternately": (
        [row for i in range(12) for seq in range(2) for row in rows(12, {0, i}, seq)[i : i + 1]],
        False,
    ),
    "two sequences, one piece": (
        [row for i in range(2) for seq in range(2) for row in rows(2, {0, 1}, seq)[i : i + 1]],
        True,
    ),
}


def test_logits_are_each_token_s_own(patched_server: Path, files: Files) -> None:
    batches = json.dumps([batch for batch, _ in BATCHES.values()])
    results = answer(patched_server.parent, CODE, files("plain"), batches)
    found = dict(zip(BATCHES, results, strict=True))
    assert {name: error for name, (error, _) in found.items() if not error <= ROUNDING} == {}
    in_place = {name: place for name, (_, place) in found.items()}
    assert in_place == {name: place for name, (_, place) in BATCHES.items()}


# What makes the library run or reserve another graph before a state is saved, after a batch whose
# logits were left in the first one's memory.
AFTERWARDS = """
import json, sys
import llama_cpp as llama
import numpy as np
from support.rollback_walk import WHOLE, Context, load

def copy_to_another_stream(context):
    llama.llama_memory_seq_cp(context.memory, 0, 2, -1, -1)

def shift_positions(context):
    llama.llama_memory_seq_rm(context.memory, 0, 2, 3)
    llama.llama_memory_seq_add(context.memory, 0, 3, -1, -1)

def sample_in_the_graph(context):
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_greedy())
    assert llama.llama_set_sampler(context.context, 0, chain)

def row(context, i):
    found = llama.llama_get_logits_ith(context.context, i)
    return np.ctypeslib.as_array(found, (context.n_vocab,)).tolist() if found else None

context = Context(load(sys.argv[1], 0), 0)
want = context.decode([(seq, i, 5 + 7 * i) for seq in range(2) for i in range(5)]).tolist()
globals()[sys.argv[2]](context)
size = llama.llama_state_seq_get_size_ext(context.context, 0, WHOLE)
print(json.dumps([size > 0, want == [row(context, i) for i in range(len(want))]]))
"""


@pytest.mark.parametrize(
    "change", ["copy_to_another_stream", "shift_positions", "sample_in_the_graph"]
)
def test_logits_outlast_the_saving_of_a_state(
    patched_server: Path, files: Files, tmp_path: Path, change: str
) -> None:
    """As in stock llama.cpp: they are valid until the next batch."""
    shifted = change == "shift_positions"
    model = write_tiny_llama(tmp_path / "tiny.gguf") if shifted else files("plain")
    assert answer(patched_server.parent, AFTERWARDS, model, change) == [True, True]
