"""A replayed state is bit-identical to one without rollback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_gguf.native.runtime import native_library


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "ggml"])
def test_replayed_states_and_outputs_have_the_bits_of_one_token_at_a_time(
    libraries: Path, kernels: bool
) -> None:
    plugged = [native_library("mtp_kernels")] if kernels else []
    done = subprocess.run(
        [sys.executable, "-m", "support.kernels.rollback", str(libraries), *map(str, plugged)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, list[int]] = json.loads(done.stdout)
    assert min(compared for compared, _ in results.values()) > 50
    assert [name for name, (_, wrong) in results.items() if wrong] == []
