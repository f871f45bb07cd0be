"""Checkpoints with a fault: their tensors, headers and JSON files, changed in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from support import checkpoints
from support.checkpoints import NUMPY_DTYPES, Array, Spec, write_checkpoint, write_safetensors


def write_repeating(folder: Path, spec: Spec) -> Path:
    """A large checkpoint at little cost: its matrices repeat one short run of weights."""
    run = np.random.default_rng(0).standard_normal(4099).astype(np.float32) / 32
    with patch.object(checkpoints, "_bell", lambda _name, shape, *_: np.resize(run, shape)):
        return write_checkpoint(folder, spec)


def read_tensors(path: Path) -> dict[str, Array]:
    """Every tensor of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            data[8 + length + e["data_offsets"][0] : 8 + length + e["data_offsets"][1]],
            NUMPY_DTYPES[e["dtype"]],
        ).reshape(e["shape"])
        for name, e in header.items()
    }


def edit_tensors(folder: Path, edit: Callable[[dict[str, Array]], object]) -> None:
    """Rewrite model.safetensors after `edit` had its way with the tensors."""
    path = folder / "model.safetensors"
    tensors = read_tensors(path)
    edit(tensors)
    write_safetensors(path, tensors)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the header of a safetensors file and leave its data as they are."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a JSON file after `edit` had its way with the object in it."""
    value = json.loads(path.read_text(encoding="utf-8"))
    edit(value)
    path.write_text(json.dumps(value), encoding="utf-8")


# The pre-tokenizer or decoder of byte-level BPE, with a split of its own before it.
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}


def add_tokens(tokenizer: dict[str, Any], *texts: str, **flags: bool) -> None:
    """Add tokens to the content of a tokenizer.json."""
    first = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] += [
        {"id": first + i, "content": text, **off, **flags} for i, text in enumerate(texts)
    ]


def add_mtp_layer(folder: Path, *, with_tensors: bool = True) -> None:
    """Claim a second MTP layer in a config that is not nested, with the tensors of the first."""
    edit_json(folder / "config.json", lambda config: config.update(mtp_num_hidden_layers=2))

    def edit(tensors: dict[str, Array]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.layers.0.")]:
            tensors[name.replace(".0.", ".1.", 1)] = tensors[name]

    if with_tensors:
        edit_tensors(folder, edit)
