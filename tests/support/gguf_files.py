"""Inspects GGUF files (tensors, keys, whether llama.cpp loads them) and makes edited copies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gguf import GGUFReader, GGUFWriter, ReaderTensor
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.format import Layout, TensorSpec, Value, lay_out, open_gguf
from mtp_gguf.gguf_tools.files.rewrite import OutputSpec, TensorCopy, write
from mtp_gguf.gguf_tools.files.tensor_types import TensorType
from mtp_gguf.gguf_tools.model import Metadata, open_model
from mtp_gguf.native.runtime import VARIABLE


def tensors_of(path: Path) -> dict[str, ReaderTensor]:
    """The tensors of a GGUF file, read with the gguf package."""
    return {t.name: t for t in GGUFReader(path).tensors}


def value_of(path: Path, key: str) -> Any:
    """What stands under a key of a GGUF file; None when the key is absent."""
    field = GGUFReader(path).get_field(key)
    return None if field is None else field.contents()


def differing(a: Mapping[str, ReaderTensor], b: Mapping[str, ReaderTensor]) -> list[str]:
    """Names of tensors that are not in both, or not of the same type, shape and bytes."""
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a
        or name not in b
        or a[name].tensor_type != b[name].tensor_type
        or [*a[name].shape] != [*b[name].shape]
        or a[name].data.tobytes() != b[name].data.tobytes()
    )


_LOAD = """
import sys
from mtp_gguf.native.runtime import llama_cpp
params = llama_cpp.llama_model_default_params()
sys.exit(0 if llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params) else 3)
"""


def loads(path: Path) -> bool:
    """Whether an unpatched llama.cpp loads a file, weights and all: in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, path],
        env=os.environ | {VARIABLE: "stock"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr
    return done.returncode == 0


TensorEdit = Callable[[dict[str, TensorCopy]], object]


def edited(
    source: Path,
    target: Path,
    *,
    metadata: Callable[[Metadata], object] | Mapping[str, Value | None] | None = None,
    tensors: TensorEdit | None = None,
) -> Path:
    """A copy of a GGUF with edited keys and tensors.

    metadata: what edits the keys, or values to put under keys; None removes a key.
    """
    with open_model(source) as model:
        keys = model.metadata()
        copies = {name: TensorCopy.of(model, name) for name in model.tensors}
        if callable(metadata):
            metadata(keys)
        else:
            for key, value in (metadata or {}).items():
                if value is None:
                    keys.pop(key)
                else:
                    keys[key] = value
        if tensors:
            tensors(copies)
        write(target, OutputSpec(keys, tuple(copies.values())))
    return target


def drop(*beginnings: str) -> TensorEdit:
    """Remove the tensors whose names begin so."""

    def edit(tensors: dict[str, TensorCopy]) -> None:
        for name in [name for name in tensors if name.startswith(beginnings)]:
            del tensors[name]

    return edit


def reshape(name: str, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> TensorEdit:
    """Give a tensor another shape of no more bytes, which are those from its start."""

    def edit(tensors: dict[str, TensorCopy]) -> None:
        spec = tensors[name].spec
        tensors[name] = replace(tensors[name], spec=replace(spec, shape=change(spec.shape)))

    return edit


def renumber(pattern: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> TensorEdit:
    """Change the numbers, rows first, of the tensors in whose names the pattern is found."""

    def edit(tensors: dict[str, TensorCopy]) -> None:
        for name in [name for name in tensors if re.search(pattern, name)]:
            tensors[name] = with_numbers(tensors[name], change(numbers_of(tensors[name])))

    return edit


def greedy_text(path: Path, tokens: int = 24) -> list[int]:
    """llama.cpp's continuation of a fixed prompt at temperature 0."""
    from mtp_gguf.native.runtime import llama_cpp  # noqa: PLC0415

    prompt = [65, 66, 300, 301, 302, 67, 68]
    with closing(llama_cpp.Llama(str(path), n_ctx=128, verbose=False)) as llm:
        generated = []
        for token in llm.generate(prompt, temp=0.0):
            generated.append(int(token))
            if len(generated) == tokens:
                break
    return generated


_DTYPES = {"F32": np.float32, "F16": np.float16, "I64": np.int64}


def numbers_of(tensor: TensorCopy) -> NDArray[Any]:
    """The numbers of a tensor that `edited` hands to an edit, rows first."""
    assert tensor.source is not None
    data = tensor.source.read(tensor.offset, tensor.spec.nbytes)
    return np.frombuffer(data, _DTYPES[tensor.spec.type.name]).reshape(tensor.spec.shape[::-1])


def with_numbers(tensor: TensorCopy, numbers: NDArray[Any]) -> TensorCopy:
    """The same tensor with other numbers, in its type."""
    data = numbers.astype(_DTYPES[tensor.spec.type.name]).tobytes()
    return TensorCopy(tensor.spec, data=data)


def permute_projection(tensors: dict[str, TensorCopy]) -> None:
    """Permute the inputs of the head's projection, as if the head were trained otherwise."""

    def permute(rows: NDArray[Any]) -> NDArray[Any]:
        return rows[:, np.random.default_rng(3).permutation(rows.shape[1])]

    renumber(r"^blk\.4\.nextn\.eh_proj\.weight$", permute)(tensors)


def finish(writer: GGUFWriter) -> None:
    """Write a file of the gguf package to the end."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Tensor = tuple[tuple[int, ...], TensorType, bytes]


def rewritten(
    path: Path, out: Path, keys: Mapping[str, Value | None], tensors: Mapping[str, Tensor | None]
) -> Path:
    """A copy of a GGUF with other keys and tensors; None drops one. Nothing of it is checked."""
    with open_gguf(path) as file:
        metadata: dict[str, Any] = {key: file.value(key) for key in file.keys}
        metadata.update(keys)
        metadata = {key: value for key, value in metadata.items() if value is not None}
        content: dict[str, Tensor | None] = {
            t.name: (t.shape, t.type, bytes(file.source.read(t.offset, t.nbytes)))
            for t in file.tensors
        }
    content.update(tensors)
    remaining = {name: tensor for name, tensor in content.items() if tensor is not None}
    layout = lay_out(
        metadata, [TensorSpec(n, shape, kind) for n, (shape, kind, _) in remaining.items()]
    )
    out.write_bytes(laid_out(layout, [raw for _, _, raw in remaining.values()]))
    return out


def laid_out(layout: Layout, data: Sequence[bytes]) -> bytes:
    """The file of a layout, each tensor's data in its place."""
    file = bytearray(layout.header.ljust(layout.size, b"\0"))
    for offset, part in zip(layout.offsets, data, strict=True):
        file[offset : offset + len(part)] = part
    return bytes(file)


class Rewrite(Protocol):
    """Makes a copy with `rewritten`, in the test's own folder."""

    def __call__(
        self,
        path: Path,
        keys: Mapping[str, Value | None] | None = None,
        tensors: Mapping[str, Tensor | None] | None = None,
    ) -> Path:
        """The copy."""
