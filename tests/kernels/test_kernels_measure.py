"""`mtp-gguf kernels measure`, and what `info` says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.commands import MAIN
from support.models import Dial, Models

LARGE = "0.8b"


def run(cache: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which measures from the start."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    environment.pop("MTP_GGUF_KERNELS", None)
    command = [sys.executable, "-c", MAIN, *map(str, words)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def info(cache: Path) -> Any:
    """What `info` says of the kernels."""
    return json.loads(run(cache, "info", "--json").stdout)["plugged_kernels"]


@pytest.mark.thorough
def test_a_model_is_measured(dial: Dial, tmp_path: Path, has_kernels: bool) -> None:
    if not has_kernels:
        pytest.skip("this CPU has no AVX2, or no dot products")
    before = info(tmp_path)
    assert (before["choices"], before["choices measured"]) == ([], None)
    assert "measured kernels: none yet" in run(tmp_path, "info").stdout
    done = run(tmp_path, "kernels", "measure", dial(LARGE), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    columns = {choice["columns"] for choice in found}
    assert columns <= {1, 3, 4, 6, 8, 15, 31, 63, 64}
    assert len(columns) > 3  # a busy machine may compute some with fewer threads only
    single = [choice for choice in found if choice["columns"] == 1]
    assert {choice["type"] for choice in single} >= {"q4_K", "q6_K"}
    decided = [choice for choice in found if choice["kernel"]]
    assert len(decided) > len(found) // 2  # a busy machine may leave some open
    assert all(choice["gigabytes"] > 0 for choice in decided)
    assert all(choice["over_next"] >= 1 for choice in decided)
    after = info(tmp_path)
    assert after["choices measured"]
    threads = {choice["threads"] for choice in found}  # a busy machine may have used fewer, too
    kept = [choice for choice in after["choices"] if choice["threads"] in threads]
    assert all(choice in decided for choice in kept)
    assert kept
    shown = run(tmp_path, "info").stdout
    assert "measures anew)" in shown.partition("measured kernels: ")[2].partition("\n")[0]


def test_what_cannot_be_measured(models: Models, tmp_path: Path) -> None:
    wrong = {
        models.checkpoint("demo"): "a checkpoint",
        tmp_path / "none.gguf": "none.gguf: cannot be opened",
    }
    for path, message in wrong.items():
        done = run(tmp_path, "kernels", "measure", path)
        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1]
    assert run(tmp_path, "kernels", "measure").returncode == 2
