"""`general.size_label`, kept right when tensors come and go.

A converter that finds no size in a model's name counts the weights ("4.1M", "8x2.0M"); a head more
or less changes that label, a label from the name stays.
"""

from collections.abc import Iterable
from math import prod

from .fastmtp import ID_MAP_TENSOR, SHORT_HEAD_SUFFIX
from .format import TensorSpec, Value, ValueType
from .surgery import Assembly, Metadata

KEY = "general.size_label"


def counted_label(tensors: Iterable[TensorSpec]) -> str:
    """The label that the gguf package gives to a model of these tensors."""
    from gguf import size_label  # noqa: PLC0415  (brings NumPy)

    total = expert = experts = 0
    for tensor in tensors:
        if tensor.name == ID_MAP_TENSOR or tensor.name.endswith(SHORT_HEAD_SUFFIX):
            continue
        size = prod(tensor.shape)
        total += size
        if "_exps." in tensor.name and len(tensor.shape) == 3 and tensor.shape[2]:
            experts = tensor.shape[2]
            expert += size // experts
    shared = total - expert * experts
    return str(size_label(total, shared, expert, experts))


def relabelled(before: Iterable[TensorSpec], after: Assembly) -> Assembly:
    """`after` with its label counted anew, if it was the count of the tensors `before`."""
    label = _text(after.metadata, KEY)
    if label is None or label in (_text(after.metadata, "general.name") or ""):
        return after
    if label != counted_label(before):
        return after
    new = Value(ValueType.STRING, counted_label(piece.spec for piece in after.pieces))
    return Assembly(after.metadata | {KEY: new}, after.pieces)


def _text(metadata: Metadata, key: str) -> str | None:
    held = metadata.get(key)
    return held.data if isinstance(held, Value) and isinstance(held.data, str) else None
