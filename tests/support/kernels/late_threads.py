"""Compute graphs in which the other thread is late, as if it had no CPU.

    cd tests; python -m support.kernels.late_threads FOLDER LIBRARY

Prints as JSON how many threads computed each of them. They have attention, too.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .ggml_calls import F16, F32, Ggml

GRAPHS = 4
LATE = 0.1  # seconds
LENGTH, KEY = 64, 64


def main() -> None:
    ggml = Ggml(*map(Path, sys.argv[1:]))
    used: list[int] = []

    def compute(_result: int, _input: int, thread: int, threads: int, _data: int) -> None:
        if thread == 0:
            used.append(threads)
        else:
            time.sleep(LATE)

    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_int] * 2, ctypes.c_void_p)
    operation = kind(compute)
    custom = ggml.base.ggml_map_custom1
    custom.restype = ctypes.c_void_p
    custom.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int, ctypes.c_void_p]
    cache = np.ones((1, LENGTH, KEY), np.float16)
    inputs = [
        (F32, (1,), np.ones(1, np.float32)),
        (F32, (KEY, 1, 1), np.ones(KEY, np.float32)),
        (F16, (KEY, LENGTH, 1), cache),
        (F16, (KEY, LENGTH, 1), cache),
        (F16, (LENGTH, 1), np.zeros(LENGTH, np.float16)),
    ]

    def build(context: Any, tensors: list[Any]) -> Any:
        late = custom(context, tensors[0], operation, -1, None)  # by all threads
        attention = ggml.base.ggml_flash_attn_ext(context, *tensors[1:], KEY**-0.5, 0.0, 0.0)
        return [late, attention]

    for _ in range(GRAPHS):
        ggml.run(2, build, inputs)
    print(json.dumps(used))


if __name__ == "__main__":
    main()
