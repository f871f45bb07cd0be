"""Nemotron 3: layers of Mamba 2, attention without positions, and experts; one MTP layer.

The GGUF side is llama.cpp's `nemotron_h_moe` (src/models/nemotron-h.cpp), the Hugging Face side
transformers' `nemotron_h`, which does not load the head. A layer of the trunk is one of the three
kinds; the MTP layer has attention and experts, which the checkpoint has as two. Upstream's
converter reorders the rows of queries and keys as for a rotation, which changes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from mtp_gguf.gguf_tools.files.tensor_types import F32

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import ConfigReader
from ..checkpoints.source_tensors import SourceTensors
from ..plans.recipe import Arithmetic, Order, Target
from .layers import Layer, LayeredModel, count_mtp_layers, opened
from .target_model import MAX_LAYERS, HeadChoice, TargetModel

ARCHITECTURES: tuple[str, ...] = ("NemotronHForCausalLM",)

_MAMBA, _ATTENTION, _EXPERTS = "M", "*", "E"  # of hybrid_override_pattern
_KINDS = {
    "mamba": _MAMBA,
    "linear_attention": _MAMBA,
    "attention": _ATTENTION,
    "full_attention": _ATTENTION,
    "moe": _EXPERTS,
}
_CONTEXT = 1 << 20  # upstream's, as attention has no positions
_PADDED = 8  # llama.cpp's converter has a multiple of it as the number of tokens


@dataclass(frozen=True)
class _Dims:
    """kinds: of the trunk's layers. latent: width of the experts' input, 0 for that of the model.

    inner, state, groups, m_heads, conv: of Mamba 2.
    """

    hidden: int
    kinds: str
    n_mtp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    expert_ffn: int
    shared_ffn: int
    latent: int
    inner: int
    state: int
    groups: int
    m_heads: int
    conv: int

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.groups * self.state


def target_model(checkpoint: Checkpoint, head: HeadChoice) -> TargetModel:
    """Name and shape of every target; CheckpointError if the checkpoint does not fit."""
    config = checkpoint.reader
    _check(config)
    dims = _read_dims(config, count_mtp_layers(checkpoint, config, head, parts=2))
    sources = opened(checkpoint, head)
    root = "backbone." if sources.has("backbone.embeddings.weight") else "model."
    model = LayeredModel(
        architecture="nemotron_h_moe",
        n_trunk=len(dims.kinds),
        n_mtp=dims.n_mtp,
        n_vocab=dims.vocab,
        shared=_shared(sources, dims, root),
        trunk=_trunk(sources, dims, root),
        head=_head(sources, dims),
        hparams=lambda n_mtp: _hparams(config, dims, n_mtp),
        trunk_names=(f"{root}layers.",),
        shared_names=(f"{root}embeddings.", f"{root}norm_f.", "lm_head."),
    )
    return model.target_model(sources, head)


def _check(c: ConfigReader) -> None:
    """CheckpointError for what llama.cpp computes otherwise."""
    if (kind := c.config.get("mlp_hidden_act", "relu2")) != "relu2":
        raise c.fault("mlp_hidden_act", "relu2, as in llama.cpp", kind)
    for key in ("attention_bias", "mlp_bias", "use_bias", "tie_word_embeddings"):
        if c.flag(key):
            raise c.fault(key, "false", True)
    if c.size("num_nextn_predict_layers", 0, least=0) > 1:
        found = c.config["num_nextn_predict_layers"]
        raise c.fault("num_nextn_predict_layers", "1, the number that llama.cpp drafts with", found)
    if (vocab := c.size("vocab_size")) % _PADDED:
        raise c.fault("vocab_size", f"a multiple of {_PADDED}, as in llama.cpp's files", vocab)


def _read_dims(c: ConfigReader, n_mtp: int) -> _Dims:
    heads, m_heads = c.size("num_attention_heads"), c.size("mamba_num_heads")
    inner, groups = m_heads * c.size("mamba_head_dim"), c.size("n_groups")
    if inner % groups:
        raise c.fault("n_groups", f"a divisor of {inner} (heads of Mamba 2)", groups)
    if (head_dim := c.size("head_dim")) % 2:
        raise c.fault("head_dim", "an even number", head_dim)
    return _Dims(
        hidden=c.size("hidden_size"),
        kinds=_kinds(c),
        n_mtp=n_mtp,
        heads=heads,
        kv_heads=c.size("num_key_value_heads", most=heads),
        head_dim=head_dim,
        vocab=c.size("vocab_size"),
        experts=c.size("n_routed_experts"),
        expert_ffn=c.size("moe_intermediate_size"),
        shared_ffn=c.size("moe_shared_expert_intermediate_size"),
        latent=c.size("moe_latent_size", 0, least=0),
        inner=inner,
        state=c.size("ssm_state_size"),
        groups=groups,
        m_heads=m_heads,
        conv=c.size("conv_kernel", 4),
    )


def _kinds(c: ConfigReader) -> str:
    """The kinds of the trunk's layers, from either key that has them."""
    key = "hybrid_override_pattern"
    found = c.config.get(key)
    if found is None:
        key = "layers_block_type"
        found = c.config.get(key)
        if isinstance(found, list):
            found = "".join(_KINDS.get(kind, "-") for kind in found if isinstance(kind, str))
    if not isinstance(found, str) or not 1 <= len(found) < MAX_LAYERS:  # and the MTP layer
        raise c.fault(key, f"the kinds of 1 to {MAX_LAYERS - 1} layers", found)
    if set(found) - {_MAMBA, _ATTENTION, _EXPERTS}:
        raise c.fault(key, "layers of Mamba 2, attention or experts", c.config[key])
    return found


