"""GLM-5.3-Flash: linear attention, latent attention with an indexer, hyper-connections, experts.

The GGUF side is llama.cpp's `glm5-next` (src/models/glm5-next.cpp), the Hugging Face side
transformers' `glm5_next`, which does not load the head. The MTP layer follows the trunk's; it has
latent attention and experts, and no hyper-connections. The matrix that expands the latent vector
into keys and values is divided, and that of the keys transposed for each head, because llama.cpp
multiplies queries by it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from mtp_gguf.gguf_tools.files.tensor_types import F32

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import ConfigReader
from ..checkpoints.source_tensors import SourceTensors
from ..plans.recipe import Arithmetic, Order, Recipe, Target
from .layers import Layer, LayeredModel, count_mtp_layers, last_norm_and_vocabulary, opened
from .target_model import MAX_LAYERS, HeadChoice, TargetModel

ARCHITECTURES: tuple[str, ...] = ("Glm5NextForConditionalGeneration",)

_LINEAR, _LATENT = "linear_attention", "indexed_attention"
_FULL = "full_attention"  # another name of the latter
_PERIOD = 4  # of layers, the last of which has latent attention, without layer_types
_DENSE_LAYERS = 3  # without a key that tells
_LOWER_BOUND = -5.0  # of the decay; the default of transformers' Glm5NextTextConfig
_STREAMS = 4  # of the hyper-connections, fixed in llama.cpp
_INDEX_EPSILON = 1e-6  # of the indexer's LayerNorm, fixed in transformers
# The split of GLM's tokenizers, under llama.cpp's name for them.
_SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "glm4"
}
# Roles that llama.cpp's converter gives to these tokens, whatever the files say.
_TOKENS = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}


@dataclass(frozen=True)
class _Dims:
    """The sizes of the config.

    linear: whether a layer of the trunk has linear attention. indexed: whether it has an indexer of
    its own, if it has latent attention. linear_head: width of a head of linear attention.
    unbounded: whether its decay has no lower bound. q_rank, kv_rank: widths of the latent vectors.
    key, value: widths of a head.
    """

    hidden: int
    ffn: int
    linear: tuple[bool, ...]
    indexed: tuple[bool, ...]
    dense: int
    n_mtp: int
    heads: int
    vocab: int
    linear_head: int
    unbounded: bool
    conv: int
    q_rank: int
    kv_rank: int
    key: int
    value: int
    index_heads: int
    index_dim: int
    pool: int
    experts: int
    expert_ffn: int
    shared_ffn: int

    @property
    def inner(self) -> int:
        """Width of linear attention."""
        return self.heads * self.linear_head


def target_model(checkpoint: Checkpoint, head: HeadChoice) -> TargetModel:
    """Name and shape of every target; CheckpointError if the checkpoint does not fit."""
    config = checkpoint.reader
    _check(config)
    n_mtp = count_mtp_layers(checkpoint, config, head)
    dims = _read_dims(config, checkpoint.config, n_mtp)
    sources = opened(checkpoint, head)
    layers = len(dims.linear)
    model = LayeredModel(
        architecture="glm5-next",
        n_trunk=layers,
        n_mtp=dims.n_mtp,
        n_vocab=dims.vocab,
        shared=last_norm_and_vocabulary(sources, dims.hidden, dims.vocab),
        trunk=_trunk(sources, dims),
        head=_head(sources, dims),
        hparams=lambda n_mtp: _hparams(config, dims, n_mtp),
        trunk_names=[f"model.layers.{i}." for i in range(layers)],
        head_names=[f"model.layers.{layers + i}." for i in range(dims.n_mtp)],
        splits=_SPLITS,
        tokens=_TOKENS,
    )
    return model.target_model(sources, head)


def _check(c: ConfigReader) -> None:
    """CheckpointError for what llama.cpp computes otherwise."""
    if (found := c.size("qk_rope_head_dim", 0, least=0)) != 0:
        raise c.fault("qk_rope_head_dim", "0, as llama.cpp rotates no part of the heads", found)
    if (found := c.size("hc_mult", _STREAMS)) != _STREAMS:
        raise c.fault("hc_mult", f"{_STREAMS}, as in llama.cpp", found)
    for key in ("mhc", "mla_use_nope"):
        if c.config.get(key, True) is not True:
            raise c.fault(key, "true, as in llama.cpp", c.config[key])
    for key in ("attention_bias", "tie_word_embeddings"):
        if c.flag(key):
            raise c.fault(key, "false, as in llama.cpp", True)
    for key, wanted in (("hidden_act", "silu"), ("scoring_func", "sigmoid")):
        if (kind := c.config.get(key, wanted)) != wanted:
            raise c.fault(key, f"{wanted}, as in llama.cpp", kind)
    if (layers := c.size("num_nextn_predict_layers", 0, least=0)) > 1:
        raise c.fault("num_nextn_predict_layers", "1, the number of published models", layers)


def _read_dims(c: ConfigReader, config: dict[str, Any], n_mtp: int) -> _Dims:
    layers = c.size("num_hidden_layers", most=MAX_LAYERS - n_mtp)
    heads = c.size("num_attention_heads")
    linear = _linear(c)
    if (found := linear.size("num_heads", heads)) != heads:
        expected = f"num_attention_heads ({heads}), as in llama.cpp"
        raise linear.fault("num_heads", expected, found)
    pool, budget = c.size("index_kpool", 16, least=2), c.size("index_topk", 2048)
    if budget % pool:
        raise c.fault("index_topk", f"a multiple of index_kpool ({pool})", budget)
    kinds = _kinds(c, "layer_types", layers, (_LINEAR, _LATENT, _FULL))
    return _Dims(
        hidden=c.size("hidden_size"),
        ffn=c.size("intermediate_size"),
        linear=tuple(
            (i % _PERIOD != _PERIOD - 1) if kinds is None else kinds[i] == _LINEAR
            for i in range(layers)
        ),
        indexed=_indexed(c, layers),
        dense=_dense(c, layers),
        n_mtp=n_mtp,
        heads=heads,
        vocab=c.size("vocab_size"),
        linear_head=linear.size("head_dim", 128),
        unbounded=_is_unbounded(config),
        conv=linear.size("short_conv_kernel_size", 4),
        q_rank=c.size("q_lora_rank"),
        kv_rank=c.size("kv_lora_rank"),
        key=c.size("qk_nope_head_dim"),
        value=c.size("v_head_dim"),
        index_heads=c.size("index_n_heads"),
        index_dim=c.size("index_head_dim"),
        pool=pool,
        experts=c.size("n_routed_experts"),
        expert_ffn=c.size("moe_intermediate_size"),
        shared_ffn=c.size("moe_intermediate_size") * c.size("n_shared_experts", 1),
    )


def _linear(c: ConfigReader) -> ConfigReader:
    """The sizes of linear attention, which transformers saves under keys of their own."""
    names = {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
        "gate_lower_bound": "linear_lower_bound",
    }
    outside = {key: c.config[name] for key, name in names.items() if name in c.config}
    inside = c.config.get("linear_attn_config", {})
    if not isinstance(inside, dict):
        raise c.fault("linear_attn_config", "an object", inside)
    return ConfigReader(f"{c.where}: linear_attn_config", {**outside, **inside})


def _is_unbounded(config: dict[str, Any]) -> bool:
    """Whether the config says by null that the decay of linear attention has no lower bound."""
    text = config.get("text_config") or config
    inside = text.get("linear_attn_config")
    if inside is None:
        return "linear_lower_bound" in text and text["linear_lower_bound"] is None
    bounded = inside.get("safe_gate", True) or inside.get("gate_lower_bound", 0) is not None
    return not bounded


def _kinds(c: ConfigReader, key: str, layers: int, known: tuple[str, ...]) -> list[str] | None:
    """The kind of each layer of the trunk; None if the config has no such list."""
    if key not in c.config:
        return None
    found = c.each_layer(key, layers)
    if any(kind not in known for kind in found):
        raise c.fault(key, f"entries {' and '.join(known[:2])}", found)
    return found


def _indexed(c: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Whether each layer runs the indexer or uses the choice of the last one that did."""
    kinds = _kinds(c, "indexer_types", layers, ("full", "shared"))
    if kinds is not None:
        return tuple(kind == "full" for kind in kinds)
    pattern = c.config.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - set("FS"):
            raise c.fault("index_topk_pattern", f"{layers} letters F and S", pattern)
        return tuple(letter == "F" for letter in pattern)
    every = c.size("index_topk_freq", 1)
    offset = c.size("index_skip_topk_offset", 2, least=0)
    return tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))


