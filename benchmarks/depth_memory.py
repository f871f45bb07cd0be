"""Say what depth auto gains from what an earlier process has learned.

    python benchmarks/depth_memory.py MODEL.gguf [--tokens 100] [--rounds 10]

Each text is generated in a process of its own: without drafts, with depth auto that remembers
nothing, and with depth auto that has a file, each round beginning with another. The first round
warms up and writes the file. Prints the median speed, and the median over the rounds of the speed
divided by that without drafts, with its 95 % interval (bootstrap).
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from measuring import heading, in_new_process, in_rounds, median_with_interval, options, row

from mtp_gguf.gguf_tools.depth_file import VARIABLE

PLAIN, FORGETS, REMEMBERS = "no drafting", "auto", "auto, remembered"


def speed(model: Path, tokens: int, drafts: bool) -> float:
    """Tokens per second after the first one, in this process."""
    from decode import generated, opened  # noqa: PLC0415 - loads the libraries

    with opened(model, None if drafts else 0, tokens + 64, None, lookup=False) as llm:
        _, seconds = generated(llm, [5, 6, 7, 8], tokens)
    return tokens / seconds


def main() -> None:
    parser = options(__doc__, {"--tokens": 100, "--rounds": 10})
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = {PLAIN: "0", FORGETS: "0", REMEMBERS: str(Path(folder) / "depth")}
        work = (speed, arguments.model, arguments.tokens)
        jobs = {
            name: partial(in_new_process, *work, name != PLAIN, **{VARIABLE: file})
            for name, file in files.items()
        }
        speeds = in_rounds(jobs, arguments.rounds)
    heading("", "tok/s", "to no drafting")
    for name, values in speeds.items():
        ratio, low, high = median_with_interval(np.array(values) / np.array(speeds[PLAIN]))
        row(name, f"{np.median(values):.1f}", f"{ratio:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
