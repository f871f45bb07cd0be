"""Build, test and measure everything on a machine with a GPU, in one command.

    python benchmarks/gpu.py --backend cuda --work FOLDER

1. `.ci/gpu` installs this checkout with the backend, in FOLDER/environment;
2. `pytest -m gpu` runs the tests of the GPU;
3. `gpu_table.py` measures each shape in a process of its own; the tables are printed and written
   to FOLDER/gpu.md: plain decoding, llama-server's own draft-mtp, ours at fixed depths and auto,
   with the parts of a cycle, the prompt and the device's memory.

The shapes are those of the published models with random weights, Q4_K_M with an F16 head and a
draft vocabulary of 32,768; the head is right 80 % of the time. 35b-a3b is measured a second time
with its experts on the CPU. All shapes together take 60 GB of disk (--keep-models no: the largest
alone, 20 GB) and 30 GB of memory.

On a machine without a GPU, `GGML_VK_VISIBLE_DEVICES=0 python benchmarks/gpu.py --backend vulkan
--shapes tiny,tiny-moe` shows that it runs; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHAPES = "0.8b,4b,9b,27b,35b-a3b,35b-a3b-cpu-moe"


def table(measured: dict[str, Any]) -> str:
    """One shape as Markdown."""
    lines = [
        f"### {measured['shape']} ({measured['bytes'] / 1e9:.2f} GB, {measured['device']})",
        "",
        "| decoding | tok/s | × plain | tokens a cycle | cycle ms | draft | verify | sampling | "
        "rollback | rest | prompt tok/s | VRAM MiB |",
        "| --- " * 12 + "|",
    ]
    plain = measured["rows"][0]["tok_s"]
    for row in measured["rows"]:
        cells = [row["what"], f"{row['tok_s']:.1f}", f"{row['tok_s'] / plain:.2f}"]
        if "cycle_ms" in row:
            parts = ("draft_ms", "verify_ms", "sample_ms", "rollback_ms", "rest_ms")
            cells += [f"{row['tokens_per_cycle']:.2f}", f"{row['cycle_ms']:.2f}"]
            cells += [f"{row[part]:.2f}" for part in parts]
            cells += [f"{row['prompt_tok_s']:.0f}", f"{row['vram'] / 2**20:.0f}"]
        lines.append("| " + " | ".join(cells + [""] * (12 - len(cells))) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--backend", required=True, help="cuda, hip, metal, sycl, vulkan, …")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--depths", default="1,2,3,4,5,6,auto")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-build", action="store_true", help="FOLDER/environment is up to date")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--keep-models", choices=["yes", "no"], default="yes")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    folder = work / "environment"
    python = folder / "bin" / "python"
    if not arguments.no_build:
        subprocess.run([ROOT / ".ci" / "gpu", arguments.backend, folder], check=True)
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    tests = "not run"
    if not arguments.no_tests:
        done = subprocess.run(
            [python, "-m", "pytest", "-m", "gpu", "-q"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        print(done.stdout)
        tests = done.stdout.strip().splitlines()[-1]
    tables, failed = [], []
    for shape in arguments.shapes.split(","):
        command = [python, ROOT / "benchmarks" / "gpu_table.py", shape, "--work", work / "models"]
        command += ["--depths", arguments.depths, "--tokens", str(arguments.tokens)]
        command += ["--rounds", str(arguments.rounds), "--keep", arguments.keep_models]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            failed.append(shape)
            continue
        tables.append(table(json.loads(done.stdout.splitlines()[-1])))
        print(f"\n{tables[-1]}\n", flush=True)
    day = datetime.now(timezone.utc).date().isoformat()
    head = f"## {arguments.backend}, {platform.machine()}, {day}\n\n`pytest -m gpu`: {tests}"
    (work / "gpu.md").write_text("\n\n".join([head, *tables]) + "\n", encoding="utf-8")
    print(f"{work / 'gpu.md'}: {len(tables)} tables; {tests}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