def _dense(c: ConfigReader, layers: int) -> int:
    """The number of layers without experts, which are the first ones."""
    kinds = _kinds(c, "mlp_layer_types", layers, ("dense", "sparse"))
    if kinds is None:
        return c.size("first_k_dense_replace", min(_DENSE_LAYERS, layers), least=0, most=layers)
    dense = kinds.count("dense")
    if "sparse" in kinds[:dense]:
        raise c.fault("mlp_layer_types", "layers without experts before those with them", kinds)
    return dense


def _trunk(sources: SourceTensors, d: _Dims) -> Iterator[Target]:
    for index, linear in enumerate(d.linear):
        layer = Layer(sources, f"model.layers.{index}.", f"blk.{index}.")
        for half in ("attn", "ffn"):
            yield from _hyper_connection(layer, d, f"hc_{half}_")
        yield from _norms(layer, d)
        yield from _linear_attention(layer, d) if linear else _attention(layer, d, d.indexed[index])
        yield from layer.gated(d.hidden, d.ffn) if index < d.dense else _experts(layer, d)


def _head(sources: SourceTensors, d: _Dims) -> Iterator[Target]:
    for index in range(len(d.linear), len(d.linear) + d.n_mtp):
        layer = Layer(sources, f"model.layers.{index}.", f"blk.{index}.")
        yield from layer.mtp_input(d.hidden)
        yield from layer.mtp_output(d.hidden, d.vocab)
        yield from _norms(layer, d)
        yield from _attention(layer, d, indexed=True)
        yield from _experts(layer, d)


