"""Tiny drafters that are no MTP head: random files of Eagle-3, DFlash, DSpark, and an assistant.

Their tensors and keys are those that llama.cpp's loader requires (src/models/eagle3.cpp,
dflash.cpp).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter

from mtp_gguf.gguf_tools.model import open_model

HEADS, SIZE, FFN, RANK, BLOCK = 2, 32, 64, 8, 4


def write_drafter(path: Path, kind: str, trunk: Path, **changed: Any) -> Path:
    """A drafter for `trunk`, with its tokenizer.

    kind: eagle3, dflash, dspark or assistant. changed: other values of keys, without the
    architecture; None leaves a key out. `d2t`: number of tokens that it drafts from.
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
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
        "attention.key_length": SIZE,
        "attention.value_length": SIZE,
        "rope.dimension_count": SIZE,
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
    shapes = _shapes(kind, width, len(keys.get("target_layers", ())), rows)
    if kind == "dspark":
        shapes |= {"markov_w1.weight": (RANK, tokens), "markov_w2.weight": (RANK, rows)}
    noise = np.random.default_rng(1)
    for name, shape in shapes.items():
        values = noise.normal(0, shape[0] ** -0.5, shape[::-1]).astype(np.float32)
        writer.add_tensor(name, np.ones_like(values) if "norm" in name else values)
    if small:
        writer.add_tensor("d2t", np.arange(small, dtype=np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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


def _shapes(kind: str, width: int, layers: int, rows: int) -> dict[str, tuple[int, ...]]:
    """In ggml's order."""
    eagle = kind == "eagle3"
    read = (2 if eagle else 1) * width
    heads = HEADS * SIZE
    shapes: dict[str, tuple[int, ...]] = {
        "output_norm.weight": (width,),
        "output.weight": (width, rows),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.attn_q.weight": (read, heads),
        "blk.0.attn_k.weight": (read, heads),
        "blk.0.attn_v.weight": (read, heads),
        "blk.0.attn_output.weight": (heads, width),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.ffn_gate.weight": (width, FFN),
        "blk.0.ffn_up.weight": (width, FFN),
        "blk.0.ffn_down.weight": (FFN, width),
    }
    if layers:
        shapes["fc.weight"] = (layers * width, width)
    if eagle:
        return shapes | {"blk.0.attn_norm_2.weight": (width,)}
    norms = {f"blk.0.attn_{part}_norm.weight": (SIZE,) for part in ("q", "k")}
    return shapes | norms | {"enc.output_norm.weight": (width,)}
