"""The gated delta net on ggml's CPU backend, in batches and one token at a time, and in float64.

    cd tests; python -m support.kernels.delta_net FOLDER

Prints one JSON object: how many results were compared, those of batches that differ in a bit from
single tokens, and those that are far from float64.
"""

from __future__ import annotations

import json
import sys
from ctypes import c_void_p
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .ggml_calls import F32, Floats, Ggml, Input

# Heads of q and k, heads of v, d. Rows of 12 and 20 floats fill no vector; 16 and 64 fill some.
SHAPES = ((1, 1, 12), (2, 4, 16), (3, 3, 20), (1, 3, 64), (2, 2, 128))
ALL = range(1, 71)  # the kernel takes 32 tokens at a time
SOME = (1, 2, 31, 32, 33, 64, 65, 70)
LONG = 512
THREADS = (1, 2, 3, 4)
MAX_NMSE = 1e-7  # that of GATED_DELTA_NET in ggml's tests/test-backend-ops.cpp

Wide = npt.NDArray[np.float64]


@dataclass
class Results:
    """What was compared, and the names of results that are wrong."""

    compared: int = 0
    other_bits: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)

    def compare(self, name: str, found: Floats, alone: Floats) -> None:
        """Note whether the bits are the same."""
        self.compared += 1
        if found.tobytes() != alone.tobytes():
            self.other_bits.append(name)


def draw(
    sequences: int, tokens: int, shape: tuple[int, int, int], per_element: bool
) -> tuple[dict[str, Floats], Floats]:
    """Inputs [sequences, tokens, heads, …] and first states; per_element: a decay for each row of
    k, as in Kimi Linear.
    """
    k_heads, heads, d = shape
    rng = np.random.default_rng([*shape, sequences, per_element])
    row = (sequences, tokens)
    made = {
        "q": rng.standard_normal((*row, k_heads, d)),
        "k": rng.standard_normal((*row, k_heads, d)),
        "v": rng.standard_normal((*row, heads, d)),
        "g": -rng.exponential(0.3, (*row, heads, d if per_element else 1)),
        "beta": rng.uniform(0, 1, (*row, heads, 1)),
    }
    made["k"] /= np.linalg.norm(made["k"], axis=-1, keepdims=True)
    state = rng.standard_normal((sequences, heads, d, d)).astype(np.float32)
    return {name: values.astype(np.float32) for name, values in made.items()}, state


def compute(
    ggml: Ggml, rows: dict[str, Floats], state: Floats, snapshots: int, threads: int
) -> tuple[Floats, Floats]:
    """The output [sequences, tokens, heads, d] and the states [snapshots, sequences, heads, d, d],
    the last first. Heads of q, k and v lie apart, with NaN between them.
    """
    sequences, tokens, heads, d = rows["v"].shape
    inputs: list[Input] = []
    for name in "qkv":
        apart = np.full((sequences, tokens, 2 * rows[name].shape[2], d), np.nan, np.float32)
        apart[:, :, ::2] = rows[name]
        inputs.append((F32, apart.shape[::-1], apart))
    inputs += [(F32, rows[name].shape[::-1], rows[name]) for name in ("g", "beta")]
    inputs += [(F32, state.shape[::-1], state)]
    view = ggml.base.ggml_view_4d

    def build(context: c_void_p, tensors: list[c_void_p]) -> c_void_p:
        seen = []
        for name, tensor in zip("qkv", tensors, strict=False):
            n = rows[name].shape[2]
            strides = 8 * d, 8 * d * n, 8 * d * n * tokens
            seen.append(view(context, tensor, d, n, tokens, sequences, *strides, 0))
        found: c_void_p = ggml.base.ggml_gated_delta_net(context, *seen, *tensors[3:], snapshots)
        return found

    out = ggml.run(threads, build, inputs)
    cut = sequences * tokens * heads * d
    return (
        out[:cut].reshape(sequences, tokens, heads, d),
        out[cut:].reshape(snapshots, sequences, heads, d, d),
    )


def in_float64(rows: dict[str, Floats], state: Floats) -> tuple[Wide, Wide]:
    """The output and the last state."""
    s = state.astype(np.float64)
    sequences, tokens, heads, d = rows["v"].shape
    repeat = heads // rows["q"].shape[2]
    outputs = np.empty((sequences, tokens, heads, d))
    for t in range(tokens):
        # v head i uses the head i % heads of q and k
        q, k = (np.tile(rows[name][:, t].astype(np.float64), (1, repeat, 1)) for name in "qk")
        s *= np.exp(rows["g"][:, t].astype(np.float64))[:, :, None, :]
        missing = (rows["v"][:, t] - np.einsum("bhji,bhi->bhj", s, k)) * rows["beta"][:, t]
        s += missing[..., None] * k[:, :, None, :]
        outputs[:, t] = np.einsum("bhji,bhi->bhj", s, q) / np.sqrt(d)
    return outputs, s


def is_near(found: Floats, exact: Wide) -> bool:
    """Whether the error is within ggml's limit."""
    error = np.square(found.astype(np.float64) - exact).sum()
    return bool(error <= MAX_NMSE * np.square(exact).sum())


def cases(shape: tuple[int, int, int]) -> list[tuple[int, bool, tuple[int, ...]]]:
    """Sequences, whether each element has a decay, and batches."""
    long = (LONG,) if shape[2] == 128 else ()
    every = tuple(ALL) if shape[2] in (16, 128) else SOME
    return [(1, False, every + long), (3, False, SOME), (1, True, SOME), (2, True, (5, 40))]


def check(ggml: Ggml, shape: tuple[int, int, int], results: Results) -> None:
    """Compare all batches of a shape."""
    for sequences, per_element, batches in cases(shape):
        rows, first = draw(sequences, max(batches), shape, per_element)
        state, outputs, states = first, [], []
        for t in range(max(batches)):
            token = {name: np.ascontiguousarray(v[:, t : t + 1]) for name, v in rows.items()}
            output, (state,) = compute(ggml, token, state, 1, 1)
            outputs.append(output)
            states.append(state)
        alone = np.concatenate(outputs, axis=1)
        name = f"{shape} {sequences} {per_element}"
        exact, last = in_float64(rows, first)
        results.compared += 2
        if not is_near(alone, exact) or not is_near(state, last):
            results.inexact.append(name)
        for i, batch in enumerate(batches):
            some = {key: np.ascontiguousarray(v[:, :batch]) for key, v in rows.items()}
            snapshots = 1 if i % 3 else 4
            threads = THREADS[i % len(THREADS)]
            output, after = compute(ggml, some, first, snapshots, threads)
            results.compare(f"{name} {batch}", output, np.ascontiguousarray(alone[:, :batch]))
            for back in range(min(batch, snapshots)):
                results.compare(f"{name} {batch} -{back}", after[back], states[batch - 1 - back])


def main() -> None:
    ggml, results = Ggml(*map(Path, sys.argv[1:])), Results()
    for shape in SHAPES:
        check(ggml, shape, results)
    print(json.dumps(vars(results)))


if __name__ == "__main__":
    main()
