"""The demo model: the reference trunk, and the MTP head beside it.

The trunk is `transformers`' model of the family and the head's block is the same library's decoder
layer, so that both equal the reference by construction. Shapes: B sequences of T tokens, hidden
size C, vocabulary V.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

# Every row that gets quantized (256 or 768 long) is a multiple of 256, so that k-quants apply.
# There are more V than K heads in the linear layers, so that a converter must reorder them.
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}


@dataclass(frozen=True)
class Family:
    """What the demo models of two families differ in.

    model, config, layer, norm: classes of transformers. axes: number of position axes, 0 for plain
    positions. rope: rotary parameters beyond ROPE. shape: sizes beyond SHAPE. stored: further
    fields of config.json.
    """

    model: Any
    config: Any
    layer: Any
    norm: Any
    axes: int = 0
    rope: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)
    stored: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "qwen3_5": Family(
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        modeling_qwen3_5.Qwen3_5DecoderLayer,
        modeling_qwen3_5.Qwen3_5RMSNorm,
        axes=3,
        rope={"mrope_section": [3, 3, 2], "mrope_interleaved": True},
        stored={
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "output_gate_type": "swish",
        },
    ),
    # Two of four experts and the shared one compute as much as the dense network of the other.
    "qwen3_next": Family(
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        modeling_qwen3_next.Qwen3NextDecoderLayer,
        modeling_qwen3_next.Qwen3NextRMSNorm,
        shape={
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 256,
        },
    ),
}


def make_config(family: str, vocab_size: int, pad: int, eos: list[int]) -> Any:
    """The configuration of a family's demo model."""
    kind = FAMILIES[family]
    fields: dict[str, Any] = {"full_attention_interval": 4, **SHAPE, **kind.shape}
    return kind.config(
        vocab_size=vocab_size,
        rope_parameters={**ROPE, **kind.rope},
        pad_token_id=pad,
        eos_token_id=eos,
        **fields,
    )


class DraftKeys:
    """Stands in for a KV cache inside one forward pass: earlier draft steps' keys and values.

    `update` has the reference cache's signature and returns the keys of all steps so far, oldest
    first, along the sequence axis: (B, heads, steps * T, head_dim).
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer: int, **_: object) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        self.values.append(value)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


def draft_mask(length: int, step: int) -> Tensor:
    """Which keys the rows of draft step `step` (from 0) may see; bool (1, 1, T, (step + 1) * T).

    A drafting engine holds the rows fed from the trunk up to where the draft starts, then one row
    for each later step of that draft. So row i sees the rows up to i of step 0, and of every later
    step the row i alone.
    """
    first = torch.ones(length, length, dtype=torch.bool).tril()
    later = torch.eye(length, dtype=torch.bool)
    parts = [first, *[later] * step]
    return torch.cat(parts, dim=1)[None, None]


class MtpHead(nn.Module):
    """One MTP block, named as the family's `mtp.*` tensors."""

    def __init__(self, family: Family, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        block = family.config.from_dict(
            config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        )
        block._attn_implementation = "sdpa"
        self.pre_fc_norm_embedding = family.norm(size, eps=eps)
        self.pre_fc_norm_hidden = family.norm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([family.layer(block, 0)])
        self.norm = family.norm(size, eps=eps)

    def forward(
        self, hidden: Tensor, embedding: Tensor, rope: tuple[Tensor, Tensor], past: DraftKeys
    ) -> Tensor:
        """One draft step for T rows at once.

        Row i pairs `hidden` after the trunk's final norm at position i (later steps: this method's
        own output) with the embedding of the token that follows it; `rope` is that token's.
        Returns the post-norm state (B, T, C) that goes to the output matrix and to the next step.
        """
        mask = draft_mask(hidden.shape[1], len(past.keys))
        pair = (self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden))
        x = self.fc(torch.cat(pair, dim=-1))
        x = self.layers[0](x, position_embeddings=rope, attention_mask=mask, past_key_values=past)
        state: Tensor = self.norm(x)
        return state


@torch.no_grad()
def remember(dt_bias: Tensor) -> None:
    """Start the time steps between 0.001 and 0.1, as the gated delta rule's authors do.

    The library's own start (1 throughout) makes every state forget within a token, and a short
    training never quite recovers from it.
    """
    step = torch.empty_like(dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


class DemoModel(nn.Module):
    """Trunk and head, with the losses that train them."""

    def __init__(self, family: str, config: Any) -> None:
        super().__init__()
        self.family = FAMILIES[family]
        self.trunk = self.family.model(config)
        self.mtp = MtpHead(self.family, config)
        for parameter in self.mtp.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=config.initializer_range)
        for layer in self.trunk.model.layers:
            if layer.block_type == "linear_attention":
                remember(layer.linear_attn.dt_bias)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The trunk's state after its final norm; (B, T) -> (B, T, C)."""
        state: Tensor = self.trunk.model(input_ids=tokens, use_cache=False).last_hidden_state
        return state

    def draft_states(self, hidden: Tensor, tokens: Tensor, steps: int) -> list[Tensor]:
        """The head's post-norm states of `steps` unrolled draft steps.

        Entry s has T - 1 - s rows; its row i was fed the token at i + 1 + s and predicts the token
        at i + 2 + s, as the trunk's own state at position i + 1 + s does.
        """
        length = tokens.shape[1]
        embedding = self.trunk.model.embed_tokens(tokens)
        positions = torch.arange(length + steps)[None]
        if self.family.axes:
            positions = positions.expand(self.family.axes, 1, -1)
        cos, sin = self.trunk.model.rotary_emb(embedding, positions)
        past, states, state = DraftKeys(), [], hidden
        for step in range(steps):
            # Rolled rows at the end pair a state with a token it never meets; they are cut below
            # and, being last, no kept row sees them.
            shift = step + 1
            rope = (cos[:, shift : shift + length], sin[:, shift : shift + length])
            state = self.mtp(state, embedding.roll(-shift, dims=1), rope, past)
            states.append(state[:, : length - shift])
        return states

    def output(self) -> Tensor:
        """The output matrix (V, C), shared by trunk, head and (tied) the token embedding."""
        weight: Tensor = self.trunk.lm_head.weight
        return weight
