"""What a cycle exchanges with the device: graph launches, waits and bytes, counted in ggml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import places
from support.commands import run_python
from support.models import Dial, Models

SOURCE = Path(__file__).resolve().parents[1] / "support" / "device_calls.c"
DEPTH = 3
CYCLES = 24

# A session's cycles, after some that build the graphs; prints the totals of the rest.
PROGRAM = f"""
import ctypes, json, sys
from support import places
from support.native_trunk import opened_session

class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in (
        "cpu_graphs", "graphs", "syncs", "bytes_up", "bytes_down", "bytes_moved", "ups", "downs")]

counter = ctypes.CDLL(sys.argv[1]).device_calls
counter.restype = Counts
with (
    places.use(places.place(sys.argv[3])),
    opened_session(sys.argv[2], "snapshot", {DEPTH}) as (session, _),
):
    session.decode([5, 6, 7, 8])
    session.set_sampling(temperature=0.7, top_k=40, top_p=0.9, seed=1)
    step = session.step if sys.argv[4] == "greedy" else session.step_sampled
    token = 9
    for cycle in range(8 + {CYCLES}):
        if cycle == 8:
            session.reset_stats()
            counter()
        token = step(token, {DEPTH})[-1]
    found = counter()
    stats = session.stats()
print(json.dumps({{
    **{{name: getattr(found, name) for name, _ in Counts._fields_}},
    "decodes": stats.decodes, "draft_graphs": stats.draft_graphs, "cycles": stats.cycles,
    "draft_syncs": stats.draft_syncs, "draft_bytes_up": stats.draft_bytes_up,
}}))
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sys.platform != "linux":
        pytest.skip("libraries are preloaded the Linux way")
    if "LD_PRELOAD" in os.environ:
        pytest.skip("a sanitizer is preloaded")
    out = tmp_path_factory.mktemp("counter") / "device_calls.so"
    command: list[str | Path] = ["cc", "-shared", "-fPIC", "-O1", "-o", out, SOURCE, "-ldl"]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("no C compiler")
    return out


def count(counter: Path, path: Path, place: str, kind: str = "greedy") -> dict[str, int]:
    """Totals over CYCLES cycles at depth DEPTH with trunk and head there."""
    environment = {**os.environ, "LD_PRELOAD": str(counter), "PYTHONPATH": str(SOURCE.parents[1])}
    printed = run_python(PROGRAM, counter, path, place, kind, env=environment)
    found: dict[str, int] = json.loads(printed)
    print({name: round(value / CYCLES, 2) for name, value in found.items()})
    assert found["cycles"] == CYCLES
    return found


def test_a_cycle_is_two_graphs(counter: Path, models: Models) -> None:
    """One of the head, one of the trunk, and no more than that are waited for."""
    found = count(counter, models.gguf("demo", "Q4_K_M", "F16", layout="ids"), "cpu")
    assert found["decodes"] == found["draft_graphs"] == CYCLES
    assert found["cpu_graphs"] == 2 * CYCLES


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [True, False])
def test_a_cycle_on_a_device(counter: Path, models: Models, dial: Dial, tied: bool) -> None:
    """Two graphs, three waits, and only tokens and positions move; with the patched libraries.

    The waits are for the trunk's inputs, its tokens and the drafts. Embeddings that are not those
    of the output matrix stay on the CPU, which then gathers a row for each token of the batch.
    """
    places.require_gpu()
    path = models.gguf("demo", "Q4_K_M", "F16") if tied else dial("tiny")
    found = count(counter, path, "gpu")
    rows = 0 if tied else (DEPTH + 1) * 256 * 4
    assert found["graphs"] == 2 * CYCLES
    assert found["cpu_graphs"] == (0 if tied else CYCLES)
    assert found["syncs"] <= 3 * CYCLES
    assert found["bytes_down"] <= 256 * CYCLES
    assert found["bytes_up"] <= (256 + rows) * CYCLES
    assert found["bytes_moved"] > 0  # hidden states, from the trunk to the head
    assert found["draft_bytes_up"] <= 128 * CYCLES


@pytest.mark.gpu
def test_a_cycle_with_rejection_on_a_device(counter: Path, dial: Dial) -> None:
    """The largest logits come down, and their tokens' weights if a draft is rejected."""
    places.require_gpu()
    found = count(counter, dial("tiny"), "gpu", "rejection")
    assert found["graphs"] <= 4 * CYCLES  # the candidates', and the weights' if a draft is rejected
    assert found["syncs"] <= 5 * CYCLES
    assert found["bytes_down"] <= 12_000 * CYCLES  # four rows of logits alone are 16,384
