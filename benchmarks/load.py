"""How fast is decoding while other programs need the CPUs?

    python benchmarks/load.py MODEL.gguf [--libs NAME=FOLDER ...] [--loops 0,1,2] [--threads 2]
        [--seconds 5] [--rounds 3]

Decodes one token at a time next to endless loops of a shell, without drafts. Each measurement is a
process of its own; libraries alternate within a round. `bundled` are the package's, --libs names
others as MTP_GGUF_LIBS does: a folder, or stock for those of llama-cpp-python. The table has the
medians of tokens per second, and their share of those with the first number of loops.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

DECODE = """
import sys, time
from mtp_gguf.native import MTPLlama
path, threads, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with MTPLlama(path, depth=0, n_ctx=4096, n_threads=threads, n_threads_batch=threads) as llm:
    session = llm.session
    session.decode(list(range(24)))
    count, began, ended = 0, time.perf_counter(), 0.0
    while ended < began + seconds and count < 4000:
        session.begin(count % 100, 0)
        session.end(0)
        count, ended = count + 1, time.perf_counter()
    print(count / (ended - began))
"""


def measure(arguments: argparse.Namespace, libs: str, loops: int) -> float:
    """Tokens per second next to so many loops."""
    environment = dict(os.environ)
    if libs:
        environment["MTP_GGUF_LIBS"] = libs
    words = [sys.executable, "-c", DECODE, str(arguments.model)]
    words += [str(arguments.threads), str(arguments.seconds)]
    with ExitStack() as stack:
        for _ in range(loops):
            loop = subprocess.Popen(["sh", "-c", "while :; do :; done"])
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--libs", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--loops", type=lambda t: [*map(int, t.split(","))], default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    others = [item.partition("=") for item in arguments.libs]
    if not all(name and folder for name, _, folder in others):
        parser.error("--libs: expected NAME=FOLDER, such as stock=stock")
    libs = {"bundled": ""} | {name: folder for name, _, folder in others}
    speeds: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for loops in arguments.loops:
            for name, folder in libs.items():
                speeds.setdefault((name, loops), []).append(measure(arguments, folder, loops))
    print(f"| loops | {' | '.join(f'{name}: tok/s | share' for name in libs)} |")
    print(f"| --- |{' --- | --- |' * len(libs)}")
    for loops in arguments.loops:
        found = {name: median(speeds[name, loops]) for name in libs}
        cells = (
            f"{speed:.1f} | {speed / median(speeds[name, arguments.loops[0]]):.2f}"
            for name, speed in found.items()
        )
        print(f"| {loops} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
