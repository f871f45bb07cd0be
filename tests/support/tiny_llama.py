"""A `llama` model of random weights: its positions can be shifted, which qwen35's cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

WIDTH, HEADS, FFN, VOCABULARY = 64, 2, 96, 128


def write_tiny_llama(path: Path) -> Path:
    """One layer and a vocabulary of numbers without text."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (VOCABULARY, WIDTH),
        "output_norm": (WIDTH,),
        "output": (VOCABULARY, WIDTH),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.attn_q": (WIDTH, WIDTH),
        "blk.0.attn_k": (WIDTH, WIDTH),
        "blk.0.attn_v": (WIDTH, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_norm": (WIDTH,),
        "blk.0.ffn_gate": (FFN, WIDTH),
        "blk.0.ffn_up": (FFN, WIDTH),
        "blk.0.ffn_down": (WIDTH, FFN),
    }
    draw = np.random.default_rng(1)
    for name, shape in shapes.items():
        weights = draw.normal(0, 0.2, shape) if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(f"{name}.weight", weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
