"""Replay and snapshots in one process: the same batches and rollbacks, and the memory of each.

    cd tests; python -m support.rollback_ways compare MODEL TOKENS [LAYERS]
    cd tests; python -m support.rollback_ways sizes MODEL [LAYERS]

TOKENS: how many can be rolled back; LAYERS: those on a GPU. `compare` prints how many rows of
logits were compared, how many batches and saved states differ in a bit, and the largest difference
of logits, in standard deviations, and of saved states; `sizes` prints the MiB of recurrent states
without rollback, and with eight tokens by replay and by snapshots.
"""

from __future__ import annotations

import json
import os
import re
import sys

import numpy as np

from mtp_gguf.native.runtime import llama_cpp as llama
from support.rollback_walk import WHOLE, Context, load


def snapshots(model: object, tokens: int) -> Context:
    """A context without replay."""
    os.environ["LLAMA_RS_REPLAY"] = "0"
    try:
        return Context(model, tokens)
    finally:
        del os.environ["LLAMA_RS_REPLAY"]


def compare(path: str, tokens: int, layers: int) -> dict[str, float]:
    """Batches, rollbacks and saved states that snapshots can do, too."""
    model = load(path, layers)
    both = [Context(model, tokens), snapshots(model, tokens)]
    rng = np.random.default_rng(5)
    length = [0, 0]
    seen = {"rows": 0, "batches": 0, "states": 0, "logits moved": 0.0, "states moved": 0.0}
    for step in range(40):
        each = [7, 5] if step == 0 else rng.integers(1, 5, 2).tolist()
        batch = [
            (seq, length[seq] + i, int(rng.integers(0, both[0].n_vocab)))
            for seq in (0, 1)
            for i in range(each[seq])
        ]
        found, wanted = (context.decode(batch) for context in both)
        seen["rows"] += len(batch)
        seen["batches"] += found.tobytes() != wanted.tobytes()
        moved = np.abs(found - wanted).max() / wanted.std()
        seen["logits moved"] = max(seen["logits moved"], float(moved))
        for seq in (0, 1):
            kept = int(rng.integers(max(1, each[seq] - tokens), each[seq] + 1))
            length[seq] += kept
            if kept < each[seq]:
                assert all(context.remove(seq, length[seq]) for context in both)
        saved, known = (np.frombuffer(c.save(step % 2, WHOLE), np.uint32) for c in both)
        parts = saved != known
        seen["states"] += bool(parts.any())
        moved = np.abs(saved[parts].view(np.float32) - known[parts].view(np.float32)).max(initial=0)
        seen["states moved"] = max(seen["states moved"], float(moved))
    return seen


def sizes(path: str, layers: int) -> list[float]:
    """As llama.cpp prints them, rounded to a hundredth."""
    printed: list[str] = []
    collect = llama.llama_log_callback(lambda level, text, data: printed.append(text.decode()))
    llama.llama_log_set(collect, None)
    model = load(path, layers)
    found = []
    for make, tokens in ((Context, 0), (Context, 8), (snapshots, 8)):
        printed.clear()
        make(model, tokens)
        size = re.search(r"RS buffer size = +([0-9.]+) MiB", "".join(printed))
        assert size
        found.append(float(size[1]))
    return found


def main() -> None:
    way, path = sys.argv[1:3]
    numbers = [*map(int, sys.argv[3:]), 0]
    print(json.dumps(compare(path, *numbers[:2]) if way == "compare" else sizes(path, numbers[0])))


if __name__ == "__main__":
    main()
