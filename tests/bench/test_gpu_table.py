"""benchmarks/gpu.py: models of repeated layers, the steps of a check, and their limits."""

from __future__ import annotations

import json
import os
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

# A step that prints two rows and something else, and then waits, and one that fails.
STEPS = """
import sys
from pathlib import Path
from gpu import Step, report, run_step
rows = "echo '{\\"rows\\": 1}'; echo x; echo '{\\"ms\\": 0.5}'"
waits = Step("waits", ["sh", "-c", f"{rows}; exec sleep 900"])
fails = Step("fails", ["sh", "-c", "echo why >&2; exit 3"])
speaks = Step("speaks", ["echo", "25 passed"])
for step in (waits, fails, speaks):
    for _ in run_step(step, 5, Path(sys.argv[1])):
        pass
print(report([waits, fails, speaks, Step("later", [])], "cpu"))
"""


def check(folder: Path, *words: str) -> list[str]:
    """The lines of gpu.md after a check of the tests' shape."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), str(folder), "--shapes", "tiny"]
    command += [
        "--types",
        "Q4_K_M,F16",
        "--depths",
        "2,auto",
        "--tokens",
        "8",
        "--rounds",
        "1",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "gpu.md").read_text().splitlines()
    assert done.stdout.endswith("\n".join([*lines, "", f"{folder / 'gpu.md'}"]) + "\n")
    return lines


def test_a_model_of_repeated_layers_drafts_the_same(dial: Dial, tmp_path: Path) -> None:
    words = (dial("tiny"), tmp_path / "stretched.gguf")
    said = run_python(WRITE, *words, cwd=BENCHMARKS).splitlines()
    assert said[0] == said[1]


def test_without_time_everything_is_skipped_and_said(tmp_path: Path) -> None:
    lines = check(tmp_path, "--backend", "cpu", "--seconds", "0")
    titles = [line for line in lines if line.startswith("### ")]
    assert titles == [
        "### Text and acceptance",
        "### Milliseconds of a batch, tiny",
        "### Depths, tiny",
        "### A cycle's calls, tiny",
        "### Greedy text with drafts, demo",
        "### Greedy text with drafts, tiny",
    ]
    assert lines.count("Skipped: 0 s of 0 s were left") == len(titles)


def test_greedy_text_is_compared_with_plain_decoding_of_one_width(tmp_path: Path) -> None:
    """With llama.cpp's own products of F16, which are others for one row on x86-64."""
    command = [sys.executable, str(BENCHMARKS / "gpu_table.py"), "greedy", "demo", "--quant", "F16"]
    command += ["--backend", "cpu", "--tokens", "4", "--work", str(tmp_path)]
    environment = {**os.environ, "MTP_GGUF_LIBS": "stock", "MTP_GGUF_KERNELS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    for row in map(json.loads, done.stdout.splitlines()):
        assert 0 < row["logits not as plain"] <= row["tokens"] == 64
        assert row["logits not as padded"] == 0


@pytest.mark.thorough
def test_a_step_that_is_stopped_leaves_its_rows(tmp_path: Path) -> None:
    lines = run_python(STEPS, tmp_path / "log", cwd=BENCHMARKS).splitlines()
    assert [line for line in lines if line] == [
        lines[0],
        "### waits",
        "| rows | ms |",
        "| --- | --- |",
        "| 1 |  |",
        "|  | 0.50 |",
        "Incomplete: stopped after 5 s",
        "### fails",
        "Skipped: ended with code 3: why",
        "### speaks",
        "| said |",
        "| --- |",
        "| 25 passed |",
        "### later",
        "Skipped: not reached",
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["cpu", pytest.param("vulkan", marks=pytest.mark.gpu)])
def test_the_table(tmp_path: Path, backend: str) -> None:
    """On a shape of the tests; its figures mean nothing."""
    lines = check(tmp_path, "--backend", backend, "--seconds", "36000")
    assert not [line for line in lines if line.startswith(("Skipped", "Incomplete"))]
    tables = "\n".join(lines).split("### ")[1:]
    text, batches, depths, calls, *greedy = (
        [r.strip("| ") for r in t.splitlines() if r[:1] == "|"][2:] for t in tables
    )
    assert [row.split(" | ")[:2] for row in text[:5]] == [[f"{n}", "64"] for n in range(5)]
    both = [[quant, f"{n}"] for quant in ("Q4_K_M", "F16") for n in range(1, 17)]
    assert [row.split(" | ")[:2] for row in batches] == both
    assert [row.split(" | ")[0] for row in depths[:4]] == [
        *("plain", "ours, depth 2", "ours, depth auto", "plain")
    ]
    # Four sequences take as many graphs as one.
    launches = [row.split(" | ")[1 if backend == "vulkan" else 5] for row in (calls[0], calls[-1])]
    assert launches == ["2.00"] * 2
    same = [row.split(" | ")[4:] for rows in greedy[:2] for row in rows]
    assert same == [["0", "0"]] * 4
