"""Rolling back by replay: as if the rejected drafts had never been decoded (patches/0015)."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.doctor import diagnose
from mtp_gguf.gguf_tools.model import open_model
from support.llama_libraries import answer, walk
from support.models import Files
from support.real_server import rpc_server
from support.rollback_walk import SEQUENCES

pytestmark = pytest.mark.server


@pytest.mark.parametrize(("spec", "tokens"), [("dense-3v", 3), ("moe-fused", 8)])
def test_random_rollbacks_equal_a_context_that_never_drafts(
    patched_server: Path, files: Files, spec: str, tokens: int
) -> None:
    count = walk(patched_server.parent, files("plain", spec), seed=1, steps=250, tokens=tokens)
    assert min(count.values()) > 3
    assert count["rows"] > 500


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_steps(patched_server: Path, files: Files, seed: int) -> None:
    tokens = (1, 2, 3, 8)[seed]
    walk(patched_server.parent, files("plain"), seed=100 + seed, steps=2500, tokens=tokens)


@pytest.mark.parametrize(("layers", "tokens"), [(4, 3), (4, 0)])
def test_layers_of_a_device_that_cannot_replay_have_snapshots(
    patched_server: Path, files: Files, free_port: int, layers: int, tokens: int
) -> None:
    """The others replay; they agree after every rollback."""
    folder = patched_server.parent
    with rpc_server(folder, free_port) as endpoint:
        place = (layers, endpoint)
        count = walk(folder, files("plain"), seed=2, steps=80, tokens=tokens, place=place)
    assert count["rows"] > 200
    assert tokens == 0 or min(count.values()) > 1


# Both ways in one process: batches, rollbacks and copies that snapshots can do, too.
BOTH = """
import json, os, sys
import llama_cpp as llama
from support.rollback_walk import Context
import numpy as np

model = llama.llama_model_load_from_file(sys.argv[1].encode(), llama.llama_model_default_params())
tokens = int(sys.argv[2])
replay = Context(model, tokens)
os.environ["LLAMA_RS_REPLAY"] = "0"
both = [replay, Context(model, tokens)]
rng = np.random.default_rng(5)
length, wrong, rows = [0, 0], 0, 0
for step in range(40):
    each = [7, 5] if step == 0 else rng.integers(1, 5, 2).tolist()
    batch = [
        (seq, length[seq] + i, int(rng.integers(0, both[0].n_vocab)))
        for seq in (0, 1) for i in range(each[seq])
    ]
    found = [context.decode(batch) for context in both]
    rows += len(batch)
    wrong += found[0].tobytes() != found[1].tobytes()
    for seq in (0, 1):
        kept = int(rng.integers(max(1, each[seq] - tokens), each[seq] + 1))
        length[seq] += kept
        if kept < each[seq]:
            assert all(context.remove(seq, length[seq]) for context in both)
    states = [bytes(context.save(step % 2, 0)) for context in both]
    wrong += states[0] != states[1]
print(json.dumps([rows, wrong]))
"""


@pytest.mark.parametrize("tokens", [0, 3])
def test_logits_and_saved_states_are_those_of_snapshots(
    patched_server: Path, files: Files, tokens: int
) -> None:
    rows, wrong = answer(patched_server.parent, BOTH, files("plain"), tokens)
    assert rows > 100
    assert wrong == 0


SIZES = """
import json, os, re, sys
import llama_cpp as llama
from support.rollback_walk import Context

printed = []
collect = llama.llama_log_callback(lambda level, text, data: printed.append(text.decode()))
llama.llama_log_set(collect, None)
model = llama.llama_model_load_from_file(sys.argv[1].encode(), llama.llama_model_default_params())

def mebibytes(tokens):
    printed.clear()
    Context(model, tokens)
    return float(re.search(r"RS buffer size = +([0-9.]+) MiB", "".join(printed))[1])

sizes = [mebibytes(0), mebibytes(8)]
os.environ["LLAMA_RS_REPLAY"] = "0"
print(json.dumps([*sizes, mebibytes(8)]))
"""


def test_rolling_back_eight_tokens_needs_less_than_eight_states(
    patched_server: Path, files: Files
) -> None:
    none, replay, snapshots = answer(patched_server.parent, SIZES, files("plain"))
    assert snapshots == pytest.approx(9 * none, rel=0.02)
    with open_model(files("plain")) as model:
        memory = diagnose(model, None, 256, 8).memory
    assert memory
    # llama.cpp rounds both sizes to a hundredth
    log = SEQUENCES * 8 * memory.state_log / (1 << 20)
    assert replay - none == pytest.approx(log, abs=0.011)


# The least of many times, so that a busy machine does not matter. Four tokens wait in the log.
TIMES = """
import json, sys, time
import llama_cpp as llama
from support.rollback_walk import WHOLE, Context

model = llama.llama_model_load_from_file(sys.argv[1].encode(), llama.llama_model_default_params())
context = Context(model, 4)
context.decode([(0, i, 5 + i) for i in range(6)])

def least(call):
    times = []
    for _ in range(50):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)

state = context.save(0, WHOLE)
size = least(lambda: llama.llama_state_seq_get_size_ext(context.context, 0, WHOLE))
save = llama.llama_state_seq_get_data_ext
data = least(lambda: save(context.context, state, len(state), 0, WHOLE))
print(json.dumps([size, data]))
"""


def test_the_size_of_a_state_is_known_without_a_replay(patched_server: Path, files: Files) -> None:
    size, data = answer(patched_server.parent, TIMES, files("plain"))
    assert 5 * size < data