def _norms(layer: Layer, d: _Dims) -> Iterator[Target]:
    yield layer.take("input_layernorm.weight", "attn_norm.weight", d.hidden)
    yield layer.take("post_attention_layernorm.weight", "ffn_norm.weight", d.hidden)


def _hyper_connection(layer: Layer, d: _Dims, name: str) -> Iterator[Target]:
    mixed = (2 + _STREAMS) * _STREAMS
    shape = (mixed, _STREAMS * d.hidden)
    yield layer.take(f"{name}fn", f"{name}fn.weight", *shape, fixed=F32)
    yield layer.take(f"{name}base", f"{name}base.weight", mixed)
    yield layer.take(f"{name}scale", f"{name}scale.weight", 3)


def _linear_attention(layer: Layer, d: _Dims) -> Iterator[Target]:
    for part in ("q", "k", "v"):
        yield layer.take(f"self_attn.{part}_proj.weight", f"attn_{part}.weight", d.inner, d.hidden)
        source = layer.source + f"self_attn.{part}_conv1d.weight"
        recipe = Recipe((layer.sources.use(source, (d.inner, 1, d.conv)),))
        name = f"{layer.target}ssm_conv1d_{part}.weight"
        yield Target(name, (d.conv, 1, d.inner, 1), recipe, F32)
    for gate in ("f", "g"):
        down, up = (f"self_attn.{gate}_{part}_proj.weight" for part in ("a", "b"))
        yield layer.take(down, f"ssm_{gate}_a.weight", d.linear_head, d.hidden)
        yield layer.take(up, f"ssm_{gate}_b.weight", d.inner, d.linear_head)
    yield layer.take("self_attn.b_proj.weight", "ssm_beta.weight", d.heads, d.hidden)
    yield layer.take("self_attn.A_log", "ssm_a", d.heads, arithmetic=Arithmetic.NEGATED_EXP)
    yield layer.take("self_attn.dt_bias", "ssm_dt.bias", d.inner)
    yield layer.take("self_attn.o_norm.weight", "ssm_norm.weight", d.linear_head)
    yield layer.take("self_attn.o_proj.weight", "attn_output.weight", d.hidden, d.inner)


def _attention(layer: Layer, d: _Dims, indexed: bool) -> Iterator[Target]:
    """Latent attention. indexed: with an indexer of its own."""
    attention = Layer(layer.sources, f"{layer.source}self_attn.", layer.target)
    yield attention.take("q_a_proj.weight", "attn_q_a.weight", d.q_rank, d.hidden)
    yield attention.take("q_a_layernorm.weight", "attn_q_a_norm.weight", d.q_rank)
    yield attention.take("q_b_proj.weight", "attn_q_b.weight", d.heads * d.key, d.q_rank)
    yield attention.take("kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight", d.kv_rank, d.hidden)
    yield attention.take("kv_a_layernorm.weight", "attn_kv_a_norm.weight", d.kv_rank)
    yield from _keys_and_values(attention, d)
    yield attention.take("o_proj.weight", "attn_output.weight", d.hidden, d.heads * d.value)
    if indexed:
        yield from _indexer(attention, d)


def _keys_and_values(layer: Layer, d: _Dims) -> Iterator[Target]:
    """The parts of the matrix that expands the latent vector, for each head."""
    rows = d.heads * (d.key + d.value)
    source = layer.sources.use(f"{layer.source}kv_b_proj.weight", (rows, d.kv_rank))
    keys, values = _parts_of_heads(d.heads, d.key, d.value)
    recipe = Recipe((source,), row_order=keys, transposed=True)
    yield Target(f"{layer.target}attn_k_b.weight", (d.key, d.kv_rank, d.heads), recipe)
    recipe = Recipe((source,), row_order=values)
    yield Target(f"{layer.target}attn_v_b.weight", (d.kv_rank, d.value, d.heads), recipe)


