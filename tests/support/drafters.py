"""Tiny drafters that are no MTP head: random files of Eagle-3, DFlash, DSpark, and an assistant.

Their tensors and keys are those that llama.cpp's loader requires (src/models/eagle3.cpp,
dflash.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize

from mtp_gguf.gguf_tools.model import open_model
from support.gguf_files import finish

BLOCK = 4  # tokens that DFlash drafts at once


@dataclass(frozen=True)
class Shape:
    """Of the drafter's layer: heads, elements of a key, width of the network; DSpark's rank."""

    heads: int = 2
    key: int = 32
    feed: int = 64
    rank: int = 8


TINY = Shape()


def write_drafter(
    path: Path,
    kind: str,
    trunk: Path,
    shape: Shape = TINY,
    quant: GGMLQuantizationType = GGMLQuantizationType.F32,
    **changed: Any,
) -> Path:
    """A drafter for `trunk`, with its tokenizer.

    kind: eagle3, dflash, dspark or assistant. quant: of its matrices. changed: other values of
    keys, without the architecture; None leaves a key out. `d2t`: number of tokens that it drafts
    from.
    """
    with open_model(trunk) as model:
        assert model.architecture is not None
        width = model.first.integer(f"{model.architecture}.embedding_length")
        layers = model.head.trunk_layers
        tokens = model.vocabulary_size
    assert width is not None
    assert tokens is not None
    architecture = {"dspark": "dflash", "assistant": "gemma4-assistant"}.get(kind, kind)
    small = changed.pop("d2t", None)
    keys: dict[str, Any] = {
        "block_count": 1,
        "context_length": 256,
        "embedding_length": width,
        "feed_forward_length": shape.feed,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.heads,
        "attention.key_length": shape.key,
        "attention.value_length": shape.key,
        "rope.dimension_count": shape.key,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    own: dict[str, dict[str, Any]] = {
        "eagle3": {"target_layers": [1, 2, layers], "target_hidden_size": width},
        "dflash": {"target_layers": [1, layers - 1], "block_size": BLOCK},
        "gemma4-assistant": {"embedding_length_out": width},
    }
    keys |= own[architecture]
    writer = GGUFWriter(path, architecture)
    for key, value in (keys | changed).items():
        _add(writer, f"{architecture}.{key}", value)
    for field in GGUFReader(trunk).fields.values():
        if field.name.startswith("tokenizer.ggml."):
            value = field.contents()
            kinds = [kind for kind in field.types if kind.name != "ARRAY"]
            if len(field.types) > 1:
                writer.add_array(field.name, value)
            else:
                writer.add_key_value(field.name, value, kinds[0])
    if architecture == "dflash":
        writer.add_mask_token_id(0)
    rows = small or tokens
    shapes = _shapes(kind, width, len(keys.get("target_layers", ())), rows, shape)
    if kind == "dspark":
        markov = {"markov_w1.weight": tokens, "markov_w2.weight": rows}
        shapes |= {name: (shape.rank, n) for name, n in markov.items()}
    noise = np.random.default_rng(1)
    for name, sizes in shapes.items():
        if "norm" in name:
            writer.add_tensor(name, np.ones(sizes[::-1], np.float32))
        else:
            values = noise.standard_normal(sizes[::-1], np.float32) * np.float32(sizes[0] ** -0.5)
            writer.add_tensor(name, quantize(values, quant), raw_dtype=quant)
    if small:
        writer.add_tensor("d2t", np.arange(small, dtype=np.int64))
    finish(writer)
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_uint32(key, value)


def _shapes(
    kind: str, width: int, layers: int, rows: int, shape: Shape
) -> dict[str, tuple[int, ...]]:
    """In ggml's order."""
    eagle = kind == "eagle3"
    read = (2 if eagle else 1) * width
    heads = shape.heads * shape.key
    shapes: dict[str, tuple[int, ...]] = {
        "output_norm.weight": (width,),
        "output.weight": (width, rows),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.attn_q.weight": (read, heads),
        "blk.0.attn_k.weight": (read, heads),
        "blk.0.attn_v.weight": (read, heads),
        "blk.0.attn_output.weight": (heads, width),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.ffn_gate.weight": (width, shape.feed),
        "blk.0.ffn_up.weight": (width, shape.feed),
        "blk.0.ffn_down.weight": (shape.feed, width),
    }
    if layers:
        shapes["fc.weight"] = (layers * width, width)
    if eagle:
        return shapes | {"blk.0.attn_norm_2.weight": (width,)}
    norms = {f"blk.0.attn_{part}_norm.weight": (shape.key,) for part in ("q", "k")}
    return shapes | norms | {"enc.output_norm.weight": (width,)}
