"""Models of random weights of the architectures that `carry` writes as carriers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, quants
from numpy.typing import NDArray

from support.gguf_files import finish

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCABULARY = 2, 128, 4, 2, 192, 300
HEAD = WIDTH // HEADS


def write_model(
    path: Path,
    architecture: str,
    kind: Type = Type.F32,
    *,
    fused: bool = False,
    tied: bool = False,
    biased: bool = False,
    halves: bool = True,
) -> Path:
    """A model whose norms and biases are random, too, and whose tokens are bytes.

    kind: type of the matrices. fused: one tensor attn_qkv. tied: no output matrix. biased: biases
    of Q, K and V. halves: the rows of Q and K are in the order for a rotation of a head's halves;
    else in that of neighbouring pairs, for the same model.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_name("A carried model")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    if architecture == "llama":
        writer.add_rope_dimension_count(HEAD)
    add_byte_tokenizer(writer, VOCABULARY)
    for name, array in _tensors(architecture == "qwen3", fused, tied, biased, halves).items():
        if array.ndim == 1 or kind is Type.F32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, quants.quantize(array, kind), raw_dtype=kind)
    finish(writer)
    return path


def add_byte_tokenizer(writer: GGUFWriter, vocabulary: int) -> None:
    """A tokenizer of bytes, with `vocabulary` tokens and one that begins a text."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += [f"▁w{i}" for i in range(vocabulary - len(tokens))]
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(-i) for i in range(vocabulary)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (vocabulary - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)


def _tensors(
    qk_norms: bool, fused: bool, tied: bool, biased: bool, halves: bool
) -> dict[str, NDArray[np.float32]]:
    draw = np.random.default_rng(4)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return draw.normal(0, 0.2, (rows, columns)).astype(np.float32)

    def vector(size: int) -> NDArray[np.float32]:
        return draw.normal(1, 0.3, size).astype(np.float32)

    tensors = {"token_embd.weight": matrix(VOCABULARY, WIDTH), "output_norm.weight": vector(WIDTH)}
    if not tied:
        tensors["output.weight"] = matrix(VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        block: dict[str, NDArray[np.float32]] = {"attn_norm.weight": vector(WIDTH)}
        parts = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
        for kind in ("weight", "bias") if biased else ("weight",):
            each = {n: matrix(size, WIDTH) if kind == "weight" else vector(size)
                    for n, size in parts.items()}  # fmt: skip
            if not halves:
                each |= {name: _in_pairs(each[name]) for name in "qk"}
            if fused:
                block[f"attn_qkv.{kind}"] = np.concatenate([*each.values()])
            else:
                block |= {f"attn_{name}.{kind}": array for name, array in each.items()}
        if qk_norms:
            block |= {"attn_q_norm.weight": vector(HEAD), "attn_k_norm.weight": vector(HEAD)}
        block |= {
            "attn_output.weight": matrix(WIDTH, WIDTH),
            "ffn_norm.weight": vector(WIDTH),
            "ffn_gate.weight": matrix(FFN, WIDTH),
            "ffn_up.weight": matrix(FFN, WIDTH),
            "ffn_down.weight": matrix(WIDTH, FFN),
        }
        tensors |= {f"blk.{layer}.{suffix}": array for suffix, array in block.items()}
    return tensors


def _in_pairs(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of halves in the order of pairs, as llama.cpp's converter does for `llama`."""
    heads = array.reshape(-1, 2, HEAD // 2, *array.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(array.shape))
