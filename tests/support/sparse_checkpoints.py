"""Checkpoints of any size that take no room: real headers, and weights that are holes in the files.

They can be planned, and converted as far as anybody wants zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np

from support import checkpoints
from support.checkpoints import NUMPY_DTYPES, Array, Spec, safetensors_header, write_checkpoint

# A terabyte in 16 bits: 600 experts in each of 60 layers, one tensor for each matrix, 200 files.
TERABYTE = Spec(
    "terabyte",
    hidden=4096,
    intermediate=1152,
    layers=60,
    interval=4,
    heads=32,
    kv_heads=2,
    head_dim=256,
    k_heads=16,
    v_heads=64,
    linear_dim=128,
    vocab_size=248320,
    experts=600,
    experts_per_token=10,
    fused_experts=False,
    shards=200,
)


def write_sparse(folder: Path, spec: Spec) -> None:
    """Write a checkpoint without its weights; its experts must be stored one by one."""

    def shapes(spec: Spec) -> Iterator[tuple[str, Array]]:
        for plain, array in checkpoints.weights(spec):
            dtype = NUMPY_DTYPES[checkpoints._stored_dtype(spec, plain)]
            zeros = np.broadcast_to(np.zeros((), dtype), array.shape)
            yield checkpoints._stored_name(spec, plain), zeros

    def no_weights(_name: str, shape: tuple[int, ...], _seed: int, _std: float) -> Array:
        return np.broadcast_to(np.float32(0), shape)

    def headers(path: Path, tensors: dict[str, Array]) -> None:
        header = safetensors_header(tensors)
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(array.nbytes for array in tensors.values()))

    with patch.multiple(
        checkpoints, _bell=no_weights, stored_tensors=shapes, write_safetensors=headers
    ):
        write_checkpoint(folder, spec)
