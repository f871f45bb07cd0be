"""Check a GPU within a time budget: does it decode, what does a row cost, does drafting pay?

    python benchmarks/gpu.py FOLDER --backend cuda [--seconds 420] [--shapes 0.8b,27b,35b-a3b]

It needs no network: run it with the Python of an environment that `.ci/gpu`
has made, or by the `check` of `.ci/gpu-bundle`. Its steps are in the order of importance, each in a
process of its own with a limit of its own. FOLDER/gpu.md has everything that has been measured so
far, at any moment, and what was skipped or stopped, and why, and FOLDER/gpu.log what else the steps
said; models are made in FOLDER and kept for the next run. --steps runs some of the steps.

1. `text`: the text of a small model at depths 0 to 4 and auto, and its acceptance, against those on
   the CPU.
2. `batches`: milliseconds of a batch of 1 to 16 rows, for Q4_K_M, Q8_0 and F16, with four layers of
   the largest shape that is not a mixture of experts.
3. `depths`, for each shape: plain decoding and ours at each depth, with the parts of a cycle; then
   the llama-server without patches that --stock names, or else llama-server's own steps, and our
   llama-server, with one client and with four. A shape with -cpu-moe has its experts on the CPU.
   Plain decoding is measured again after ours: if it differs from the first row, so may all others.
4. `calls`: graph launches, waits and bytes of a cycle at depth 3, and how long the device idles,
   for the first shape. This step alone needs a C compiler, `cc`.
5. `greedy`: how many tokens drafting changes, and whether it changes none if plain decoding has as
   many rows as a cycle with drafts; for the trained model of the tests and the first shape.
6. `tests`: `pytest -m gpu`.

The shapes are those of the published models with random weights, Q4_K_M with an F16 head and a
draft vocabulary of 32,768; the head is right 80 % of the time. All files together take 40 GB, and
10 more while they are made; --models says where, such as in /dev/shm.
`--backend cpu --shapes tiny` shows on any machine that it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from measuring import options

ROOT = Path(__file__).parents[1]
STEP = ROOT / "benchmarks" / "gpu_table.py"
TESTED = ("native", "server")
GPU_TESTS = re.compile(r"mark\.gpu|places\.(everywhere|there|in_all_places)")
STEPS = "text,batches,depths,calls,greedy,tests"
SHAPES = "0.8b,27b,35b-a3b"
TYPES = "Q4_K_M,Q8_0,F16"
# The share of the budget that is left to a step at most.
SHARE = 0.6
LEAST = 10.0  # seconds: less is not enough for any step


@dataclass
class Step:
    """A part of the check: its title, its command, and what came of it."""

    title: str
    command: Sequence[str | Path]
    rows: list[dict[str, Any]] = field(default_factory=list)
    note: str = "not reached"
    """Why nothing or not everything was measured; "" if everything was."""


def run_step(step: Step, seconds: float, log: Path) -> Iterator[None]:
    """Run a step for `seconds` at most; yields after each row that it prints.

    Everything else that it prints is added to the file `log`.
    """
    with log.open("a+", encoding="utf-8", errors="replace", buffering=1) as rest:
        start = rest.tell()
        process = subprocess.Popen(
            step.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=rest, text=True
        )
        assert process.stdout is not None
        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    step.rows.append(json.loads(line))
                    yield
                else:
                    rest.write(line)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        rest.seek(start)
        last = [line for line in rest.read().splitlines() if line.strip()][-1:]
    if stopped.is_set():
        step.note = f"stopped after {seconds:.0f} s"
    elif code:
        step.note = ": ".join([f"ended with code {code}", *last])
    else:
        step.note = ""
        step.rows = step.rows or [{"said": line} for line in last]  # of pytest: how many passed
    yield


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows as Markdown; a column for each name, in the order of their first use."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    for row in rows:
        cells = [row.get(name, "") for name in names]
        texts = [f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append("| " + " | ".join(texts) + " |")
    return lines


def report(steps: Sequence[Step], backend: str) -> str:
    """Everything so far as Markdown."""
    day = datetime.now(timezone.utc).date().isoformat()
    lines = [f"## {backend}, {platform.machine()}, {day}"]
    for step in steps:
        lines += ["", f"### {step.title}", ""]
        lines += table(step.rows) if step.rows else []
        if step.note:
            lines += ["", f"{'Incomplete' if step.rows else 'Skipped'}: {step.note}"]
    return "\n".join(lines) + "\n"


def planned(arguments: argparse.Namespace) -> list[Step]:
    """The steps in their order."""
    base: list[str | Path] = [sys.executable, STEP, "--work", arguments.models]
    base += ["--backend", arguments.backend, "--tokens", str(arguments.tokens)]
    base += ["--rounds", str(arguments.rounds), "--depths", arguments.depths]
    if arguments.stock:
        base += ["--stock", arguments.stock]
    if arguments.counter:
        base += ["--counter", arguments.counter]
    shapes = arguments.shapes.split(",")
    dense = [shape for shape in shapes if "-a" not in shape and "moe" not in shape][-1:]
    # Without an environment's other plugins, and without files for which it may lack packages.
    tests: list[str | Path] = ["env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable, "-m"]
    tests += ["pytest", "-p", "xdist.plugin", "-W", "default", "-m", "gpu", "-v"]
    files = itertools.chain(*((ROOT / "tests" / room).glob("test_*.py") for room in TESTED))
    tests += [file for file in sorted(files) if GPU_TESTS.search(file.read_text(encoding="utf-8"))]
    steps = {
        "text": [Step("Text and acceptance", [*base, "text", "tiny"])],
        "batches": [
            Step(
                f"Milliseconds of a batch, {shape}",
                [*base, "batches", shape, "--quant", arguments.types],
            )
            for shape in dense
        ],
        "depths": [Step(f"Depths, {shape}", [*base, "depths", shape]) for shape in shapes],
        "calls": [Step(f"A cycle's calls, {shapes[0]}", [*base, "calls", shapes[0]])],
        "greedy": [
            Step(f"Greedy text with drafts, {model}", [*base, "greedy", model])
            for model in ("demo", shapes[0])
        ],
        "tests": [Step("pytest -m gpu", tests)] if arguments.backend != "cpu" else [],
    }
    return [step for name in arguments.steps.split(",") for step in steps[name]]


def main() -> int:
    parser = options(__doc__, {"--seconds": 420.0, "--tokens": 128, "--rounds": 3})
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", required=True, choices=["cuda", "vulkan", "cpu"])
    parser.add_argument("--models", type=Path, help="where they are made [FOLDER/models]")
    parser.add_argument("--steps", default=STEPS)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--depths", default="1,2,3,4,auto")
    parser.add_argument("--stock", help="llama-server without patches, to compare with")
    parser.add_argument("--counter", help="a compiled tests/support/device_calls.c")
    arguments = parser.parse_args()
    if arguments.folder.exists() and not arguments.folder.is_dir():
        parser.error(f"{arguments.folder}: expected a folder, found a file")
    if unknown := set(arguments.steps.split(",")) - set(STEPS.split(",")):
        parser.error(f"--steps: expected some of {STEPS}, found {unknown.pop()}")
    if arguments.backend == "vulkan":
        os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")  # also a device in software
    end = time.monotonic() + arguments.seconds
    arguments.folder = arguments.folder.resolve()
    arguments.models = (arguments.models or arguments.folder / "models").resolve()
    for folder in (arguments.folder, arguments.models):
        folder.mkdir(parents=True, exist_ok=True)
    steps, file = planned(arguments), arguments.folder / "gpu.md"
    log = file.with_suffix(".log")
    log.write_text("", encoding="utf-8")
    file.write_text(report(steps, arguments.backend), encoding="utf-8")
    for i, step in enumerate(steps):
        left = end - time.monotonic()
        limit = left if i == len(steps) - 1 else left * SHARE
        if limit < LEAST:
            step.note = f"{max(left, 0):.0f} s of {arguments.seconds:.0f} s were left"
            continue
        print(f"{step.title}: up to {limit:.0f} s", flush=True)
        for _ in run_step(step, limit, log):
            file.write_text(report(steps, arguments.backend), encoding="utf-8")
    text = report(steps, arguments.backend)
    file.write_text(text, encoding="utf-8")
    print(f"\n{text}\n{file}")
    return 1 if any(step.note.startswith("ended") for step in steps) else 0


if __name__ == "__main__":
    sys.exit(main())
