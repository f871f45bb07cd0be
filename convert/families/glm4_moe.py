"""GLM-4.5, 4.6 and 4.7: the MTP head of their checkpoints, which `graft` adds to a GGUF.

The GGUF side is llama.cpp's `glm4moe` (src/models/glm4-moe.cpp), the Hugging Face side the layer
after the trunk's, which transformers' `glm4_moe` does not load. Nothing is transformed. Whole
models are left to llama.cpp's converter, which writes the head, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mtp_gguf.gguf_tools.errors import CheckpointError

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.config import ConfigReader
from ..checkpoints.quantized import check_schemes
from ..checkpoints.source_tensors import SourceTensors
from ..plans.recipe import Target
from .layers import Layer, LayeredModel
from .target_model import MAX_LAYERS, SIGMOID, HeadChoice, TargetModel

ARCHITECTURES: tuple[str, ...] = ("Glm4MoeForCausalLM",)


@dataclass(frozen=True)
class _Dims:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    expert_ffn: int
    shared_experts: int


def target_model(checkpoint: Checkpoint, head: HeadChoice) -> TargetModel:
    """Name and shape of every target; CheckpointError if the checkpoint does not fit."""
    config = checkpoint.reader
    if head is not HeadChoice.BLOCK:
        raise CheckpointError(
            f"{checkpoint.folder}: of GLM-4.5 only the MTP head is converted (graft MODEL.gguf "
            "--from this); llama.cpp's convert_hf_to_gguf.py converts whole models with their head"
        )
    dims = _read_dims(config)
    check_schemes(tensor for name, tensor in checkpoint.tensors.items() if checkpoint.in_head(name))
    sources = SourceTensors(checkpoint)
    model = LayeredModel(
        architecture="glm4moe",
        n_trunk=dims.layers,
        n_mtp=1,
        n_vocab=dims.vocab,
        shared=(),
        trunk=(),
        head=_head(sources, dims),
        hparams=lambda _: _hparams(config, dims),
        trunk_names=[f"model.layers.{i}." for i in range(dims.layers)],
    )
    return model.target_model(sources, head)


def _read_dims(c: ConfigReader) -> _Dims:
    """The sizes of the config, with the defaults of transformers' Glm4MoeConfig."""
    if (found := c.size("num_nextn_predict_layers", 0, least=0)) != 1:
        raise c.fault("num_nextn_predict_layers", "1, the number that llama.cpp drafts with", found)
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    return _Dims(
        hidden=hidden,
        layers=c.size("num_hidden_layers", most=MAX_LAYERS - 1),
        heads=heads,
        kv_heads=c.size("num_key_value_heads", most=heads),
        head_dim=c.size("head_dim", hidden // heads),
        vocab=c.size("vocab_size"),
        experts=c.size("n_routed_experts"),
        expert_ffn=c.size("moe_intermediate_size"),
        shared_experts=c.size("n_shared_experts", 1),
    )


def _head(sources: SourceTensors, d: _Dims) -> Iterator[Target]:
    layer = Layer(sources, f"model.layers.{d.layers}.", f"blk.{d.layers}.")
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    yield from layer.mtp_input(d.hidden)
    yield from layer.mtp_output(d.hidden, d.vocab)
    yield layer.take("input_layernorm.weight", "attn_norm.weight", d.hidden)
    yield layer.take("post_attention_layernorm.weight", "post_attention_norm.weight", d.hidden)
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        yield layer.take(f"self_attn.{name}_proj.weight", f"attn_{name}.weight", rows, d.hidden)
        yield from layer.optional(f"self_attn.{name}_proj.bias", f"attn_{name}.bias", rows)
    yield layer.take("self_attn.o_proj.weight", "attn_output.weight", d.hidden, q)
    for name in ("q_norm", "k_norm"):
        yield from layer.optional(f"self_attn.{name}.weight", f"attn_{name}.weight", d.head_dim)
    yield from layer.gated_experts(d.hidden, d.expert_ffn, d.experts)
    shared = d.shared_experts * d.expert_ffn
    yield from layer.gated(d.hidden, shared, "_shexp", "mlp.shared_experts.")


def _hparams(c: ConfigReader, d: _Dims) -> dict[str, object]:
    """The metadata that the head must have in common with the trunk that it is added to."""
    partial = c.number(c.rope(), "partial_rotary_factor", 0.5, least=0, most=1)
    return {
        "block_count": d.layers + 1,
        "context_length": c.size("max_position_embeddings", 131072),
        "embedding_length": d.hidden,
        "feed_forward_length": c.size("intermediate_size"),
        "attention.head_count": d.heads,
        "attention.head_count_kv": d.kv_heads,
        "attention.key_length": d.head_dim,
        "attention.value_length": d.head_dim,
        "rope.dimension_count": int(d.head_dim * partial),
        "expert_count": d.experts,
        "expert_used_count": c.size("num_experts_per_tok", most=d.experts),
        "expert_feed_forward_length": d.expert_ffn,
        "expert_shared_count": d.shared_experts,
        "leading_dense_block_count": c.size("first_k_dense_replace", 1, least=0),
        "expert_gating_func": SIGMOID,
        "nextn_predict_layers": 1,
        "attention.layer_norm_rms_epsilon": c.number(c.config, "rms_norm_eps", 1e-5, least=0),
    }
