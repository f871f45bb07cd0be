"""What a cycle exchanges with the device: graph launches, waits and bytes, counted in ggml."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_gguf.native.runtime import runtime
from support import counted_cycles, places, preloading
from support.counted_cycles import CYCLES, DEPTH
from support.models import Dial, Models


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preloading.build("device_calls", tmp_path_factory.mktemp("counter"))


def count(
    counter: Path, path: Path, place: str, kind: str = "greedy", sequences: int = 1
) -> dict[str, int]:
    """Totals over CYCLES cycles at depth DEPTH with trunk and head there."""
    found = counted_cycles.count(counter, path, place, kind, sequences)
    print({name: round(value / CYCLES, 2) for name, value in found.items()})
    assert found["cycles"] == CYCLES
    if runtime.kind == "stock":
        pytest.skip("counted; the bounds are those of the patched libraries")
    return found


def check(found: dict[str, int], **most: int) -> None:
    """No cycle has more of these on average."""
    assert {name: found[name] for name, n in most.items() if found[name] > n * CYCLES} == {}


def test_a_cycle_is_two_graphs(counter: Path, models: Models) -> None:
    """One of the head, one of the trunk, and no more than that are waited for."""
    found = count(counter, models.gguf("demo", "Q4_K_M", "F16", layout="ids"), "cpu")
    assert found["decodes"] == found["draft_graphs"] == CYCLES
    assert found["cpu_graphs"] == 2 * CYCLES


@pytest.mark.gpu
@pytest.mark.parametrize(("tied", "place"), [(True, "gpu"), (False, "gpu"), (False, "whole")])
def test_a_cycle_on_a_device(
    counter: Path, models: Models, dial: Dial, tied: bool, place: str
) -> None:
    """Two graphs, three waits, and only tokens and positions move; with the patched libraries.

    The waits are for the trunk's inputs; its tokens and hidden states; the drafts. Embeddings
    that are not those of the output matrix stay on the CPU, which then gathers a row for each
    token of the batch, unless an option puts them on the device.
    """
    places.require_gpu()
    path = models.gguf("demo", "Q4_K_M", "F16") if tied else dial("tiny")
    found = count(counter, path, place)
    on_cpu = not tied and place == "gpu"
    rows = (DEPTH + 1) * 256 * 4 if on_cpu else 0
    assert found["graphs"] == 2 * CYCLES
    assert found["cpu_graphs"] == (CYCLES if on_cpu else 0)
    check(found, syncs=3, bytes_down=256, bytes_up=320 + rows, draft_bytes_up=128)
    assert found["bytes_moved"] > 0  # hidden states, from the trunk to the head


@pytest.mark.gpu
def test_a_cycle_with_rejection_on_a_device(counter: Path, dial: Dial) -> None:
    """The largest logits come down, and their tokens' weights if a draft is rejected."""
    places.require_gpu()
    found = count(counter, dial("tiny"), "gpu", "rejection")
    # Two graphs are the candidates' and a rejected draft's; four rows of logits are 16,384 bytes.
    check(found, graphs=4, syncs=5, bytes_down=12_000)


@pytest.mark.gpu
def test_cycles_of_several_sequences_on_a_device(counter: Path, models: Models) -> None:
    """As those of one: the hidden states are copied before the batch is waited for."""
    places.require_gpu()
    found = count(counter, models.gguf("demo", "Q4_K_M", "F16"), "gpu", sequences=2)
    assert (found["graphs"], found["cpu_graphs"]) == (2 * CYCLES, 0)
    check(found, syncs=3, bytes_down=256, bytes_up=320)


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [2, 4])
def test_slots_on_a_device(counter: Path, models: Models, sequences: int) -> None:
    """Sequences in one batch: one draft graph and one of the trunk; hidden states stay there."""
    places.require_gpu()
    found = count(counter, models.gguf("demo", "Q4_K_M", "F16"), "gpu", "slots", sequences)
    assert (found["kept"], found["graphs"]) == (sequences * CYCLES, 2 * CYCLES)
    check(found, syncs=3, bytes_down=256, bytes_up=320 * sequences)
