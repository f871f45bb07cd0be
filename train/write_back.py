"""The tensors and metadata of a trained head, for a GGUF."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.format import TensorSpec, Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import TensorCopy
from mtp_gguf.gguf_tools.files.tensor_types import F16, F32, TensorType
from mtp_gguf.quantize import ggml

# llama.cpp keeps the router of a mixture of experts in F32.
_ALWAYS_F32 = ("ffn_gate_inp.weight",)
KEY_PREFIX = "mtp_gguf.train."


def head_tensors(
    weights: Mapping[str, NDArray[np.float32]], block: int, kind: TensorType
) -> list[TensorCopy]:
    """The tensors of an MTP block `block`, with matrices in the type `kind`.

    weights: by suffix; those of a chain, whose first block it is, by number, a dot, and suffix.
    kind: one that `check_type` accepts. Rows that its blocks do not divide are stored in F16.
    RequestError for weights that do not fit it.
    """
    ggml.prepare(kind)
    out = []
    for suffix, array in sorted(weights.items()):
        used = kind if array.shape[-1] % kind.block_length == 0 else F16
        if array.ndim == 1 or suffix.endswith(_ALWAYS_F32):
            used = F32
        number, _, rest = suffix.partition(".")
        name = f"blk.{block + int(number)}.{rest}" if number.isdigit() else f"blk.{block}.{suffix}"
        rows = np.ascontiguousarray(array, np.float32).reshape(-1, array.shape[-1])
        try:
            data = rows.tobytes() if used is F32 else ggml.quantize(used, rows).tobytes()
        except ggml.GgmlError as error:
            raise RequestError(f"{name}: {error}") from None
        out.append(TensorCopy(TensorSpec(name, array.shape[::-1], used), data=data))
    return out


def check_type(kind: TensorType) -> None:
    """RequestError for a type that needs an importance matrix."""
    if ggml.needs_importance(kind):
        raise RequestError(
            f"--mtp-type: {kind.name} needs an importance matrix, which a trained head does not "
            "have; choose Q4_K or a larger type"
        )


def train_keys(facts: Mapping[str, Any]) -> dict[str, Value]:
    """Metadata that say how a head was trained: strings, whole numbers, or lists of rates."""
    keys = {}
    for name, fact in facts.items():
        kind = ValueType.F32
        if isinstance(fact, str):
            kind = ValueType.STRING
        elif isinstance(fact, int):
            kind = ValueType.U64
        keys[KEY_PREFIX + name] = Value(kind, fact)
    return keys
