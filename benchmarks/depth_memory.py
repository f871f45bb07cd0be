"""Say what depth auto gains from what an earlier process has learned.

    python benchmarks/depth_memory.py MODEL.gguf [--tokens 100] [--rounds 10]

Each text is generated in a process of its own: without drafts, with depth auto that remembers
nothing, and with depth auto that has a file, in random order within a round. The first round warms
up and writes the file. Prints the median speed, and the median over the rounds of the speed divided
by that without drafts, with its 95 % interval (bootstrap).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
from two_builds import median_with_interval

from mtp_gguf.gguf_tools.depth_file import VARIABLE

PLAIN, FORGETS, REMEMBERS = "no drafting", "auto", "auto, remembered"


def speed(model: Path, tokens: int, *, drafts: bool) -> float:
    """Tokens per second after the first one, in this process."""
    from mtp_gguf.native.llama.mtp_llama import MTPLlama  # noqa: PLC0415 - loads the libraries

    depth = None if drafts else 0
    with MTPLlama(str(model), depth=depth, n_ctx=tokens + 64, lookup=False, profile=False) as llm:
        answer = llm.generate([5, 6, 7, 8], temp=0.0)
        next(answer)
        began = perf_counter()
        for _ in range(tokens):
            next(answer)
        return tokens / (perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--once", choices=["0", "1"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(speed(options.model, options.tokens, drafts=options.once == "1"))
        return
    speeds: dict[str, list[float]] = {PLAIN: [], FORGETS: [], REMEMBERS: []}
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(options.rounds + 1):
            for name in random.sample(list(speeds), len(speeds)):
                file = str(Path(folder) / "depth") if name == REMEMBERS else "0"
                command = [sys.executable, __file__, str(options.model), "--once"]
                command += [str(int(name != PLAIN)), "--tokens", str(options.tokens)]
                variables = {**os.environ, VARIABLE: file}
                done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True)
                if round_number:
                    speeds[name].append(float(done.stdout))
    print("| | tok/s | to no drafting |\n| --- | --- | --- |")
    for name, values in speeds.items():
        ratio, low, high = median_with_interval(np.array(values) / np.array(speeds[PLAIN]))
        print(f"| {name} | {np.median(values):.1f} | {ratio:.3f} ({low:.3f} to {high:.3f}) |")


if __name__ == "__main__":
    main()
