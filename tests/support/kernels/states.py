"""Recurrent states that a graph gathers from a memory, updates and copies back, in all ways in
which they can and cannot stay where they are.

    cd tests; python -m support.kernels.states FOLDER LIBRARY

Prints as JSON for each case how often rows were left in the memory, whether output and memory have
the bits that they have if every copy is made, and what was left to ggml.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .delta_net import draw
from .ggml_calls import F32, I32, Floats, Ggml, Input

SHAPE = (1, 2, 128)
HEADS, SIZE = SHAPE[1:]
ROW = HEADS * SIZE * SIZE
ROWS = 5  # of the memory
MEMORY, IDS = 5, 6  # inputs
LEFT = "GATED_DELTA_NET in place"


@dataclass(frozen=True)
class Case:
    """A graph, and what happens in it beside gathering, updating and copying back."""

    tokens: int = 1
    ids: tuple[int, ...] = (2,)
    snapshots: int = 1
    threads: int = 2
    strided: bool = False  # queries, keys and values are every other head of a tensor
    kept: bool = False  # the gathered rows are an output
    read: bool = False  # another operation reads them
    written: bool = False  # the memory changes after they were gathered
    result_kept: bool = False  # the updated states are an output
    result_read: bool = False  # another operation reads them


CASES = {
    "one": Case(),
    "one thread": Case(threads=1),
    "prompt": Case(tokens=40),
    "strided": Case(strided=True),
    "two sequences": Case(tokens=3, ids=(2, 3)),
    "other order": Case(ids=(3, 2)),
    "snapshots": Case(tokens=5, snapshots=4),
    "kept": Case(kept=True),
    "read": Case(read=True),
    "written": Case(written=True),
    "result kept": Case(result_kept=True),
    "result read": Case(result_read=True),
}


def compute(ggml: Ggml, case: Case) -> Floats:
    """The output or what is read or kept of the result, and the memory after it."""
    base, n = ggml.base, len(case.ids)
    rows, _ = draw(n, case.tokens, SHAPE, per_element=False)
    memory = np.random.default_rng(1).standard_normal((ROWS, ROW), np.float32)
    heads = [np.repeat(rows[name], 1 + case.strided, axis=2) for name in "qkv"]
    inputs: list[Input] = [(F32, x.shape[::-1], x) for x in heads]
    inputs += [(F32, rows[name].shape[::-1], rows[name]) for name in ("g", "beta")]
    inputs += [(F32, (ROW, ROWS), memory), (I32, (n,), np.array(case.ids, np.int32))]
    attention = n * case.tokens * HEADS * SIZE
    slots = min(case.tokens, case.snapshots)

    def build(context: Any, tensors: list[Any]) -> list[Any]:
        view = base.ggml_view_3d
        if case.strided:
            row = SIZE * 4
            shape = (SIZE, HEADS, case.tokens, 2 * row, 2 * row * HEADS, 0)
            tensors = [*(view(context, tensor, *shape) for tensor in tensors[:3]), *tensors[3:]]
        gathered = base.ggml_get_rows(context, tensors[MEMORY], tensors[IDS])
        results = [gathered]
        if case.kept:
            base.ggml_set_output(gathered)
        if case.read:
            results.append(base.ggml_scale(context, gathered, 2.0))
        if case.written:
            other = view(context, tensors[MEMORY], ROW, 1, 1, ROW * 4, ROW * 4, 0)
            place = view(
                context, tensors[MEMORY], ROW, 1, 1, ROW * 4, ROW * 4, case.ids[0] * ROW * 4
            )
            results.append(base.ggml_cpy(context, other, place))
        shaped = base.ggml_reshape_4d(context, gathered, SIZE, SIZE, HEADS, n)
        updated = base.ggml_gated_delta_net(context, *tensors[:5], shaped, case.snapshots)
        if case.result_kept:
            base.ggml_set_output(updated)
        # as llama.cpp has them: the copy before the output
        size = ROW * 4, ROW * n * 4
        new = view(context, updated, ROW, n, slots, *size, attention * 4)
        first = min(case.ids) if slots == 1 else 0
        place = view(context, tensors[MEMORY], ROW, n, slots, *size, first * ROW * 4)
        results.append(base.ggml_cpy(context, new, place))
        output = view(context, updated, attention, 1, 1, attention * 4, attention * 4, 0)
        results.append(base.ggml_scale(context, output, 1.0))
        if case.result_kept:
            results.append(updated)
        if case.result_read:
            results.append(base.ggml_scale(context, new, 2.0))
        return results

    found = [
        ggml.run(case.threads, build, inputs),
        ggml.run(case.threads, build, inputs, result_of=MEMORY),
    ]
    return np.concatenate(found)


def main() -> None:
    folder, library = map(Path, sys.argv[1:])
    ggml = Ggml(folder, library)
    found = {}
    for name, case in CASES.items():
        copies = replace(case, kept=True)
        expected = compute(ggml, copies)
        before = ggml.plugged.computed(LEFT)
        same = all(compute(ggml, case).tobytes() == expected.tobytes() for _ in range(3))
        found[name] = [ggml.plugged.computed(LEFT) - before, same]

    def work(i: int) -> bool:
        mine = Ggml(folder)
        case = Case(tokens=1 + i % 3, ids=(1 + i % 2,), threads=1 + i % 2)
        expected = compute(mine, replace(case, kept=True))
        return all(compute(mine, case).tobytes() == expected.tobytes() for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        found["threads"] = [0, all(pool.map(work, range(8)))]
    print(json.dumps([found, ggml.plugged.left_to_ggml()]))


if __name__ == "__main__":
    main()
