"""Rollback snapshots: in cells that move, for single tokens, and of copies.

patches/upstream: 0002, 0003 and 0013.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.llama_libraries import answer
from support.models import Files

pytestmark = pytest.mark.server

snapshots_and_replay = pytest.mark.parametrize("replay", ["0", "1"], ids=["snapshots", "replay"])

START = """
import json, sys
import llama_cpp as llama
import numpy as np
from support.rollback_walk import Context, load

PROMPTS = [[5, 6, 7, 8], [40, 41, 42, 43], [9, 9, 700, 3]]
TOKEN, DRAFTS, NEXT = 17, [18, 19], 20
model = load(sys.argv[1], 0)

def rows(seq, first, tokens):
    return [(seq, first + i, token) for i, token in enumerate(tokens)]
"""

# Three sequences in three cells. Sequence 2 decodes a token and two drafts; 0 and 1, which follow
# in the same batch, need neighbouring cells, and 2 is between them. Then the drafts go.
MOVED = (
    START
    + """
def rolled_back(batches):
    context = Context(model, 2)
    for seq in (0, 2, 1):
        context.decode(rows(seq, 0, PROMPTS[seq]))
    for batch in batches:
        context.decode(batch)
    assert context.remove(2, 5)
    return context.decode(rows(2, 5, [NEXT])).tolist()

drafts = rows(2, 4, [TOKEN, *DRAFTS])
others = rows(0, 4, [30]) + rows(1, 4, [31])
print(json.dumps([rolled_back([drafts]), rolled_back([drafts + others])]))
"""
)


@snapshots_and_replay
def test_drafts_are_rolled_back_in_a_cell_that_moved(
    patched_server: Path, files: Files, replay: str
) -> None:
    want, have = answer(patched_server.parent, MOVED, files("plain"), LLAMA_RS_REPLAY=replay)
    assert have == want  # without the patch snapshots differ by 6, where logits go to 5


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
    START
    + """
context, plain = Context(model, 2), Context(model, 0)
for each, tokens in ((context, [TOKEN, *DRAFTS]), (plain, [TOKEN, DRAFTS[0]])):
    each.decode(rows(0, 0, PROMPTS[0]))
    each.decode(rows(0, 4, tokens))
assert context.remove(0, 6)
llama.llama_memory_seq_cp(context.memory, 0, 1, -1, -1)
want = plain.decode(rows(0, 6, [NEXT]))
found = [context.decode(rows(seq, 6, [NEXT])) for seq in range(2)]
print(json.dumps([float(np.abs(want - each).max()) for each in found]))
"""
)


@snapshots_and_replay
def test_a_copy_of_a_rolled_back_sequence_is_rolled_back(
    patched_server: Path, files: Files, replay: str
) -> None:
    differences = answer(patched_server.parent, COPY, files("plain"), LLAMA_RS_REPLAY=replay)
    assert differences == pytest.approx([0, 0], abs=1e-4)  # without the patch the copy's is 3
