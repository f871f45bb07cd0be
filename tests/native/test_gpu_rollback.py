"""Rollback by replay on a GPU whose backend has the operation: Vulkan (patches/0109).

    pytest -m gpu tests/native/test_gpu_rollback.py

The operation alone is compared with the CPU's by llama.cpp's `test-backend-ops`. Models are in F32
and computed in F32, so that little is left of the kernels' dependence on the batch.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from mtp_gguf.gguf_tools.doctor import diagnose
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native.libraries.replay import device_replays
from support import places
from support.llama_libraries import patched_libraries, result_of, walk
from support.models import Models
from support.rollback_walk import ROUNDING, SEQUENCES

pytestmark = pytest.mark.gpu


@pytest.fixture
def environment() -> dict[str, Any]:
    """Variables of a process on the GPU; skips the test if its layers keep snapshots."""
    if not device_replays(places.require_gpu()):
        pytest.skip("this GPU's backend has no operation for replay, so its layers keep snapshots")
    stated = {name: value for name, value in os.environ.items() if name.startswith("GGML_VK_")}
    return {**stated, "GGML_VK_DISABLE_F16": "1"}


def ways(environment: dict[str, Any], *words: object) -> Any:
    return result_of(patched_libraries(), "rollback_ways", *words, **environment)


@pytest.mark.parametrize(
    ("spec", "layers", "tokens", "seed", "steps"),
    [
        ("dense-3v", places.ALL, 3, 1, 60),
        ("dense-3v", 4, 3, 1, 40),  # two of three recurrent layers are on the CPU
        ("moe-fused", places.ALL, 8, 1, 40),
        pytest.param("dense-3v", places.ALL, 1, 2, 1000, marks=pytest.mark.slow),
        pytest.param("dense-3v", places.ALL, 3, 3, 1000, marks=pytest.mark.slow),
        pytest.param("moe-fused", places.ALL, 8, 4, 1000, marks=pytest.mark.slow),
    ],
)
def test_random_rollbacks_equal_a_context_that_never_drafts(
    models: Models,
    environment: dict[str, Any],
    spec: str,
    layers: int,
    tokens: int,
    seed: int,
    steps: int,
) -> None:
    """Up to rounding.

    A thousand steps take ten to twenty minutes on Mesa's software device, which runs fewer.
    """
    if steps == 1000:
        steps = places.affordable(steps)
    work: Any = {"seed": seed, "steps": steps, "tokens": tokens, "place": (layers,), **environment}
    count = walk(patched_libraries(), models.gguf(spec), **work)
    assert count["granted"] > 10
    assert count["refused"] > 3
    assert count["rows"] > 100


@pytest.mark.parametrize("tokens", [0, 3])
def test_logits_and_saved_states_are_those_of_snapshots(
    models: Models, environment: dict[str, Any], tokens: int
) -> None:
    """The log of a state is replayed by the CPU while saving, with other roundings."""
    seen = ways(environment, "compare", models.gguf("dense-3v"), tokens, places.ALL)
    print(seen)
    assert seen["rows"] > 100
    assert seen["logits moved"] <= ROUNDING
    assert seen["states moved"] < 1e-5


def test_eight_tokens_take_a_log_instead_of_eight_states(
    models: Models, environment: dict[str, Any]
) -> None:
    path = models.gguf("dense-3v")
    none, replay, snapshots = ways(environment, "sizes", path, places.ALL)
    print(f"{none} MiB without rollback, {replay} by replay, {snapshots} by snapshots")
    assert snapshots == pytest.approx(9 * none, rel=0.02)
    with open_model(path) as model:
        memory = diagnose(model, None, 256, 8).memory
    assert memory
    log = SEQUENCES * 8 * memory.state_log / (1 << 20)
    assert replay - none == pytest.approx(log, abs=0.011)  # rounded to a hundredth
