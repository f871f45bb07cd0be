"""Rolling back by replay: as if the rejected drafts had never been decoded (patches/0106)."""

from __future__ import annotations

import pytest

from mtp_gguf.gguf_tools.doctor import diagnose
from mtp_gguf.gguf_tools.model import open_model
from support.llama_libraries import answer, result_of, walk
from support.models import Files
from support.real_server import Server, rpc_server
from support.rollback_walk import SEQUENCES

pytestmark = pytest.mark.server


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("spec", "tokens", "seed", "steps"),
    [
        ("dense-3v", 3, 1, 250),
        ("moe-fused", 8, 1, 250),
        *(
            pytest.param("dense-3v", tokens, 100 + i, 2500, marks=pytest.mark.slow)
            for i, tokens in enumerate((1, 2, 3, 8))
        ),
    ],
)
def test_random_rollbacks_equal_a_context_that_never_drafts(
    server: Server, files: Files, spec: str, tokens: int, seed: int, steps: int
) -> None:
    """Ten thousand steps with -m slow."""
    model = files("plain", spec)
    count = walk(server.program.parent, model, seed=seed, steps=steps, tokens=tokens)
    assert min(count.values()) > 3
    assert count["rows"] > 500


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layers", "tokens"), [(4, 3), (4, 0)])
def test_layers_of_a_device_that_cannot_replay_have_snapshots(
    server: Server, files: Files, layers: int, tokens: int
) -> None:
    """The others replay; they agree after every rollback."""
    with rpc_server(server.program) as endpoint:
        place = (layers, endpoint)
        count = walk(
            server.program.parent, files("plain"), seed=2, steps=80, tokens=tokens, place=place
        )
    assert count["rows"] > 200
    assert tokens == 0 or min(count.values()) > 1


@pytest.mark.parametrize("tokens", [0, 3])
def test_logits_and_saved_states_are_those_of_snapshots(
    server: Server, files: Files, tokens: int
) -> None:
    words = ("compare", files("plain"), tokens)
    seen = result_of(server.program.parent, "rollback_ways", *words)
    assert seen["rows"] > 100
    assert seen["batches"] == seen["states"] == 0


def test_rolling_back_eight_tokens_needs_less_than_eight_states(
    server: Server, files: Files
) -> None:
    words = ("sizes", files("plain"))
    none, replay, snapshots = result_of(server.program.parent, "rollback_ways", *words)
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
from support.rollback_walk import WHOLE, Context, load

context = Context(load(sys.argv[1], 0), 4)
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


def test_the_size_of_a_state_is_known_without_a_replay(server: Server, files: Files) -> None:
    size, data = answer(server.program.parent, TIMES, files("plain"))
    assert 5 * size < data
