"""benchmarks/gpu.py: models of repeated layers, and a table of what was measured on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import run_python
from support.models import Dial

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

WRITE = """
import sys
from itertools import islice
from pathlib import Path
from gpu_table import stretched
from mtp_gguf.native import MTPLlama

stretched(Path(sys.argv[1]), Path(sys.argv[2]), 12)
for path in sys.argv[1:]:
    with MTPLlama(path, depth=3, n_ctx=256, n_threads=1) as llm:
        print([*islice(llm.generate([5, 6, 7], temp=0.0), 24)], llm.mtp_stats.acceptance)
"""


def test_a_model_of_repeated_layers_drafts_the_same(dial: Dial, tmp_path: Path) -> None:
    words = (dial("tiny"), tmp_path / "stretched.gguf")
    said = run_python(WRITE, *words, cwd=BENCHMARKS).splitlines()
    assert said[0] == said[1]


@pytest.mark.gpu
def test_the_table(tmp_path: Path) -> None:
    """On a shape of the tests; its figures mean nothing."""
    folder = tmp_path / "environment"
    folder.symlink_to(sys.prefix)
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--backend", "any"]
    command += ["--work", str(tmp_path)]
    command += ["--no-build", "--no-tests", "--shapes", "tiny-moe-cpu-moe", "--depths", "2,auto"]
    command += ["--tokens", "8", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in (tmp_path / "gpu.md").read_text().splitlines() if "| " in line]
    assert [row.split(" | ")[0] for row in rows[2:5]] == [
        "| plain",
        "| ours, depth 2",
        "| ours, depth auto",
    ]
    assert len({row.count("|") for row in rows}) == 1
