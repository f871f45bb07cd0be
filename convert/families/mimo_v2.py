"""MiMo-V2: windows in most layers, and three chained MTP layers.

The GGUF side is llama.cpp's `mimo2` (src/models/mimo2.cpp), the Hugging Face side the publisher's
`mimo_v2` and transformers' `mimo_v2_flash`, which does not load the head. The MTP layers have the
attention of layers with a window, and a dense network. Nothing is transformed, except that
llama.cpp's draft graph reads queries, keys and values as one tensor.

Checkpoints with a fused projection have it as it was on each device of their training: the queries,
keys and values of the first device, then those of the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import ConfigReader
from ..checkpoints.source_tensors import SourceTensors
from ..plans.recipe import Order, Target
from .layers import (
    OTHER_TOWERS,
    Layer,
    LayeredModel,
    count_mtp_layers,
    last_norm_and_vocabulary,
    opened,
)
from .target_model import MAX_LAYERS, SIGMOID, HeadChoice, TargetModel

ARCHITECTURES: tuple[str, ...] = ("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM")

_TOWERS = dict.fromkeys(("audio_encoder.", "speech_embeddings."), OTHER_TOWERS)
# Sizes of layers with a window that must be those of the others, as llama.cpp has one for both.
_SAME = {
    "swa_head_dim": "head_dim",
    "swa_num_attention_heads": "num_attention_heads",
    "swa_v_head_dim": "v_head_dim",
}


@dataclass(frozen=True)
class _Dims:
    """windows: for each layer of the trunk whether it has one. kv_heads: without and with."""

    hidden: int
    ffn: int
    windows: tuple[bool, ...]
    heads: int
    kv_heads: tuple[int, int]
    key: int
    value: int
    vocab: int
    experts: int
    expert_ffn: int
    n_mtp: int


def target_model(checkpoint: Checkpoint, head: HeadChoice) -> TargetModel:
    """Name and shape of every target; CheckpointError if the checkpoint does not fit."""
    config = checkpoint.reader
    _check(config)
    dims = _read_dims(config, count_mtp_layers(checkpoint, config, head))
    sources = opened(checkpoint, head)
    model = LayeredModel(
        architecture="mimo2",
        n_trunk=len(dims.windows),
        n_mtp=dims.n_mtp,
        n_vocab=dims.vocab,
        shared=last_norm_and_vocabulary(sources, dims.hidden, dims.vocab),
        trunk=_trunk(sources, dims),
        head=_head(sources, dims),
        hparams=lambda n_mtp: _hparams(config, dims, n_mtp),
        never=_TOWERS,
    )
    return model.target_model(sources, head)


def _check(c: ConfigReader) -> None:
    """CheckpointError for what llama.cpp computes otherwise."""
    for key, like in _SAME.items():
        if (found := c.size(key, c.size(like))) != c.size(like):
            raise c.fault(key, f"{like} ({c.size(like)}), as in llama.cpp", found)
    if (kind := c.rope_of("full_attention").get("rope_type", "default")) != "default":
        raise c.fault("rope_type", "default", kind)
    for key, wanted in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if (method := c.config.get(key, wanted)) != wanted:
            raise c.fault(key, f"{wanted}, as in llama.cpp", method)
    if c.config.get("norm_topk_prob", True) is not True:
        found = c.config["norm_topk_prob"]
        raise c.fault("norm_topk_prob", "true, as llama.cpp normalizes the experts' weights", found)
    if (scale := c.number(c.config, "routed_scaling_factor", 1.0)) != 1.0:
        raise c.fault("routed_scaling_factor", "1, as llama.cpp scales no expert", scale)
    if (shared := c.size("n_shared_experts", 0, least=0)) != 0:
        raise c.fault("n_shared_experts", "none, as in llama.cpp", shared)


def _read_dims(c: ConfigReader, n_mtp: int) -> _Dims:
    heads = c.size("num_attention_heads")
    return _Dims(
        hidden=c.size("hidden_size"),
        ffn=c.size("intermediate_size"),
        windows=_windows(c, c.size("num_hidden_layers", most=MAX_LAYERS - n_mtp)),
        heads=heads,
        kv_heads=(
            c.size("num_key_value_heads", most=heads),
            c.size("swa_num_key_value_heads", most=heads),
        ),
        key=c.size("head_dim"),
        value=c.size("v_head_dim"),
        vocab=c.size("vocab_size"),
        experts=c.size("n_routed_experts"),
        expert_ffn=c.size("moe_intermediate_size"),
        n_mtp=n_mtp,
    )


def _windows(c: ConfigReader, layers: int) -> tuple[bool, ...]:
    pattern = c.each_layer("hybrid_layer_pattern", layers)
    if any(entry not in (0, 1) for entry in pattern):
        raise c.fault("hybrid_layer_pattern", "entries 0 and 1", pattern)
    return tuple(entry == 1 for entry in pattern)


def _trunk(sources: SourceTensors, d: _Dims) -> Iterator[Target]:
    for index, window in enumerate(d.windows):
        layer = Layer(sources, f"model.layers.{index}.", f"blk.{index}.")
        yield layer.take("post_attention_layernorm.weight", "ffn_norm.weight", d.hidden)
        yield from _attention(layer, d, window, fused=False)
        if layer.has("mlp.gate.weight"):
            yield from layer.gated_experts(d.hidden, d.expert_ffn, d.experts)
        else:
            yield from layer.gated(d.hidden, d.ffn)


def _head(sources: SourceTensors, d: _Dims) -> Iterator[Target]:
    for index in range(d.n_mtp):
        layer = Layer(sources, f"mtp.layers.{index}.", f"blk.{len(d.windows) + index}.")
        yield from layer.mtp_input(d.hidden)
        yield layer.take("pre_mlp_layernorm.weight", "ffn_norm.weight", d.hidden)
        yield layer.take("final_layernorm.weight", "layer_output_norm.weight", d.hidden)
        yield from _attention(layer, d, window=True, fused=True)
        yield from layer.gated(d.hidden, d.ffn)


def _attention(layer: Layer, d: _Dims, window: bool, fused: bool) -> Iterator[Target]:
    """The attention of a layer. fused: queries, keys and values become one tensor."""
    kv_heads = d.kv_heads[window]
    rows = {"q": d.heads * d.key, "k": kv_heads * d.key, "v": kv_heads * d.value}
    yield layer.take("input_layernorm.weight", "attn_norm.weight", d.hidden)
    yield layer.take("self_attn.o_proj.weight", "attn_output.weight", d.hidden, d.heads * d.value)
    yield from layer.optional("self_attn.attention_sink_bias", "attn_sinks.weight", d.heads)
    name = "self_attn.qkv_proj.weight"
    if layer.has(name):
        order = _of_all_devices(rows, layer.sources.devices(layer.source + name))
        yield layer.take(name, "attn_qkv.weight", sum(rows.values()), d.hidden, row_order=order)
    elif fused:
        parts = {f"self_attn.{part}_proj.weight": count for part, count in rows.items()}
        yield layer.stacked(parts, "attn_qkv.weight", d.hidden)
    else:
        for part, count in rows.items():
            yield layer.take(
                f"self_attn.{part}_proj.weight", f"attn_{part}.weight", count, d.hidden
            )


def _of_all_devices(rows: dict[str, int], devices: int) -> Order | None:
    """The order of all queries, then keys, then values, of rows that have them by device."""
    if devices == 1:
        return None
    parts = np.arange(sum(rows.values())).reshape(devices, -1)
    ends = np.cumsum([count // devices for count in rows.values()])[:-1]
    return np.concatenate([part.reshape(-1) for part in np.split(parts, ends, axis=1)])


def _hparams(c: ConfigReader, d: _Dims, n_mtp: int) -> dict[str, object]:
    rope, rope_of_windows = c.rope_of("full_attention"), c.rope_of("sliding_attention")
    windows = (*d.windows, *[True] * n_mtp)
    epsilon = c.number(c.config, "rms_norm_eps", 1e-5)
    scaled = "attention_value_scale" in c.config
    return {
        "block_count": len(windows),
        "context_length": c.size("max_position_embeddings"),
        "embedding_length": d.hidden,
        "feed_forward_length": d.ffn,
        "attention.head_count": d.heads,
        "attention.key_length": d.key,
        "attention.value_length": d.value,
        "attention.sliding_window": c.size("sliding_window"),
        "rope.dimension_count": int(d.key * c.number(rope, "partial_rotary_factor", 1.0)),
        "expert_count": d.experts,
        "expert_used_count": c.size("num_experts_per_tok", most=d.experts),
        "expert_feed_forward_length": d.expert_ffn,
        "expert_group_count": c.size("n_group", 1),
        "expert_group_used_count": c.size("topk_group", 1),
        "expert_gating_func": SIGMOID,
        "nextn_predict_layers": n_mtp or None,
        "rope.freq_base": c.number(rope, "rope_theta", 10_000.0, least=0),
        "rope.freq_base_swa": c.number(rope_of_windows, "rope_theta", 10_000.0, least=0),
        "attention.layer_norm_rms_epsilon": c.number(
            c.config, "layernorm_epsilon", epsilon, least=0
        ),
        "attention.value_scale": c.number(c.config, "attention_value_scale", 1.0)
        if scaled
        else None,
        "attention.head_count_kv": tuple(d.kv_heads[w] for w in windows),
        "attention.sliding_window_pattern": tuple(map(int, windows)),
    }
