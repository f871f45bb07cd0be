"""Describes a GGUF file for comparisons: hashes of tensors and values of keys, read with `gguf`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, ReaderField

# Longer arrays are kept as a length and a hash.
LONGEST_ARRAY = 16


@dataclass(frozen=True)
class Tensor:
    """One tensor: type name, shape in ggml order (fastest dimension first), what identifies it.

    `data` is 16 hex digits of the SHA-256 of the tensor's bytes, or for the few values of a
    `blk.N.ssm_a` the bytes themselves in hex, because these are compared within a tolerance.
    """

    type: str
    shape: tuple[int, ...]
    data: str


@dataclass(frozen=True)
class Description:
    """A GGUF file: tensors in file order, and {key: [type, value]}."""

    tensors: dict[str, Tensor]
    metadata: dict[str, list[Any]]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _value(field: ReaderField) -> list[Any]:
    kind = " ".join(t.name for t in field.types)
    value = field.contents()
    if field.types[0] == GGUFValueType.ARRAY and len(value) > LONGEST_ARRAY:
        return [kind, len(value), digest("\0".join(map(str, value)).encode())]
    return [kind, value]


def describe(path: Path) -> Description:
    """Read a GGUF file whole and describe it."""
    reader = GGUFReader(path)
    tensors = {}
    for tensor in reader.tensors:
        raw = tensor.data.tobytes()
        data = raw.hex() if tensor.name.endswith(".ssm_a") else digest(raw)
        shape = tuple(int(n) for n in tensor.shape)
        tensors[tensor.name] = Tensor(tensor.tensor_type.name, shape, data)
    keys = {k: _value(f) for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    return Description(tensors, keys)
