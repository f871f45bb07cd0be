"""A copy of a GGUF file with some of its keys and tensors changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.format import TensorSpec, Value, lay_out, open_gguf
from mtp_gguf.gguf_tools.tensor_types import TensorType

Tensor = tuple[tuple[int, ...], TensorType, bytes]
Rewrite = Callable[..., Path]


@pytest.fixture
def rewrite(tmp_path: Path) -> Rewrite:
    """Copy a GGUF with some keys and tensors changed; None drops one."""

    def copy(
        path: Path,
        keys: Mapping[str, Value | None] | None = None,
        tensors: Mapping[str, Tensor | None] | None = None,
    ) -> Path:
        with open_gguf(path) as file:
            metadata: dict[str, Any] = {key: file.value(key) for key in file.keys}
            metadata.update(keys or {})
            metadata = {key: value for key, value in metadata.items() if value is not None}
            content: dict[str, Tensor | None] = {
                t.name: (t.shape, t.type, bytes(file.source.read(t.offset, t.nbytes)))
                for t in file.tensors
            }
        content.update(tensors or {})
        kept = {name: tensor for name, tensor in content.items() if tensor is not None}
        layout = lay_out(
            metadata, [TensorSpec(n, shape, kind) for n, (shape, kind, _) in kept.items()]
        )
        data = bytearray(layout.size)
        data[: len(layout.header)] = layout.header
        for offset, (_, _, raw) in zip(layout.offsets, kept.values(), strict=True):
            data[offset : offset + len(raw)] = raw
        out = tmp_path / f"rewritten-{len(list(tmp_path.iterdir()))}.gguf"
        out.write_bytes(data)
        return out

    return copy
