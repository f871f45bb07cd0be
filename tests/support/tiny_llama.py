"""Models of random weights without an MTP head: `llama`, others of its shape, and `mamba`.

The positions of a `llama` can be shifted, which qwen35's cannot.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

WIDTH, HEADS, FFN, VOCABULARY = 64, 2, 96, 128


# What other architectures have besides llama's tensors, in each layer.
_MORE: dict[str, dict[str, tuple[int, ...]]] = {
    "llama": {},
    "qwen3": {"attn_q_norm": (WIDTH // HEADS,), "attn_k_norm": (WIDTH // HEADS,)},
}


def write_tiny_llama(path: Path, architecture: str = "llama", residual: float = 0.2) -> Path:
    """One layer and a vocabulary of numbers without text.

    residual: standard deviation of the weights that write to the residual stream. The smaller it
    is, the more does the next token depend on the last one alone, so that the text repeats itself.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_key_length(WIDTH // HEADS)
    writer.add_value_length(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (VOCABULARY, WIDTH),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.attn_q.weight": (WIDTH, WIDTH),
        "blk.0.attn_k.weight": (WIDTH, WIDTH),
        "blk.0.attn_v.weight": (WIDTH, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, WIDTH),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.ffn_gate.weight": (FFN, WIDTH),
        "blk.0.ffn_up.weight": (FFN, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, FFN),
        **{f"blk.0.{name}.weight": shape for name, shape in _MORE[architecture].items()},
    }
    _finish(writer, shapes, residual)
    return path


def write_tiny_mamba(path: Path, residual: float = 0.2) -> Path:
    """A recurrent model of one layer; llama.cpp keeps no snapshots of its state."""
    inner, state, rank, kernel = 2 * WIDTH, 8, 4, 4
    writer = GGUFWriter(path, "mamba")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")
    _finish(
        writer,
        {
            "token_embd.weight": (VOCABULARY, WIDTH),
            "output_norm.weight": (WIDTH,),
            "blk.0.attn_norm.weight": (WIDTH,),
            "blk.0.ssm_in.weight": (2 * inner, WIDTH),
            "blk.0.ssm_conv1d.weight": (inner, kernel),
            "blk.0.ssm_conv1d.bias": (inner,),
            "blk.0.ssm_x.weight": (rank + 2 * state, inner),
            "blk.0.ssm_dt.weight": (inner, rank),
            "blk.0.ssm_dt.bias": (inner,),
            "blk.0.ssm_a": (inner, state),
            "blk.0.ssm_d": (inner,),
            "blk.0.ssm_out.weight": (WIDTH, inner),
        },
        residual,
    )
    return path


def _finish(writer: GGUFWriter, shapes: dict[str, tuple[int, ...]], residual: float) -> None:
    """Add random matrices and vectors of ones, and write the file."""
    draw = np.random.default_rng(1)
    for name, shape in shapes.items():
        scale = (
            residual if name.endswith(("_output.weight", "_down.weight", "_out.weight")) else 0.2
        )
        weights = draw.normal(0, scale, shape) if len(shape) > 1 else np.ones(shape)
        if name.endswith("ssm_a"):
            weights = -np.abs(weights)  # a decay
        writer.add_tensor(name, weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
