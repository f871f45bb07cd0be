"""Measure the cost of being able to roll back drafts: snapshots and replay, 1 to 4 tokens.

    python benchmarks/rollback.py MODEL.gguf [--tokens 3,8] [--rounds 15]

For each number of tokens there are two contexts, one with snapshots and one with replay, and in
addition one that cannot roll back. They alternate for every batch; the table shows medians in
milliseconds. After each batch all tokens but one are rolled back ("one kept"), or none ("all kept":
the next batch replays the most). Memory is as llama.cpp prints it: recurrent states and compute
buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from mtp_gguf.native.runtime import llama_cpp as llama

PROMPT = 64
BATCHES = range(1, 5)
SWITCH = "LLAMA_RS_REPLAY"
WAYS = ("none", "snapshots", "replay")

_printed: list[str] = []


@llama.llama_log_callback
def _collect(_level: int, text: bytes, _data: object) -> None:
    _printed.append(text.decode(errors="replace"))


class Trunk:
    """Return a context that can roll back `tokens` in one of the WAYS."""

    def __init__(self, model: object, way: str, tokens: int, threads: int) -> None:
        os.environ[SWITCH] = "0" if way == "snapshots" else "1"
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 1024, 512, 512
        params.n_rs_seq = tokens
        params.n_threads = params.n_threads_batch = threads
        _printed.clear()
        self.context = llama.llama_init_from_model(model, params)
        self.states, self.compute = (
            sum(map(float, re.findall(rf"{what} buffer size = +([0-9.]+) MiB", "".join(_printed))))
            for what in ("RS", "compute")
        )
        self.memory = llama.llama_get_memory(self.context)
        self.batch = llama.llama_batch_init(512, 0, 1)
        self.ids = np.random.default_rng(1).integers(0, 20_000, 1024).tolist()
        self.start()

    def start(self) -> None:
        """Evaluate a prompt with empty memory."""
        llama.llama_memory_clear(self.memory, True)
        self.at = 0
        self.decode(PROMPT)

    def decode(self, count: int) -> None:
        """Decode the next `count` tokens, with the logits of all."""
        for i in range(count):
            self.batch.token[i], self.batch.pos[i] = self.ids[self.at + i], self.at + i
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
            self.batch.logits[i] = True
        self.batch.n_tokens = count
        if llama.llama_decode(self.context, self.batch):
            raise RuntimeError("llama_decode failed")
        llama.llama_synchronize(self.context)
        self.at += count

    def verify(self, count: int, kept: int) -> float:
        """Return the milliseconds of a batch after which all but `kept` tokens are rolled back."""
        if self.at + count > len(self.ids):
            self.start()
        began = time.perf_counter()
        self.decode(count)
        if kept < count:
            self.at -= count - kept
            if not llama.llama_memory_seq_rm(self.memory, 0, self.at, -1):
                raise RuntimeError("llama_memory_seq_rm refused")
        return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", default="3,8", help="tokens to roll back; at least 3")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if not Path(arguments.model).is_file():
        parser.error(f"model: expected a GGUF file, found none at {arguments.model}")
    llama.llama_log_set(_collect, None)
    model = llama.llama_model_load_from_file(
        arguments.model.encode(), llama.llama_model_default_params()
    )
    tokens = [int(count) for count in arguments.tokens.split(",")]
    trunks = {("none", 0): Trunk(model, "none", 0, arguments.threads)}
    for count in tokens:
        for way in WAYS[1:]:
            trunks[way, count] = Trunk(model, way, count, arguments.threads)

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
        name: {what: round(statistics.median(values), 2) for what, values in row.items()}
        for name, row in seen.items()
    }
    columns = [f"{batch}, {kept} kept" for batch in BATCHES for kept in sorted({1, batch})]
    print("| rollback of | states, MiB | compute, MiB |", " | ".join(columns), "|")
    print("| --- " * (len(columns) + 3) + "|")
    for (way, count), trunk in trunks.items():
        row = results[f"{way} {count}"]
        cells = " | ".join(f"{row[c]:.1f}" if c in row else "" for c in columns)
        print(f"| {count} by {way} | {trunk.states:.1f} | {trunk.compute:.1f} | {cells} |")
    print(json.dumps({"threads": arguments.threads, "results": results}))


if __name__ == "__main__":
    main()