def _shared(sources: SourceTensors, d: _Dims, root: str) -> Iterator[Target]:
    model = Layer(sources, "", "")
    yield model.take(f"{root}norm_f.weight", "output_norm.weight", d.hidden)
    yield model.take(f"{root}embeddings.weight", "token_embd.weight", d.vocab, d.hidden)
    yield model.take("lm_head.weight", "output.weight", d.vocab, d.hidden)


def _trunk(sources: SourceTensors, d: _Dims, root: str) -> Iterator[Target]:
    tensors = {_MAMBA: _mamba, _ATTENTION: _attention, _EXPERTS: _experts}
    for index, kind in enumerate(d.kinds):
        layer = Layer(sources, f"{root}layers.{index}.", f"blk.{index}.")
        yield layer.take("norm.weight", "attn_norm.weight", d.hidden)
        yield from tensors[kind](layer, d)


def _head(sources: SourceTensors, d: _Dims) -> Iterator[Target]:
    attention, experts = (
        Layer(sources, f"mtp.layers.{part}.", f"blk.{len(d.kinds)}.") for part in (0, 1)
    )
    yield from attention.mtp_input(d.hidden)
    yield attention.take("norm.weight", "attn_norm.weight", d.hidden)
    yield from _attention(attention, d)
    yield experts.take("norm.weight", "post_attention_norm.weight", d.hidden)
    yield from _experts(experts, d)
    yield experts.take("final_layernorm.weight", "nextn.shared_head_norm.weight", d.hidden)


