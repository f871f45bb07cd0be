"""Importance matrices for the tiny checkpoints, in upstream's GGUF format.

The format is that of llama.cpp's tools/imatrix: for every weight matrix `NAME` of the target file
an F32 tensor `NAME.in_sum2` [columns, matrices], the sum of squared inputs per column, and an F32
tensor `NAME.counts` [1, matrices], the number of input rows summed; `matrices` is the number of
experts, or 1. Metadata: general.type, imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from support.checkpoints import Spec

DATASET = "calibration.txt"
CHUNKS = 4
CHUNK_SIZE = 512
ALIGNMENT = 32

F32 = NDArray[np.float32]
_GGUF_U32, _GGUF_STRING, _GGUF_ARRAY = 4, 8, 9


def _matrices(spec: Spec) -> Iterator[tuple[str, int, int]]:
    """Yield (GGUF name, columns, experts) of what a calibration run of llama.cpp sees.

    That is the trunk alone: a run does not evaluate the MTP block, nor record the embedding and,
    unless asked, the output. One matrix of the MoE checkpoints is left out (an older build may).
    """
    h, f = spec.hidden, spec.intermediate
    for i in range(spec.layers):
        if spec.is_full(i):
            inputs = {"attn_q": h, "attn_k": h, "attn_v": h, "attn_output": spec.q_dim}
        else:
            narrow = ("ssm_ba",) if spec.family == "qwen3_next" else ("ssm_alpha", "ssm_beta")
            inputs = dict.fromkeys(("attn_qkv", "attn_gate", *narrow), h)
            inputs["ssm_out"] = spec.value_dim
        ffn = {"ffn_gate": h, "ffn_up": h, "ffn_down": f}
        if spec.experts:
            inputs |= {"ffn_gate_inp": h}
            inputs |= {f"{name}_shexp": n for name, n in ffn.items()}
        else:
            inputs |= ffn
        if spec.experts and i == 0:
            del inputs["attn_gate"]
        for name, columns in inputs.items():
            yield f"blk.{i}.{name}.weight", columns, 1
        if spec.experts:
            for name, columns in ffn.items():
                yield f"blk.{i}.{name}_exps.weight", columns, spec.experts


def imatrix_entries(spec: Spec) -> dict[str, tuple[F32, F32]]:
    """Give {GGUF name: (in_sum2 [matrices, columns], counts [matrices])} for a checkpoint.

    Mean squares lie between 0.001 and 16 and every column has its own, so that importance moves
    roundings. The last expert of each layer was never chosen: count 0, sums 0.
    """
    entries = {}
    for name, columns, experts in _matrices(spec):
        words = np.random.PCG64([spec.seed, zlib.crc32(name.encode())]).random_raw(
            experts * columns
        )
        steps = (words >> np.uint64(50)).astype(np.float32)  # 14 bits
        mean_square = (steps / np.float32(4096)) ** np.float32(2) + np.float32(0.001)
        counts = np.full(experts, CHUNKS * CHUNK_SIZE, np.float32)
        if experts > 1:
            counts = counts / np.float32(4) - np.arange(experts, dtype=np.float32)
            counts[-1] = 0
        entries[name] = (mean_square.reshape(experts, columns) * counts[:, None], counts)
    return entries


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def write_imatrix(path: Path, spec: Spec) -> Path:
    """Write the importance matrix of a checkpoint and return its path."""
    keys = [
        _string("general.type") + struct.pack("<I", _GGUF_STRING) + _string("imatrix"),
        _string("imatrix.datasets")
        + struct.pack("<IIQ", _GGUF_ARRAY, _GGUF_STRING, 1)
        + _string(DATASET),
        _string("imatrix.chunk_count") + struct.pack("<II", _GGUF_U32, CHUNKS),
        _string("imatrix.chunk_size") + struct.pack("<II", _GGUF_U32, CHUNK_SIZE),
    ]
    infos, data = [], b""
    for name, (sums, counts) in sorted(imatrix_entries(spec).items()):
        for suffix, array in ((".in_sum2", sums), (".counts", counts[:, None])):
            # ggml drops trailing dimensions of 1, and puts the fastest first.
            shape = [*reversed(array.shape)]
            while len(shape) > 1 and shape[-1] == 1:
                shape.pop()
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            infos.append(_string(name + suffix) + dims + struct.pack("<IQ", 0, len(data)))
            data += array.astype("<f4").tobytes()
            data += bytes(-len(data) % ALIGNMENT)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join([*keys, *infos])
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
    return path
