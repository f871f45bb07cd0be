"""Qwen3-Next in the real sizes of 80B-A3B (512 experts), with two of its layers: upstream's bytes.

Takes 30 GB of disk, 3 GB of memory and some minutes: python -m pytest -m slow THIS_FILE
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from mtp_gguf.gguf_tools.model import open_model
from support import checkpoints
from support.checkpoints import Spec
from support.commands import succeed
from support.upstream.convert_upstream import convert

pytestmark = [pytest.mark.slow, pytest.mark.upstream]

SPEC = Spec(
    "Qwen3-Next-80B-A3B",
    family="qwen3_next",
    hidden=2048,
    intermediate=512,
    layers=2,
    interval=2,
    heads=16,
    kv_heads=2,
    head_dim=256,
    k_heads=16,
    v_heads=32,
    linear_dim=128,
    experts=512,
    experts_per_token=10,
    fused_experts=False,
    rope="plain",
)
PIECE = 1 << 26  # bytes compared at once
POOL = np.random.default_rng(1).standard_normal(1 << 22, np.float32).astype(ml_dtypes.bfloat16)


def write_weights(path: Path) -> None:
    """Write model.safetensors in BF16, one tensor in memory at a time."""

    def no_values(_name: str, shape: tuple[int, ...], _seed: int, _std: float) -> np.ndarray:
        return np.broadcast_to(np.float32(0), shape)

    with mock.patch.object(checkpoints, "_bell", no_values):
        shapes = {name: array.shape for name, array in checkpoints.weights(SPEC)}
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index, shape in enumerate(shapes.values()):
            left, start = int(np.prod(shape)), index * 977
            while left:
                piece = POOL[start % 4096 :][:left]
                file.write(piece.tobytes())
                left -= len(piece)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("real") / SPEC.name
    with mock.patch.object(checkpoints, "stored_tensors", return_value=()):
        checkpoints.write_checkpoint(folder, SPEC)
    path = folder / "model.safetensors"
    write_weights(path)
    yield folder
    path.unlink()


def test_upstreams_bytes(folder: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    succeed("convert", folder, "-o", ours, "--quant", "BF16", "--mtp-type", "BF16")
    convert(folder, theirs, "bf16")
    with open_model(ours) as a, open_model(theirs) as b:
        assert a.tensors.keys() == b.tensors.keys()
        assert a.tensors["blk.2.ffn_down_exps.weight"].shape == (512, 2048, 512)
        for name, tensor in a.tensors.items():
            assert tensor.type is b.tensors[name].type, name
            for start in range(0, tensor.nbytes, PIECE):
                length = min(PIECE, tensor.nbytes - start)
                assert a.read(name, start, length) == b.read(name, start, length), name
    ours.unlink()
    theirs.unlink()
