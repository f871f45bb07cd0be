"""How fast is decoding while other programs need the CPUs?

    python benchmarks/load.py MODEL.gguf [--libs NAME=FOLDER ...] [--loops 0,1,2] [--threads 2]
        [--seconds 5] [--rounds 3]

Decodes one token at a time next to endless loops of a shell, without drafts. Each measurement is a
process of its own; libraries alternate within a round. `bundled` are the package's, --libs names
others as MTP_GGUF_LIBS does: a folder, or stock for those of llama-cpp-python. The table has the
medians of tokens per second, and their share of those with the first number of loops.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

from measuring import heading, in_new_process, in_rounds, numbers, options, row


def decode(path: Path, threads: int, seconds: float) -> float:
    """Tokens per second of decoding for a while."""
    from decode import opened  # noqa: PLC0415 - loads the libraries

    with opened(path, 0, 4096, threads) as llm:
        session = llm.session
        session.decode(list(range(24)))
        count, began, ended = 0, time.perf_counter(), 0.0
        while ended < began + seconds and count < 4000:
            session.begin(count % 100, 0)
            session.end(0)
            count, ended = count + 1, time.perf_counter()
        return count / (ended - began)


def measure(libs: str, loops: int, *work: object) -> float:
    """Tokens per second next to so many loops."""
    with ExitStack() as stack:
        for _ in range(loops):
            loop = subprocess.Popen(["sh", "-c", "while :; do :; done"])
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        return in_new_process(decode, *work, **({"MTP_GGUF_LIBS": libs} if libs else {}))


def main() -> None:
    parser = options(__doc__, {"--threads": 2, "--seconds": 5.0, "--rounds": 3})
    parser.add_argument("model", type=Path)
    parser.add_argument("--libs", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--loops", type=numbers, default=[0, 1, 2])
    arguments = parser.parse_args()
    others = [item.partition("=") for item in arguments.libs]
    if not all(name and folder for name, _, folder in others):
        parser.error("--libs: expected NAME=FOLDER, such as stock=stock")
    libs = {"bundled": ""} | {name: folder for name, _, folder in others}
    work = (arguments.model, arguments.threads, arguments.seconds)
    jobs = {
        (name, loops): partial(measure, libs[name], loops, *work)
        for loops, name in product(arguments.loops, libs)
    }
    rounds = in_rounds(jobs, arguments.rounds, warm_up=False)
    speeds = {key: median(values) for key, values in rounds.items()}
    heading("loops", *(f"{name}: {what}" for name in libs for what in ("tok/s", "share")))
    for loops in arguments.loops:
        found = [(speeds[name, loops], speeds[name, arguments.loops[0]]) for name in libs]
        cells = ((f"{speed:.1f}", f"{speed / first:.2f}") for speed, first in found)
        row(loops, *(cell for pair in cells for cell in pair))


if __name__ == "__main__":
    main()
