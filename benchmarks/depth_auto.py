"""Compare depth auto with every fixed depth, on synthetic models of several acceptance rates.

    python benchmarks/depth_auto.py --work FOLDER [--shape 0.8b] [--parts 0,0.3,0.6,0.8,0.95,switch]

A part is an acceptance rate, or "switch": blocks of 200 tokens with 90 %, 10 % and 90 %. Each part
builds its model (kept in FOLDER) and probes all depths briefly. Those that are not far behind then
generate the same tokens interleaved, in slices of 16, so that a slow second of the machine affects
all of them. Every round uses new sessions, which generate two texts: the first includes the time
to learn what drafts cost and gain, the second shows a session that has learned it. Each depth has
its own context; that of depth 0 has neither head nor snapshots, as without drafting. Parts can be
run one by one, in one or two minutes each for the 0.8B shape on two cores; their results are kept
in FOLDER, and the table shows all of them.

The targets: auto is within 3 % of the best fixed depth; at 0 % it reaches at least 0.97 times plain
decoding; and from 50 tokens after a switch on it is within 3 % of the best depth there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from decode import PROMPT_TOKENS, dial_file
from dial_model import BLOCK, SHAPES, cycle_of
from measuring import heading, options, row, words

from mtp_gguf.bench.model import BenchModel, Setting
from mtp_gguf.bench.stats import rotated
from mtp_gguf.gguf_tools.profile import AUTO_MAX_DEPTH
from mtp_gguf.native.session import Depth, Session

SWITCH = "switch"
SWITCH_HITS = (0.9, 0.1)
SWITCH_SETTLED = 50  # tokens after a switch that do not count
PROBE_TOKENS = 64
PROBE_LEAST = 0.92  # of the fastest: depths that the probe finds slower are left out
SLICE = 16  # tokens
TEXTS = ("first", "second")

# Tokens generated so far and the seconds they took, after each cycle.
Trace = list[tuple[int, float]]


class Writer:
    """Generates texts one after the other in one session, and records the time."""

    def __init__(self, session: Session, depth: Depth) -> None:
        self.session, self._depth = session, depth
        self._token = 0
        self.trace: Trace = []

    def begin(self, prompt: Sequence[int]) -> None:
        """Start another text; the session keeps what it learned about costs and acceptance."""
        self.session.remove(0)
        self.session.decode(prompt)
        self._token = self.session.argmax()
        self.trace = [(0, 0.0)]

    def write(self, n: int) -> None:
        """Continue until there are n tokens, or a few more."""
        written, seconds = self.trace[-1]
        began = perf_counter() - seconds
        while written < n:
            new = self.session.step(self._token, self._depth)
            self._token, written = new[-1], written + len(new)
            self.trace.append((written, perf_counter() - began))


def writer_of(stack: ExitStack, model: BenchModel, depth: Depth, size: int = 0) -> Writer:
    """A writer in a new session. size: of the draft vocabulary, as in `Setting`."""
    setting = Setting(AUTO_MAX_DEPTH if depth == "auto" else depth, fastmtp_size=size)
    return Writer(stack.enter_context(model.session(setting)), depth)


def write_all(writers: Sequence[Writer], prompt: Sequence[int], n: int, first: int = 0) -> None:
    """Generate n tokens with all writers, interleaved in slices. first: the one that begins."""
    for writer in writers:
        writer.begin(prompt)
    for i, end in enumerate(range(SLICE, n + SLICE, SLICE)):
        for writer in rotated(writers, first + i):
            writer.write(min(end, n))


def interleaved(
    model: BenchModel, depths: Sequence[Depth], prompts: Sequence[Sequence[int]], n: int
) -> list[dict[Depth, Trace]]:
    """Return for each prompt the traces of all depths over n tokens.

    The sessions are new, and are kept from prompt to prompt.
    """
    out = []
    with ExitStack() as stack:
        writers = {depth: writer_of(stack, model, depth) for depth in depths}
        for prompt in prompts:
            write_all([*writers.values()], prompt, n)
            out.append({depth: writer.trace for depth, writer in writers.items()})
    return out


def rate(trace: Trace, first: int, last: int) -> float:
    """Return the tokens per second between two positions, to the nearest cycles."""
    begin = next(point for point in trace if point[0] >= first)
    end = next(point for point in trace if point[0] >= last)
    return (end[0] - begin[0]) / (end[1] - begin[1])


def variants(model: BenchModel, depths: Sequence[Depth], prompt: Sequence[int]) -> list[Depth]:
    """Return no drafting, auto, and the fixed depths that a probe finds not far behind."""
    (probe,) = interleaved(model, depths, [prompt], PROBE_TOKENS)
    speeds = {depth: rate(trace, 0, PROBE_TOKENS) for depth, trace in probe.items()}
    least = PROBE_LEAST * max(speeds.values())
    return [depth for depth in depths if depth in (0, "auto") or speeds[depth] >= least]


def measure(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return speeds by text, depth and round: of a whole text, or of each block of a switch.

    A text is named by acceptance rate or block, and by whether it was its sessions' first.
    """
    depths: list[Depth] = [*map(int, arguments.depths), "auto"]
    switch = part == SWITCH
    path = dial_file(arguments.shape, SWITCH_HITS if switch else float(part), arguments.work)
    n = 3 * BLOCK if switch else arguments.tokens
    cycle = cycle_of(SHAPES[arguments.shape]).tolist()

    def prompt_of(i: int) -> list[int]:
        """Ends before a block of the first kind begins; the text continues there."""
        start = 2 * BLOCK * (i + 1)
        return [cycle[j % len(cycle)] for j in range(start - PROMPT_TOKENS, start)]

    with BenchModel(path, n_ctx=PROMPT_TOKENS + n + 64, threads=arguments.threads) as model:
        kept = variants(model, depths, prompt_of(0))
        rounds = [
            interleaved(model, kept, [prompt_of(2 * i), prompt_of(2 * i + 1)], n)
            for i in range(arguments.rounds)
        ]
    blocks = [("", 0, n)]
    if switch:
        names = (
            f"{SWITCH_HITS[0]:.0%}",
            f"then {SWITCH_HITS[1]:.0%}",
            f"then {SWITCH_HITS[0]:.0%}",
        )
        starts = (0, BLOCK + SWITCH_SETTLED, 2 * BLOCK + SWITCH_SETTLED)
        ends = (BLOCK, 2 * BLOCK, 3 * BLOCK)
        blocks = list(zip(names, starts, ends, strict=True))
    return {
        f"{name or f'{float(part):.0%}'}, {text}": {
            str(depth): [rate(texts[i][depth], first, last) for texts in rounds] for depth in kept
        }
        for name, first, last in blocks
        for i, text in enumerate(TEXTS)
    }