def _mamba(layer: Layer, d: _Dims) -> Iterator[Target]:
    rows = d.inner + d.channels + d.m_heads
    yield layer.take("mixer.in_proj.weight", "ssm_in.weight", rows, d.hidden)
    yield layer.take("mixer.conv1d.weight", "ssm_conv1d.weight", d.channels, 1, d.conv, fixed=F32)
    yield from layer.optional("mixer.conv1d.bias", "ssm_conv1d.bias", d.channels)
    yield layer.take("mixer.dt_bias", "ssm_dt.bias", d.m_heads)
    yield layer.folded("mixer.A_log", "ssm_a", d.m_heads, 1, Arithmetic.NEGATED_EXP)
    yield layer.folded("mixer.D", "ssm_d", d.m_heads, 1)
    yield layer.folded("mixer.norm.weight", "ssm_norm.weight", d.inner, d.inner // d.groups)
    yield layer.take("mixer.out_proj.weight", "ssm_out.weight", d.hidden, d.inner)


def _attention(layer: Layer, d: _Dims) -> Iterator[Target]:
    width = d.heads * d.head_dim
    for part, heads in (("q", d.heads), ("k", d.kv_heads), ("v", d.kv_heads)):
        order = None if part == "v" else _paired(heads, d.head_dim)
        yield layer.take(
            *(f"mixer.{part}_proj.weight", f"attn_{part}.weight", heads * d.head_dim, d.hidden),
            row_order=order,
        )
    yield layer.take("mixer.o_proj.weight", "attn_output.weight", d.hidden, width)


@cache
def _paired(heads: int, head_dim: int) -> Order:
    """Rows whose halves of a head alternate."""
    halves = np.arange(heads * head_dim).reshape(heads, 2, -1)
    rows: Order = halves.swapaxes(1, 2).reshape(-1)
    return rows


def _experts(layer: Layer, d: _Dims) -> Iterator[Target]:
    width = d.latent or d.hidden
    yield layer.take("mixer.gate.weight", "ffn_gate_inp.weight", d.experts, d.hidden, fixed=F32)
    yield layer.take("mixer.gate.e_score_correction_bias", "exp_probs_b.bias", d.experts)
    if d.latent:
        yield layer.take(
            "mixer.fc1_latent_proj.weight", "ffn_latent_down.weight", d.latent, d.hidden
        )
        yield layer.take("mixer.fc2_latent_proj.weight", "ffn_latent_up.weight", d.hidden, d.latent)
    for part, shape, shared in (
        ("up", (d.expert_ffn, width), (d.shared_ffn, d.hidden)),
        ("down", (width, d.expert_ffn), (d.hidden, d.shared_ffn)),
    ):
        name = f"mixer.experts.{{}}.{part}_proj.weight"
        yield layer.experts(name, f"ffn_{part}_exps.weight", d.experts, *shape)
        yield layer.take(
            f"mixer.shared_experts.{part}_proj.weight", f"ffn_{part}_shexp.weight", *shared
        )


def _hparams(c: ConfigReader, d: _Dims, n_mtp: int) -> dict[str, object]:
    of_experts = [d.expert_ffn if kind == _EXPERTS else 0 for kind in d.kinds]
    of_attention = [d.kv_heads if kind == _ATTENTION else 0 for kind in d.kinds]
    eps, theta = (
        c.number(c.config, key, 0.0, least=0) if key in c.config else None
        for key in ("norm_eps", "rope_theta")
    )
    return {
        "block_count": len(d.kinds) + n_mtp,
        "context_length": _CONTEXT,
        "embedding_length": d.hidden,
        "vocab_size": d.vocab,
        "attention.head_count": d.heads,
        "attention.key_length": d.head_dim,
        "attention.value_length": d.head_dim,
        "rope.dimension_count": d.hidden // d.heads,
        "expert_count": d.experts,
        "expert_used_count": c.size("num_experts_per_tok", most=d.experts),
        "expert_feed_forward_length": d.expert_ffn,
        "expert_shared_feed_forward_length": d.shared_ffn,
        "expert_shared_count": c.size("n_shared_experts", 1),
        "expert_group_count": c.size("n_group", 1),
        "expert_group_used_count": c.size("topk_group", 1),
        "ssm.conv_kernel": d.conv,
        "ssm.state_size": d.state,
        "ssm.group_count": d.groups,
        "ssm.inner_size": d.inner,
        "ssm.time_step_rank": d.m_heads,
        "moe_latent_size": d.latent or None,
        "nextn_predict_layers": n_mtp or None,
        "attention.layer_norm_epsilon": c.number(c.config, "layer_norm_epsilon", 1e-5, least=0),
        "expert_weights_scale": c.number(c.config, "routed_scaling_factor", 1.0),
        "attention.layer_norm_rms_epsilon": eps,
        "rope.freq_base": theta,
        "feed_forward_length": (*of_experts, *[d.expert_ffn] * n_mtp),
        "attention.head_count_kv": (*of_attention, *[d.kv_heads] * n_mtp),
        "expert_weights_norm": c.config.get("norm_topk_prob", True) is True,
        "rope.scaling.finetuned": False,
    }
