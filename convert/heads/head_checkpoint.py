"""The head of a checkpoint from that of a GGUF: the reverse of a conversion, for one MTP block."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..families.qwen import DENSE_FFN, FULL_ATTENTION, MTP, NORMS, SHARED_EXPERT, Entry, Transform

Arrays = dict[str, NDArray[np.float32]]


def checkpoint_head(weights: Mapping[str, NDArray[np.float32]]) -> Arrays:
    """The `mtp.*` tensors of a checkpoint, from the weights of an MTP block by suffix.

    Experts are written as transformers has them, all of a projection in one tensor.
    """
    out: Arrays = {}
    for prefix, entries in (
        ("mtp.", MTP),
        ("mtp.layers.0.", (*NORMS, *FULL_ATTENTION, *DENSE_FFN, *SHARED_EXPERT)),
    ):
        for entry in entries:
            if entry.target in weights:
                out[prefix + entry.source] = _reversed(entry, weights[entry.target])
    if "ffn_down_exps.weight" in weights:
        parts = [weights[f"ffn_{name}_exps.weight"] for name in ("gate", "up")]
        out["mtp.layers.0.mlp.experts.gate_up_proj"] = np.concatenate(parts, axis=1)
        out["mtp.layers.0.mlp.experts.down_proj"] = weights["ffn_down_exps.weight"]
    return {name: np.ascontiguousarray(array, np.float32) for name, array in out.items()}


def _reversed(entry: Entry, array: NDArray[np.float32]) -> NDArray[np.float32]:
    if entry.transform is Transform.NORM:
        return np.subtract(array, 1, dtype=np.float32)
    return array[None] if entry.target == "ffn_gate_inp_shexp.weight" else array
