"""A copy of a sequence is whole before its state is saved or replaced (patches/upstream/0004)."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.llama_libraries import answer
from support.models import Files

pytestmark = pytest.mark.server

# Sequences in streams of their own. The copy has decoded nothing when it is saved or restored over.
CODE = """
import json, sys
import llama_cpp as llama
import numpy as np
from support.rollback_walk import WHOLE, Context, load

TOKENS, OTHERS, NEXT = [5, 6, 7, 8, 9, 10, 11], [300, 301, 302, 303], 20
model = load(sys.argv[1], 0)

def start():
    context = Context(model, 0)
    for seq, tokens in enumerate([TOKENS, OTHERS]):
        context.decode([(seq, i, token) for i, token in enumerate(tokens)])
    return context

def logits(context, seq):
    return context.decode([(seq, len(TOKENS), NEXT)])

want = logits(start(), 0)
saved = start()
llama.llama_memory_seq_cp(saved.memory, 0, 2, -1, -1)
saved.restore(saved.save(2, WHOLE), 3, WHOLE)
restored = start()
state = restored.save(0, WHOLE)
llama.llama_memory_seq_cp(restored.memory, 1, 2, -1, -1)
restored.restore(state, 2, WHOLE)
found = [logits(saved, 3), logits(restored, 2)]
print(json.dumps([float(np.abs(each - want).max()) for each in found]))
"""


def test_a_copy_is_saved_and_replaced_as_what_it_is(patched_server: Path, files: Files) -> None:
    found = answer(patched_server.parent, CODE, files("plain"))
    assert found == [0, 0]
