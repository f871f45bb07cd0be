"""Compares rollback by replay on ggml's CPU backend with the gated delta net token by token.

    cd tests; python -m support.kernels.rollback FOLDER

Prints how many results were compared, and those that differ in a bit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from .ggml_calls import Floats, Ggml

SHAPES = ((2, 4, 16), (2, 4, 20), (1, 3, 64), (2, 2, 128))  # heads of q and k, heads of v, d
SEQUENCES = 3
BATCHES = 12


def draw(rng: np.random.Generator, tokens: int, shape: tuple[int, int, int]) -> dict[str, Floats]:
    """Inputs of `tokens` for each of the sequences."""
    k_heads, heads, d = shape
    row = (SEQUENCES, tokens)
    made = {
        "q": rng.standard_normal((*row, k_heads, d)),
        "k": rng.standard_normal((*row, k_heads, d)),
        "v": rng.standard_normal((*row, heads, d)),
        "g": -rng.exponential(0.3, (*row, heads)),
        "beta": rng.uniform(0, 1, (*row, heads)),
    }
    made["k"] /= np.linalg.norm(made["k"], axis=-1, keepdims=True)
    return {name: values.astype(np.float32) for name, values in made.items()}


def walk(ggml: Ggml, shape: tuple[int, int, int], n_log: int, threads: int) -> tuple[int, int]:
    """Batches of random lengths of which random prefixes are kept: results compared, differing."""
    k_heads, heads, d = shape
    rng = np.random.default_rng([*shape, n_log])
    state, log = heads * d * d, (k_heads + heads) * d + heads
    memory = np.full((SEQUENCES, state + n_log * log), np.nan, np.float32)
    memory[:, :state] = rng.standard_normal((SEQUENCES, state))
    kept = np.zeros(SEQUENCES, np.int32)
    wanted = memory[:, :state].reshape(SEQUENCES, heads, d, d)
    ids = np.arange(SEQUENCES, dtype=np.int32)
    seen = wrong = 0

    def compare(found: Floats, want: Floats) -> None:
        nonlocal seen, wrong
        seen += 1
        wrong += found.tobytes() != want.tobytes()

    for step in range(BATCHES):
        # now and then more tokens than the kernel takes at a time
        tokens = int(rng.integers(1, n_log + 4)) + (32 if step % 4 == 3 else 0)
        logged = min(tokens - 1, n_log)
        rows = draw(rng, tokens, shape)
        outputs, new = ggml.replay(rows, memory, ids, kept, n_log, threads)
        _, states = ggml.replay(draw(rng, 0, shape), memory, ids, kept, n_log, threads)
        compare(states[:, :state].reshape(wanted.shape), wanted)
        in_place, after_all = ggml.replay_in_place(rows, memory[ids], kept, n_log, threads)
        written = state + logged * log
        compare(in_place, outputs)
        compare(after_all[:, :written].copy(), new[:, :written].copy())

        kept = rng.integers(0, logged + 1, SEQUENCES).astype(np.int32)
        wanted = wanted.copy()
        for seq in range(SEQUENCES):
            after = wanted[seq]
            for t in range(tokens):
                one = {name: np.ascontiguousarray(v[seq, t : t + 1]) for name, v in rows.items()}
                output, (after,) = ggml.recurrence(one, after, 1, threads)
                compare(outputs[seq, t], output[0])
                if t == tokens - logged + kept[seq] - 1:
                    wanted[seq] = after
        # rows are where a memory may have moved them; what was not written must not be read
        ids = rng.permutation(SEQUENCES).astype(np.int32)
        memory = np.full_like(memory, np.nan)
        memory[ids, : state + logged * log] = new[:, : state + logged * log]
    return seen, wrong


def main() -> None:
    ggml = Ggml(*map(Path, sys.argv[1:]))
    results = {
        f"{shape} {n_log} {threads}": walk(ggml, shape, n_log, threads)
        for shape in SHAPES
        for n_log in (0, 1, 3, 8)
        for threads in (1, 4)
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
