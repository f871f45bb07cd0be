"""Measure the cost of being able to roll back drafts: snapshots and replay, 1 to 4 tokens.

    python benchmarks/rollback.py MODEL.gguf [--tokens 3,8] [--rounds 15]

For each number of tokens there are two contexts, one with snapshots and one with replay, and in
addition one that cannot roll back. They alternate for every batch; the table shows medians in
milliseconds. After each batch all tokens but one are rolled back ("one kept"), or none ("all kept":
the next batch replays the most). Memory is as llama.cpp prints it: recurrent states and compute
buffers.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections import defaultdict
from pathlib import Path

from measuring import heading, numbers, options, row
from verify import PROMPT, Trunk

from mtp_gguf.native.runtime import llama_cpp

BATCHES = range(1, 5)
SWITCH = "LLAMA_RS_REPLAY"
WAYS = ("none", "snapshots", "replay")

_printed: list[str] = []


@llama_cpp.llama_log_callback
def _collect(_level: int, text: bytes, _data: object) -> None:
    _printed.append(text.decode(errors="replace"))


def buffers(kind: str) -> float:
    """The MiB of the buffers of a kind that llama.cpp has printed lately."""
    found = re.findall(rf"{kind} buffer size = +([0-9.]+) MiB", "".join(_printed))
    return sum(map(float, found))


def main() -> None:
    parser = options(__doc__, {"--threads": 2, "--rounds": 15})
    parser.add_argument("model")
    parser.add_argument(
        "--tokens", type=numbers, default=[3, 8], help="tokens to roll back; at least 3 [3,8]"
    )
    arguments = parser.parse_args()
    if not Path(arguments.model).is_file():
        parser.error(f"model: expected a GGUF file, found none at {arguments.model}")
    llama_cpp.llama_log_set(_collect, None)
    plain = Trunk(arguments.model, arguments.threads, 0, True, time.perf_counter, 1024)
    trunks, memory = {("none", 0): plain}, {("none", 0): (buffers("RS"), buffers("compute"))}
    for count in arguments.tokens:
        for way in WAYS[1:]:
            os.environ[SWITCH] = "0" if way == "snapshots" else "1"
            _printed.clear()
            trunks[way, count] = plain.beside(n_rs_seq=count)
            memory[way, count] = (buffers("RS"), buffers("compute"))
    for trunk in trunks.values():
        trunk.start(PROMPT)

    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for i in range(arguments.rounds + 1):
        for batch in BATCHES:
            for kept in sorted({1, batch}):
                for (way, count), trunk in trunks.items():
                    if way == "none" and kept < batch:
                        continue
                    took = trunk.verify(batch, kept)
                    if i:  # the first round warms up
                        seen[f"{way} {count}"][f"{batch}, {kept} kept"].append(took)
    results = {
        name: {what: round(statistics.median(values), 2) for what, values in each.items()}
        for name, each in seen.items()
    }
    columns = [f"{batch}, {kept} kept" for batch in BATCHES for kept in sorted({1, batch})]
    heading("rollback of", "states, MiB", "compute, MiB", *columns)
    for way, count in trunks:
        found = results[f"{way} {count}"]
        cells = (f"{found[c]:.1f}" if c in found else "" for c in columns)
        row(f"{count} by {way}", *(f"{mib:.1f}" for mib in memory[way, count]), *cells)
    print(json.dumps({"threads": arguments.threads, "results": results}))


if __name__ == "__main__":
    main()
