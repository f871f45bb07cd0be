"""Small models of random weights, of several architectures, with upstream's own vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mtp_gguf.gguf_tools.files.format import TensorSpec, Value, ValueType, lay_out, open_gguf
from mtp_gguf.gguf_tools.files.tensor_types import F32

from .sdist import llama_cpp_source

WIDTH, HEADS, FEED, LAYERS, CONTEXT = 64, 4, 96, 2, 256
INNER, STATE, RANK, KERNEL = 128, 16, 4, 4  # of the state space model

Shapes = dict[str, tuple[int, ...]]


def vocabulary(name: str) -> dict[str, Value]:
    """The tokenizer's metadata of one of llama.cpp's vocabulary files."""
    with open_gguf(llama_cpp_source() / "models" / f"ggml-vocab-{name}.gguf") as file:
        return {key: file.value(key) for key in file.keys if key.startswith("tokenizer.")}


def u32(number: int) -> Value:
    return Value(ValueType.U32, number)


def f32(number: float) -> Value:
    return Value(ValueType.F32, number)


def _layers(shapes: Shapes) -> Shapes:
    return {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in shapes.items()}


def _with_bias(shapes: Shapes) -> Shapes:
    """A weight of each shape, in ggml's order, and a bias of its rows."""
    biases = {f"{name}.bias": shape[-1:] for name, shape in shapes.items()}
    return {**{f"{name}.weight": shape for name, shape in shapes.items()}, **biases}


def _llama(tokens: int) -> tuple[dict[str, Value], Shapes]:
    square = {f"{name}.weight": (WIDTH, WIDTH) for name in ("attn_q", "attn_k", "attn_v")}
    block: Shapes = {
        **square,
        "attn_output.weight": (WIDTH, WIDTH),
        "attn_norm.weight": (WIDTH,),
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (WIDTH, FEED),
        "ffn_up.weight": (WIDTH, FEED),
        "ffn_down.weight": (FEED, WIDTH),
    }
    keys = {
        "feed_forward_length": u32(FEED),
        "attention.head_count": u32(HEADS),
        "attention.layer_norm_rms_epsilon": f32(1e-5),
        "rope.dimension_count": u32(WIDTH // HEADS),
    }
    table = {"token_embd.weight": (WIDTH, tokens), "output_norm.weight": (WIDTH,)}
    return keys, {**table, **_layers(block)}


def _mamba(tokens: int) -> tuple[dict[str, Value], Shapes]:
    block: Shapes = {
        "attn_norm.weight": (WIDTH,),
        "ssm_in.weight": (WIDTH, 2 * INNER),
        "ssm_conv1d.weight": (KERNEL, INNER),
        "ssm_conv1d.bias": (INNER,),
        "ssm_x.weight": (INNER, RANK + 2 * STATE),
        "ssm_dt.weight": (RANK, INNER),
        "ssm_dt.bias": (INNER,),
        "ssm_a": (STATE, INNER),
        "ssm_d": (INNER,),
        "ssm_out.weight": (INNER, WIDTH),
    }
    keys = {
        "feed_forward_length": u32(0),
        "attention.head_count": u32(0),
        "attention.layer_norm_rms_epsilon": f32(1e-5),
        "ssm.conv_kernel": u32(KERNEL),
        "ssm.inner_size": u32(INNER),
        "ssm.state_size": u32(STATE),
        "ssm.time_step_rank": u32(RANK),
    }
    table = {"token_embd.weight": (WIDTH, tokens), "output_norm.weight": (WIDTH,)}
    return keys, {**table, **_layers(block)}


def _bert(tokens: int) -> tuple[dict[str, Value], Shapes]:
    block = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH))
    block |= {"ffn_up": (WIDTH, FEED), "ffn_down": (FEED, WIDTH)}
    norms = dict.fromkeys(("attn_output_norm", "layer_output_norm"), (WIDTH,))
    keys = {
        "feed_forward_length": u32(FEED),
        "attention.head_count": u32(HEADS),
        "attention.layer_norm_epsilon": f32(1e-12),
        "attention.causal": Value(ValueType.BOOL, False),
        "pooling_type": u32(2),  # of the first token
    }
    table: Shapes = {
        "token_embd.weight": (WIDTH, tokens),
        "token_types.weight": (WIDTH, 2),
        "position_embd.weight": (WIDTH, CONTEXT),
        **_with_bias({"token_embd_norm": (WIDTH,)}),
    }
    return keys, {**table, **_layers(_with_bias({**block, **norms}))}


ARCHITECTURES = {
    "llama": (_llama, "llama-spm"),
    "mamba": (_mamba, "gpt-neox"),
    "bert": (_bert, "bert-bge"),
}


def write_random_model(path: Path, architecture: str) -> Path:
    """Write a model of an architecture named in `ARCHITECTURES`."""
    describe, name = ARCHITECTURES[architecture]
    words = vocabulary(name)
    tokens: Any = words["tokenizer.ggml.tokens"].data
    keys, shapes = describe(len(tokens))
    common = {
        "context_length": u32(CONTEXT),
        "embedding_length": u32(WIDTH),
        "block_count": u32(LAYERS),
    }
    metadata = {
        "general.architecture": Value(ValueType.STRING, architecture),
        **{f"{architecture}.{key}": value for key, value in {**common, **keys}.items()},
        **words,
    }
    layout = lay_out(metadata, [TensorSpec(name, shape, F32) for name, shape in shapes.items()])
    rng = np.random.default_rng(9)
    data = bytearray(layout.size)
    data[: len(layout.header)] = layout.header
    for offset, (tensor, shape) in zip(layout.offsets, shapes.items(), strict=True):
        values = rng.standard_normal(shape[::-1], np.float32) * np.float32(0.3)
        if tensor.endswith("norm.weight"):
            values = np.ones(shape[::-1], np.float32)
        elif tensor.endswith("ssm_a"):  # decays
            values = -np.abs(values)
        data[offset : offset + values.nbytes] = values.tobytes()
    path.write_bytes(data)
    return path