@cache
def _parts_of_heads(heads: int, key: int, value: int) -> tuple[Order, Order]:
    """The rows of all keys, and those of all values, where each head has both together."""
    rows = np.arange(heads * (key + value)).reshape(heads, -1)
    return rows[:, :key].reshape(-1), rows[:, key:].reshape(-1)


def _indexer(layer: Layer, d: _Dims) -> Iterator[Target]:
    queries, width = d.index_heads * d.index_dim, d.index_dim
    yield layer.take("indexer.wq_b.weight", "indexer.attn_q_b.weight", queries, d.q_rank)
    yield layer.take("indexer.wk.weight", "indexer.attn_k.weight", width, d.hidden)
    yield layer.take("indexer.k_norm.weight", "indexer.k_norm.weight", width)
    yield layer.take("indexer.k_norm.bias", "indexer.k_norm.bias", width)
    weights = ("indexer.weights_proj.weight", "indexer.proj.weight")
    yield layer.take(*weights, d.index_heads, d.hidden, fixed=F32)
    for part, shape in (("gate", (width, d.hidden)), ("ape", (d.pool, width))):
        source, target = f"indexer.index_kpool_compress_{part}", f"indexer_compressor_{part}.weight"
        yield layer.take(source, target, *shape, fixed=F32)


def _experts(layer: Layer, d: _Dims) -> Iterator[Target]:
    yield from layer.gated_experts(d.hidden, d.expert_ffn, d.experts)
    yield from layer.gated(d.hidden, d.shared_ffn, "_shexp", "mlp.shared_experts.")


def _hparams(c: ConfigReader, d: _Dims, n_mtp: int) -> dict[str, object]:
    blocks = len(d.linear) + n_mtp
    linear, bound = _linear(c), None
    if not d.unbounded:
        bound = linear.number(linear.config, "gate_lower_bound", _LOWER_BOUND, most=0)
    rope = c.rope()
    normalized = c.config.get("norm_topk_prob", True)
    tail = c.config.get("index_kpool_always_select_tail", True)
    for key, flag in (("norm_topk_prob", normalized), ("index_kpool_always_select_tail", tail)):
        if not isinstance(flag, bool):
            raise c.fault(key, "true or false", flag)
    limit = c.number(c.config, "swiglu_limit", 10.0, least=0)
    return {
        "block_count": blocks,
        "context_length": c.size("max_position_embeddings"),
        "embedding_length": d.hidden,
        "feed_forward_length": d.ffn,
        "vocab_size": d.vocab,
        "attention.head_count": d.heads,
        "attention.q_lora_rank": d.q_rank,
        "attention.kv_lora_rank": d.kv_rank,
        "attention.key_length": d.kv_rank,
        "attention.value_length": d.kv_rank,
        "attention.key_length_mla": d.key,
        "attention.value_length_mla": d.value,
        "attention.indexer.head_count": d.index_heads,
        "attention.indexer.key_length": d.index_dim,
        "attention.indexer.top_k": c.size("index_topk", 2048),
        "attention.indexer.kpool": d.pool,
        "rope.dimension_count": 0,
        "ssm.conv_kernel": d.conv,
        "kda.head_dim": d.linear_head,
        "hyper_connection.count": _STREAMS,
        "hyper_connection.sinkhorn_iterations": c.size("hc_sinkhorn_iters", 20),
        "leading_dense_block_count": d.dense,
        "expert_count": d.experts,
        "expert_used_count": c.size("num_experts_per_tok", most=d.experts),
        "expert_feed_forward_length": d.expert_ffn,
        "expert_shared_count": c.size("n_shared_experts", 1),
        "expert_group_count": c.size("n_group", 1),
        "expert_group_used_count": c.size("topk_group", 1),
        "nextn_predict_layers": n_mtp or None,
        "attention.layer_norm_rms_epsilon": c.number(c.config, "rms_norm_eps", 1e-5, least=0),
        "attention.layer_norm_epsilon": _INDEX_EPSILON,
        "hyper_connection.epsilon": c.number(c.config, "hc_eps", 1e-6, least=0),
        "expert_weights_scale": c.number(c.config, "routed_scaling_factor", 1.0),
        "kda.gate_lower_bound": bound,
        "rope.freq_base": c.number(rope, "rope_theta", 0.0, least=0)
        if "rope_theta" in rope
        else None,
        "attention.head_count_kv": (*(0 if own else 1 for own in d.linear), *[1] * n_mtp),
        "attention.indexer.types": d.indexed,
        "attention.indexer.kpool_select_tail": tail,
        "expert_weights_norm": normalized,
        "swiglu_clamp_exp": (limit,) * blocks,
        "swiglu_clamp_shexp": (limit,) * blocks,
    }
