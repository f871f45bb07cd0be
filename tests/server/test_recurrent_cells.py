"""Rollback snapshots: in cells that move, for single tokens, and of copies.

patches/upstream: 0002, 0003 and 0013.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.llama_libraries import answer
from support.models import Files

pytestmark = pytest.mark.server

# Three sequences in three cells. Sequence 1 decodes a token and two drafts; 0 and 2, which follow
# in the same batch, need neighbouring cells, and 1 is between them. Then the drafts go.
CODE = """
import json, sys
import llama_cpp as llama
import numpy as np

PROMPTS = [[5, 6, 7, 8], [40, 41, 42, 43], [9, 9, 700, 3]]
TOKEN, DRAFTS, NEXT = 17, [18, 19], 20
params = llama.llama_model_default_params()
params.use_extra_bufts = False  # kernels that do not depend on the size of the batch
model = llama.llama_model_load_from_file(sys.argv[1].encode(), params)
n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

def context():
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_rs_seq, params.kv_unified = 512, 3, 2, True
    params.n_threads = params.n_threads_batch = 1
    return llama.llama_init_from_model(model, params)

def decode(context, rows):
    batch = llama.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (seq, position, token) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
    assert llama.llama_decode(context, batch) == 0
    llama.llama_batch_free(batch)

def logits(context):
    return np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (n_vocab,)).tolist()

def rows(seq, first, tokens):
    return [(seq, first + i, token) for i, token in enumerate(tokens)]

def rolled_back(batches):
    made = context()
    decode(made, [row for seq in range(3) for row in rows(seq, 0, PROMPTS[seq])])
    for batch in batches:
        decode(made, batch)
    assert llama.llama_memory_seq_rm(llama.llama_get_memory(made), 1, 5, -1)
    decode(made, rows(1, 5, [NEXT]))
    return logits(made)

drafts = rows(1, 4, [TOKEN, *DRAFTS])
others = rows(0, 4, [30]) + rows(2, 4, [31])
print(json.dumps([rolled_back([drafts]), rolled_back([drafts + others])]))
"""


@pytest.mark.parametrize("replay", ["0", "1"], ids=["snapshots", "replay"])
def test_drafts_are_rolled_back_in_a_cell_that_moved(
    patched_server: Path, files: Files, replay: str
) -> None:
    want, have = answer(patched_server.parent, CODE, files("plain"), LLAMA_RS_REPLAY=replay)
    assert have == want  # without the patch snapshots differ by 7, where logits go to 5


# Counts the copies in the graph of a batch, for contexts with and without rollback.
COPIES = """
import ctypes, json, sys
import llama_cpp as llama

model = llama.llama_model_load_from_file(sys.argv[1].encode(), llama.llama_model_default_params())
describe = llama.llama_cpp._lib.ggml_op_desc
describe.argtypes, describe.restype = (ctypes.c_void_p,), ctypes.c_char_p

def copies(n_rs_seq, n_tokens):
    operations = []

    @llama.ggml_backend_sched_eval_callback
    def note(tensor, ask, _):
        if ask:
            operations.append(describe(tensor))
        return False

    params = llama.llama_context_default_params()
    params.n_ctx, params.n_rs_seq, params.n_threads, params.n_threads_batch = 256, n_rs_seq, 1, 1
    params.cb_eval = note
    context = llama.llama_init_from_model(model, params)
    tokens = (llama.llama_token * n_tokens)(*range(5, 5 + n_tokens))
    operations.clear()  # of the warm-up
    assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, n_tokens)) == 0
    llama.llama_free(context)
    return operations.count(b"CPY")

print(json.dumps([[copies(n_rs_seq, n_tokens) for n_tokens in (1, 4)] for n_rs_seq in (0, 3)]))
"""


def test_a_single_token_copies_one_snapshot_of_the_convolution(
    patched_server: Path, files: Files
) -> None:
    plain, rollback = answer(patched_server.parent, COPIES, files("plain"), LLAMA_RS_REPLAY="0")
    assert rollback[0] == plain[0]  # without the patch it is rollback[1]
    assert rollback[1] > plain[1]  # a snapshot for each of four tokens


# A sequence that was rolled back and its copy: both decode the same token.
COPY = (
    CODE.partition("def rolled_back")[0]
    + """
def copied():
    made = context()
    memory = llama.llama_get_memory(made)
    decode(made, rows(0, 0, PROMPTS[0]))
    decode(made, rows(0, 4, [TOKEN, *DRAFTS]))
    assert llama.llama_memory_seq_rm(memory, 0, 6, -1)
    llama.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    found = []
    for seq in range(2):
        decode(made, rows(seq, 6, [NEXT]))
        found.append(logits(made))
    return found

plain = context()
decode(plain, rows(0, 0, PROMPTS[0]))
decode(plain, rows(0, 4, [TOKEN, DRAFTS[0]]))
decode(plain, rows(0, 6, [NEXT]))
want = logits(plain)
print(json.dumps([float(np.abs(np.subtract(want, found)).max()) for found in copied()]))
"""
)


@pytest.mark.parametrize("replay", ["0", "1"], ids=["snapshots", "replay"])
def test_a_copy_of_a_rolled_back_sequence_is_rolled_back(
    patched_server: Path, files: Files, replay: str
) -> None:
    differences = answer(patched_server.parent, COPY, files("plain"), LLAMA_RS_REPLAY=replay)
    assert differences == pytest.approx([0, 0], abs=1e-4)  # without the patch the copy's is 3
