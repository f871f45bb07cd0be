"""A conversion's memory is bounded and does not grow with the model."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.checkpoint_edits import write_repeating
from support.checkpoints import Spec
from support.commands import spawn

# 140 MB and 400 MB of BF16 in tensors of the same sizes.
SMALLER = Spec("smaller", hidden=1024, intermediate=3584)
LARGER = replace(SMALLER, name="larger", layers=13, interval=13)
LIMIT = 1 << 30
# Allocators keep freed memory as they like; three times the tensors may cost this much, no more.
ALLOWANCE = 40 << 20


def peak(model: Path, output: Path, *options: object) -> int:
    """The peak memory that a conversion in a process of its own reports, in bytes."""
    arguments = ["convert", model, "-o", output, "--json", "--overwrite", *options]
    process = spawn(*arguments)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout as stdout, process.stderr as stderr:
        text = stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, stderr.read()
    reported = int(json.loads(text)["peak_bytes"])
    if sys.platform != "darwin":
        # The kernel's own figure counts this process before it became that one, so is no smaller.
        assert reported <= usage.ru_maxrss * 1024
    return reported


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {spec.name: write_repeating(root / spec.name, spec) for spec in (SMALLER, LARGER)}


@pytest.mark.thorough
@pytest.mark.parametrize("quant", ["Q4_K_M", "BF16"])
def test_does_not_grow_with_the_model(quant: str, models: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "x.gguf"
    smaller, larger = (
        peak(models[spec.name], output, "--quant", quant, "--threads", 2, "--fastmtp")
        for spec in (SMALLER, LARGER)
    )
    assert larger - smaller < ALLOWANCE
    assert larger < LIMIT


@pytest.mark.thorough
def test_is_bounded_with_many_threads(models: dict[str, Path], tmp_path: Path) -> None:
    """Slices shrink with the number of threads, so that all together keep to the budget."""
    assert peak(models["smaller"], tmp_path / "x.gguf", "--threads", 128) < LIMIT
