"""Nemotron 3: conversions of checkpoints that transformers' own class writes, with a head added.

Compared with the pinned llama.cpp's converter and with transformers' logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from support.upstream.families import (
    NEEDS_TRANSFORMERS,
    Array,
    Family,
    FamilyTests,
    UpstreamTests,
    missing,
)

pytestmark = NEEDS_TRANSFORMERS

WIDTH, HEAD_DIM, EXPERTS = 64, 32, 4
KINDS = ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": WIDTH,
    "layers_block_type": KINDS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "moe_latent_size": 32,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 512,
    "eos_token_id": 5,
}


def make() -> Any:
    from transformers import NemotronHConfig, NemotronHForCausalLM  # noqa: PLC0415

    return NemotronHForCausalLM(NemotronHConfig(**SIZES))


def spread(name: str) -> tuple[float, float] | None:
    if "norm" in name or "dt_bias" in name:
        return 1, 0.2
    around_zero = "correction" in name or name.endswith(".D") or "conv1d.bias" in name
    return (0, 0.2) if around_zero else None


HEAD = {  # beside its two layers, under the names of the published ones
    "0.enorm.weight": (WIDTH,),
    "0.hnorm.weight": (WIDTH,),
    "0.eh_proj.weight": (WIDTH, 2 * WIDTH),
    "1.final_layernorm.weight": (WIDTH,),
}


def negated_exp(values: Array) -> Array:
    found: Array = -np.exp(values.astype(np.float64)).astype(np.float32)
    return np.reshape(found, (-1, 1))


def halves_alternate(rows: Array) -> Array:
    """The rows of each head, one of its first half and one of its second in alternation."""
    halves = np.reshape(rows, (-1, 2, HEAD_DIM // 2, WIDTH))
    return np.reshape(np.swapaxes(halves, 1, 2), rows.shape)


FAMILY = Family(
    make,
    spread,
    {f"mtp.layers.{name}": shape for name, shape in HEAD.items()},
    like={"mtp.layers.0.": "backbone.layers.2.", "mtp.layers.1.": "backbone.layers.4."},
    tolerance=1e-2,  # of logits up to 4
    said="can draft: MTP head in block 5",
    in_f16="blk.5.attn_q.weight",
    known=("blk.5.ffn_gate_inp.weight: expected BF16, found F32",),  # F32 in upstream's trunk
    golden={
        "blk.0.ssm_a": lambda t: negated_exp(t["backbone.layers.0.mixer.A_log"]),
        "blk.5.attn_k.weight": lambda t: halves_alternate(t["mtp.layers.0.mixer.k_proj.weight"]),
        "blk.5.ffn_up_exps.weight": lambda t: np.stack(
            [t[f"mtp.layers.1.mixer.experts.{i}.up_proj.weight"] for i in range(EXPERTS)]
        ),
    },
    damaged=[
        ("mtp.layers.0.enorm.weight", missing, "enorm.weight: expected shape [64] by the config"),
        ("mtp.layers.1.mixer.gate.weight", lambda t: t[1:], "[4, 64] by the config, found [3, 64]"),
    ],
    refused=[
        (
            {"layers_block_type": [*KINDS[:-1], "mlp"]},
            "layers_block_type: expected layers of Mamba",
        ),
        ({"layers_block_type": 3}, "layers_block_type: expected the kinds of 1 to 511 layers"),
        ({"hybrid_override_pattern": "M-"}, "hybrid_override_pattern: expected layers of Mamba"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: expected 1, the number that"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act: expected relu2, as in llama.cpp"),
        ({"vocab_size": 1021}, "vocab_size: expected a multiple of 8"),
        ({"n_groups": 3}, "n_groups: expected a divisor of 64"),
        ({"head_dim": 31}, "head_dim: expected an even number"),
        ({"attention_bias": True}, "attention_bias: expected false, found True"),
    ],
)


class TestFamily(FamilyTests, UpstreamTests):
    pass
