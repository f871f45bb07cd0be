"""Step 3.5 and 3.7: windows in most layers, gates for each head, and three chained MTP layers.

The GGUF side is llama.cpp's `step35` (src/models/step35.cpp), the Hugging Face side transformers'
`step3p7` and the publisher's `step3p5`, whose names of config keys differ. The MTP layers follow
the trunk's. Norm weights are stored as their difference from one. Experts are stacked already.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.tensor_types import F32

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import ConfigReader, is_whole
from ..checkpoints.source_tensors import SourceTensors
from ..plans.recipe import Arithmetic, Target
from .layers import OTHER_TOWERS, Layer, LayeredModel, count_mtp_layers, opened
from .target_model import MAX_LAYERS, SIGMOID, HeadChoice, TargetModel

ARCHITECTURES: tuple[str, ...] = ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration")

_FULL, _WINDOW = "full_attention", "sliding_attention"
_ROTATED = {_FULL: 0.5, _WINDOW: 1.0}  # the part of a head, fixed in llama.cpp
_TOWERS = dict.fromkeys(("vision_model.", "vit_large_projector."), OTHER_TOWERS)
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Dims:
    """windows: whether a layer has one, for the trunk and then for the MTP layers."""

    hidden: int
    ffn: int
    n_trunk: int
    n_mtp: int
    windows: tuple[bool, ...]
    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    head_dim: int
    vocab: int
    experts: int
    expert_ffn: int
    shared_ffn: int


def target_model(checkpoint: Checkpoint, head: HeadChoice) -> TargetModel:
    """Name and shape of every target; CheckpointError if the checkpoint does not fit."""
    config = checkpoint.reader
    _check(config)
    dims = _read_dims(config, count_mtp_layers(checkpoint, config, head))
    sources = opened(checkpoint, head)
    model = LayeredModel(
        architecture="step35",
        n_trunk=dims.n_trunk,
        n_mtp=dims.n_mtp,
        n_vocab=dims.vocab,
        shared=_shared(sources, dims),
        trunk=_layers(sources, dims, range(dims.n_trunk)),
        head=_layers(sources, dims, range(dims.n_trunk, dims.n_trunk + dims.n_mtp)),
        hparams=lambda n_mtp: _hparams(config, dims, dims.n_trunk + n_mtp),
        trunk_names=[f"model.layers.{i}." for i in range(dims.n_trunk)],
        head_names=[f"model.layers.{dims.n_trunk + i}." for i in range(dims.n_mtp)],
        never=_TOWERS,
        computed=_rope_factors(config, dims),
    )
    return model.target_model(sources, head)


def _either(c: ConfigReader, ours: str, published: str) -> str:
    """The key that is set: transformers' name, or the publisher's."""
    return published if published in c.config else ours


def _check(c: ConfigReader) -> None:
    """CheckpointError for what llama.cpp computes otherwise."""
    if (kind := c.config.get("moe_router_activation", "sigmoid")) != "sigmoid":
        raise c.fault("moe_router_activation", "sigmoid, as in llama.cpp", kind)
    for key in ("use_head_wise_attn_gate", "use_qk_norm", "zero_centered", "use_moe_router_bias"):
        if c.config.get(key, True) is not True:
            raise c.fault(key, "true, as in Step 3.5 and 3.7", c.config[key])
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings", "sink"):
        if c.flag(key):
            raise c.fault(key, "false, as in llama.cpp", True)
    if (step := c.size("moe_every_n_layer", 1)) != 1:
        raise c.fault("moe_every_n_layer", "1, as llama.cpp has experts in every later layer", step)


def _read_dims(c: ConfigReader, n_mtp: int) -> _Dims:
    layers = c.size("num_hidden_layers", most=MAX_LAYERS - n_mtp)
    heads = c.size("num_attention_heads")
    kv_heads = c.size(_either(c, "num_key_value_heads", "num_attention_groups"), most=heads)
    other = c.config.get("attention_other_setting", {})
    if not isinstance(other, dict):
        raise c.fault("attention_other_setting", "an object", other)
    window = ConfigReader(f"{c.where}: attention_other_setting", other)
    of_window = c.size("num_sliding_attention_heads", window.size("num_attention_heads", heads))
    return _Dims(
        hidden=c.size("hidden_size"),
        ffn=c.size("intermediate_size"),
        n_trunk=layers,
        n_mtp=n_mtp,
        windows=_windows(c, layers, n_mtp),
        heads=(heads, of_window),
        kv_heads=(kv_heads, window.size("num_attention_groups", kv_heads)),
        head_dim=c.size("head_dim", c.size("hidden_size") // heads),
        vocab=c.size("vocab_size"),
        experts=c.size(_either(c, "n_routed_experts", "moe_num_experts")),
        expert_ffn=c.size("moe_intermediate_size"),
        shared_ffn=c.size("share_expert_dim"),
    )


def _windows(c: ConfigReader, layers: int, n_mtp: int) -> tuple[bool, ...]:
    """Whether each layer has a window; the MTP layers come last, in one list or in another."""
    kinds, more = (c.config.get(key, []) for key in ("layer_types", "mtp_layer_types"))
    if not isinstance(kinds, list) or not isinstance(more, list) or len(kinds) < layers:
        found = len(kinds) if isinstance(kinds, list) else kinds
        raise c.fault("layer_types", f"at least {layers} entries (num_hidden_layers)", found)
    if any(kind not in _ROTATED for kind in [*kinds, *more]):
        raise c.fault("layer_types", f"entries {_FULL} and {_WINDOW}", kinds)
    padded = [*kinds, *(more if len(kinds) == layers else []), *[_FULL] * n_mtp]
    return tuple(kind == _WINDOW for kind in padded[: layers + n_mtp])


def _shared(sources: SourceTensors, d: _Dims) -> Iterator[Target]:
    model = Layer(sources, "", "")
    yield _norm(model, "model.norm.weight", "output_norm.weight", d.hidden)
    yield model.take("model.embed_tokens.weight", "token_embd.weight", d.vocab, d.hidden)
    yield model.take("lm_head.weight", "output.weight", d.vocab, d.hidden)


def _norm(layer: Layer, name: str, target: str, width: int) -> Target:
    return layer.take(name, target, width, arithmetic=Arithmetic.ADD_ONE)


def _layers(sources: SourceTensors, d: _Dims, indices: range) -> Iterator[Target]:
    for index in indices:
        layer = Layer(sources, f"model.layers.{index}.", f"blk.{index}.")
        yield from _attention(layer, d, d.windows[index])
        if layer.has("mlp.gate_proj.weight"):
            yield from layer.gated(d.hidden, d.ffn)
        else:
            yield from _experts(layer, d)
        if index >= d.n_trunk:
            yield from _mtp(layer, d)


def _attention(layer: Layer, d: _Dims, window: bool) -> Iterator[Target]:
    heads, keys = d.heads[window], d.kv_heads[window] * d.head_dim
    queries = heads * d.head_dim
    yield _norm(layer, "input_layernorm.weight", "attn_norm.weight", d.hidden)
    yield _norm(layer, "post_attention_layernorm.weight", "ffn_norm.weight", d.hidden)
    for part, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield layer.take(f"self_attn.{part}_proj.weight", f"attn_{part}.weight", rows, d.hidden)
    yield layer.take("self_attn.o_proj.weight", "attn_output.weight", d.hidden, queries)
    yield layer.take("self_attn.g_proj.weight", "attn_gate.weight", heads, d.hidden)
    for part in ("q", "k"):
        yield _norm(layer, f"self_attn.{part}_norm.weight", f"attn_{part}_norm.weight", d.head_dim)


def _experts(layer: Layer, d: _Dims) -> Iterator[Target]:
    yield layer.take("moe.gate.weight", "ffn_gate_inp.weight", d.experts, d.hidden, fixed=F32)
    yield layer.take("moe.router_bias", "exp_probs_b.bias", d.experts)
    shapes = {"gate": (d.expert_ffn, d.hidden), "up": (d.expert_ffn, d.hidden)}
    for part, shape in {**shapes, "down": (d.hidden, d.expert_ffn)}.items():
        yield layer.take(f"moe.{part}_proj.weight", f"ffn_{part}_exps.weight", d.experts, *shape)
    yield from layer.gated(d.hidden, d.shared_ffn, "_shexp", "share_expert.")


def _mtp(layer: Layer, d: _Dims) -> Iterator[Target]:
    yield from layer.mtp_input(d.hidden, Arithmetic.ADD_ONE)
    head = "transformer.shared_head."
    yield _norm(layer, f"{head}norm.weight", "nextn.shared_head_norm.weight", d.hidden)
    output = "nextn.shared_head_head.weight"
    yield from layer.optional(f"{head}output.weight", output, d.vocab, d.hidden)


def _thetas(c: ConfigReader, d: _Dims) -> tuple[float, float]:
    """The base of the rotation without and with a window, which may be listed for each layer."""
    listed = c.config.get("rope_theta")
    if isinstance(listed, list):
        if len(listed) < d.n_trunk:
            raise c.fault("rope_theta", f"at least {d.n_trunk} numbers (num_hidden_layers)", listed)
        kinds = dict(zip(d.windows, listed, strict=False))
        rope = {kind: {"rope_theta": kinds.get(kind, listed[0])} for kind in (False, True)}
    else:
        rope = {False: c.rope_of(_FULL), True: c.rope_of(_WINDOW)}
    full, window = (c.number(rope[kind], "rope_theta", 10_000.0, least=0) for kind in (False, True))
    return full, window


def _check_rotation(c: ConfigReader, d: _Dims) -> None:
    """CheckpointError if llama.cpp rotates another part of the heads."""
    listed = c.config.get("partial_rotary_factors")
    expected = [_ROTATED[_WINDOW if window else _FULL] for window in d.windows]
    if listed is not None:
        if not isinstance(listed, list) or listed[: d.n_trunk] != expected[: d.n_trunk]:
            raise c.fault("partial_rotary_factors", "0.5, and 1 with a window", listed)
        return
    for kind, wanted in _ROTATED.items():
        found = c.number(c.rope_of(kind), "partial_rotary_factor", wanted)
        if found != wanted:
            raise c.fault(f"partial_rotary_factor of {kind}", f"{wanted}, as in llama.cpp", found)


def _rope_factors(c: ConfigReader, d: _Dims) -> dict[str, NDArray[np.float32]]:
    """What Llama 3's scaling divides the frequencies of full attention by; none without it."""
    rope = c.rope_of(_FULL)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    if kind != "llama3":
        raise c.fault("rope_type", "default or llama3", kind)
    factor, low, high, original = (
        c.number(rope, key, default, least=1e-3)
        for key, default in (
            ("factor", 8.0),
            ("low_freq_factor", 1.0),
            ("high_freq_factor", 4.0),
            ("original_max_position_embeddings", 8192.0),
        )
    )
    rotated = int(d.head_dim * _ROTATED[_FULL])
    lengths = 2 * math.pi * _thetas(c, d)[0] ** (np.arange(0, rotated, 2) / rotated)
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    factors = 1 / ((1 - smooth) / factor + smooth)
    rest = np.ones(d.head_dim // 2 - len(factors))  # layers with a window are not scaled
    return {_ROPE_FACTORS: np.concatenate([factors, rest]).astype(np.float32)}


def _limits(c: ConfigReader, key: str, blocks: int) -> tuple[float, ...] | None:
    """The largest activation of each layer, 0 without a limit; None if no layer has one."""
    listed = c.config.get(key)
    if listed is None:
        return None
    entries = listed if isinstance(listed, list) else [listed]
    numbers: list[Any] = [0.0 if entry is None else entry for entry in entries]
    if entries is not listed or not all(
        is_whole(n) or (isinstance(n, float) and math.isfinite(n)) for n in numbers
    ):
        raise c.fault(key, "a list of numbers", listed)
    return tuple(map(float, [*numbers, *[0.0] * blocks][:blocks]))


def _hparams(c: ConfigReader, d: _Dims, blocks: int) -> dict[str, object]:
    _check_rotation(c, d)
    windows = d.windows[:blocks]
    full, window = _thetas(c, d)
    normalized = c.config.get("norm_expert_weight", True)
    if not isinstance(normalized, bool):
        raise c.fault("norm_expert_weight", "true or false", normalized)
    return {
        "block_count": blocks,
        "context_length": c.size("max_position_embeddings"),
        "embedding_length": d.hidden,
        "feed_forward_length": d.ffn,
        "attention.key_length": d.head_dim,
        "attention.value_length": d.head_dim,
        "attention.sliding_window": c.size("sliding_window"),
        "expert_count": d.experts,
        "expert_used_count": c.size(_either(c, "num_experts_per_tok", "moe_top_k"), most=d.experts),
        "expert_feed_forward_length": d.expert_ffn,
        "expert_shared_feed_forward_length": d.shared_ffn,
        "expert_gating_func": SIGMOID,
        "leading_dense_block_count": _leading_dense(c, d),
        "moe_every_n_layers": 1,
        "nextn_predict_layers": max(blocks - d.n_trunk, 0) or None,
        "rope.freq_base": full,
        "rope.freq_base_swa": window,
        "attention.layer_norm_rms_epsilon": c.number(c.config, "rms_norm_eps", 1e-5, least=0),
        "expert_weights_scale": c.number(c.config, "moe_router_scaling_factor", 1.0),
        "swiglu_clamp_exp": _limits(c, "swiglu_limits", blocks),
        "swiglu_clamp_shexp": _limits(c, "swiglu_limits_shared", blocks),
        "expert_weights_norm": normalized,
        "attention.head_count": tuple(d.heads[w] for w in windows),
        "attention.head_count_kv": tuple(d.kv_heads[w] for w in windows),
        "attention.sliding_window_pattern": windows,
    }


def _leading_dense(c: ConfigReader, d: _Dims) -> int:
    """The number of dense layers at the beginning, from the list of those with experts."""
    kinds = c.config.get("mlp_layer_types")
    listed = c.config.get("moe_layers_enum")
    if isinstance(listed, str) and (parts := [p for p in listed.split(",") if p.strip()]):
        if not all(part.strip().isdecimal() for part in parts):
            raise c.fault("moe_layers_enum", "numbers of layers", listed)
        return min(int(part) for part in parts)
    if isinstance(kinds, list) and "sparse" in kinds:
        return kinds.index("sparse")
    raise c.fault("moe_layers_enum", "numbers of layers", listed)
