"""Measure where the trunk's time goes in a verification: milliseconds by kind of operation.

    python benchmarks/parts.py MODEL.gguf [--batch 4] [--rounds 30] [--threads 2]

Works with any libraries (for instance MTP_GGUF_LIBS=stock), for a model on CPUs. llama.cpp's
evaluation callback stops the graph whenever the kind of operation changes, and the time from stop
to stop is measured; waiting for other threads counts toward the operation that is waited for. The
stops take time themselves: the excess over a decode without stops is subtracted, the same amount
for each stop. Batches are those of verify.py: logits of all tokens, then all but one rolled back.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import time
from collections import defaultdict
from ctypes import c_bool, c_char_p, c_void_p
from itertools import pairwise
from pathlib import Path

from measuring import heading, options, row
from verify import PROMPT, Trunk

from mtp_gguf.native.runtime import llama_cpp, loaded_library

NOTHING = "nothing"
OF_OPERATION = {
    **dict.fromkeys(("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"), NOTHING),
    "MUL_MAT": "products",
    "MUL_MAT_ID": "products of experts",
    **dict.fromkeys(("GATED_DELTA_NET", "GATED_DELTA_NET_REPLAY"), "gated delta net"),
    **dict.fromkeys(("SSM_CONV", "CONCAT"), "convolution and its inputs"),
    **dict.fromkeys(("CPY", "GET_ROWS", "SCALE", "CONT"), "copies of states"),
    **dict.fromkeys(("FLASH_ATTN_EXT", "SOFT_MAX", "ROPE", "SET_ROWS"), "attention"),
    **dict.fromkeys(("ARGSORT", "TOP_K"), "choice of experts"),
}
OF_NAME = {
    "result_output": "head",
    "kq": "attention",
    "kqv": "attention",
    "conv_output_silu": "convolution and its inputs",  # fused with them
}


class Stops:
    """The callback, which measures the time from stop to stop."""

    def __init__(self) -> None:
        base = ctypes.CDLL(str(loaded_library("ggml-base")))
        self.describe, self.name = base.ggml_op_desc, base.ggml_get_name
        for function in (self.describe, self.name):
            function.argtypes, function.restype = (c_void_p,), c_char_p
        self.seen: list[str] = []  # kind of each node of the last graph
        self.wanted: set[int] = set()  # the nodes after which to stop
        self.at, self.began = -1, 0.0
        self.took: dict[str, float] = defaultdict(float)  # milliseconds by kind
        self.count: dict[str, int] = defaultdict(int)  # stops by kind
        self.callback = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)(self)

    def __call__(self, tensor: int, ask: bool, _: int) -> bool:
        if ask:
            self.at += 1
            self.seen.append(self.kind(tensor))
            self.began = time.perf_counter()
            return self.at in self.wanted
        took = (time.perf_counter() - self.began) * 1e3
        kind = self.seen[self.at]
        self.took[kind] += took
        self.count[kind] += 1
        return True

    def kind(self, tensor: int) -> str:
        """Return the kind of an operation, from its result's name if the operation is ambiguous."""
        name = self.name(tensor).decode().split("-")[0]
        operation = self.describe(tensor).decode()
        return OF_NAME.get(name) or OF_OPERATION.get(operation, "other")

    def start(self, wanted: set[int]) -> None:
        """Stop after these nodes of the next graph."""
        self.seen, self.wanted, self.at = [], wanted, -1
        self.took.clear()
        self.count.clear()


def where_kind_changes(kinds: list[str]) -> set[int]:
    """Return the last node of each part; nodes that do nothing belong to the part after them."""
    doing = [i for i, kind in enumerate(kinds) if kind != NOTHING]
    ends = {i for i, after in pairwise(doing) if kinds[i] != kinds[after]}
    return {*ends, doing[-1]}


def main() -> None:
    parser = options(__doc__, {"--batch": 4, "--rounds": 30, "--threads": 2})
    parser.add_argument("model")
    arguments = parser.parse_args()
    if not Path(arguments.model).is_file():
        parser.error(f"model: expected a GGUF file, found none at {arguments.model}")
    count, drafts = arguments.batch, arguments.batch - 1
    if not 1 <= count <= PROMPT:
        parser.error(f"--batch: expected 1 to {PROMPT}, found {count}")
    if not 1 <= arguments.rounds <= 500:
        parser.error(f"--rounds: expected 1 to 500, found {arguments.rounds}")

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    stops = Stops()
    trunk = Trunk(arguments.model, arguments.threads, drafts, True, time.perf_counter)
    callback = type(trunk.params.cb_eval)
    watched = trunk.beside(cb_eval=ctypes.cast(stops.callback, callback))
    for each in (trunk, watched):
        each.start(PROMPT)
        each.verify(count)
    whole: list[float] = []
    parts: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for i in range(arguments.rounds + 1):
        stops.start(set())
        watched.verify(count)
        kinds = stops.seen
        stops.start(where_kind_changes(kinds))
        watched.verify(count)
        if stops.seen != kinds:
            raise SystemExit("the graph changed between two batches of one size")
        alone = trunk.verify(count)
        if i:  # the first round warms up
            whole.append(alone)
            for kind, took in stops.took.items():
                parts[kind].append((took, stops.count[kind]))
    report(arguments, statistics.median(whole), parts)


def report(
    arguments: argparse.Namespace, total: float, parts: dict[str, list[tuple[float, int]]]
) -> None:
    """Print the table, and one line of JSON. total: milliseconds without stops."""
    stops = sum(seen[0][1] for seen in parts.values())
    watched = sum(statistics.median(ms for ms, _ in seen) for seen in parts.values())
    stop = max(0.0, watched - total) / stops
    rows = {kind: statistics.median(t - n * stop for t, n in seen) for kind, seen in parts.items()}
    rows["outside the graph"] = total - sum(rows.values())
    heading("part", "ms", "share")
    for kind, ms in sorted(rows.items(), key=lambda part: -part[1]):
        row(kind, f"{ms:.2f}", f"{ms / total:.0%}")
    row(f"a batch of {arguments.batch}, rollback included", f"{total:.2f}", "")
    print(f"{stops} stops, for each of which {stop * 1e3:.1f} microseconds are subtracted")
    machine = {"machine": platform.machine(), "threads": arguments.threads}
    record = {"model": Path(arguments.model).name, "batch": arguments.batch, **machine}
    print(json.dumps({**record, "stop_ms": stop, "parts_ms": rows, "total_ms": total}))


if __name__ == "__main__":
    main()
