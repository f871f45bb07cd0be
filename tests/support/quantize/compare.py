"""Compare the kernels with ggml; prints each difference and exits with their number.

As a program, so that a test can force an instruction set or survive an assertion in ggml:
    cd tests; python -m support.quantize.compare [--values N] [--kernel NAME] [--not-finite]
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from mtp_gguf.gguf_tools.files.tensor_types import F16, TensorType
from mtp_gguf.quantize import quantizer
from support.quantize.cases import (
    CASES,
    KINDS,
    SOURCES,
    Rows,
    Weights,
    has_kernel,
    reference,
    rows_of,
    weights_of,
)


def difference(kind: TensorType, rows: Rows, weights: Weights | None) -> str | None:
    """Where the kernel's bytes differ from ggml's, if they do; NaN and infinity included."""
    ours, _ = quantizer.quantize_rows(kind, rows, weights, count_not_finite=False)
    theirs = reference(kind, rows, weights)
    if np.array_equal(ours, theirs):
        return None
    row, byte = np.argwhere(ours != theirs)[0]
    return f"row {row}, byte {byte}: expected {theirs[row, byte]}, found {ours[row, byte]}"


def with_not_finite(rows: Rows, seed: int) -> Rows:
    """The rows with NaN or an infinity in every third one."""
    rng = np.random.default_rng(seed)
    rows = rows.copy()
    for row in range(0, len(rows), 3):
        rows[row, rng.integers(rows.shape[1])] = rng.choice([np.nan, np.inf, -np.inf])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", type=int, default=100_000)
    parser.add_argument("--kernel", help="fail unless this is what quantizes")
    parser.add_argument("--not-finite", action="store_true")
    arguments = parser.parse_args()
    failures = 0
    for kind in (*KINDS, F16):
        for weighted in (False, True):
            found = quantizer.kernel(kind, weighted)
            expected = arguments.kernel if has_kernel(kind, weighted) else "ggml"
            if arguments.kernel and found.split(":")[0] != expected:
                print(f"{kind.name}: expected the kernel {expected}, found {found}")
                failures += 1
            for case in CASES:
                length = max(kind.block_length, 16) * 3
                shape = max(arguments.values // len(CASES) // len(SOURCES) // length, 2), length
                for source in SOURCES:
                    rows = rows_of(case, source, shape)
                    if arguments.not_finite:
                        rows = with_not_finite(rows, seed=kind.id)
                    text = difference(kind, rows, weights_of(length) if weighted else None)
                    if text:
                        print(f"{kind.name} {case} {source} {'weighted' * weighted}: {text}")
                        failures += 1
    return min(failures, 100)


if __name__ == "__main__":
    sys.exit(main())