def cells(speeds: dict[str, list[float]], columns: Sequence[str]) -> list[str]:
    """Return a line of the table; ratios are taken within each round, then their median."""
    medians = {depth: median(values) for depth, values in speeds.items()}
    best = max((depth for depth in medians if depth != "auto"), key=lambda depth: medians[depth])
    ratios = (
        median(a / b for a, b in zip(speeds["auto"], speeds[other], strict=True))
        for other in (best, "0")
    )
    found = [f"{medians[depth]:.1f}" if depth in medians else "" for depth in columns]
    return [*found, *(f"{ratio:.3f}" for ratio in ratios)]


def main() -> None:
    parser = options(__doc__, {"--threads": 2, "--tokens": 256, "--rounds": 3})
    parser.add_argument("--work", type=Path, required=True, help="folder for models and results")
    parser.add_argument("--shape", choices=SHAPES, default="0.8b")
    parser.add_argument("--parts", type=words, default=["0", "0.3", "0.6", "0.8", "0.95", SWITCH])
    parser.add_argument("--depths", type=words, default=["0", "1", "2", "3", "4"])
    arguments = parser.parse_args()
    if "0" not in arguments.depths:
        parser.error(f"--depths: expected 0 among them, found {','.join(arguments.depths)!r}")
    kept = arguments.work / f"depth_auto-{arguments.shape}.json"
    results = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for part in arguments.parts:
        results[part] = measure(part, arguments)
        kept.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    columns = [*arguments.depths, "auto"]
    heading("right", *columns, "auto / best fixed", "auto / no drafting")
    for part in results.values():
        for name, speeds in part.items():
            row(name, *cells(speeds, columns))


if __name__ == "__main__":
    main()
