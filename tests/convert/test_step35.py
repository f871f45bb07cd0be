"""Step 3.5: conversions of checkpoints that transformers' own class writes, with a head added.

Compared with the pinned llama.cpp's converter and with transformers' logits.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from support.commands import refused, succeed
from support.upstream import compare
from support.upstream.describe import describe
from support.upstream.families import (
    NEEDS_TRANSFORMERS,
    Family,
    FamilyTests,
    Trunk,
    UpstreamTests,
    missing,
    plus_one,
    save,
    tensors_of,
)

pytestmark = NEEDS_TRANSFORMERS

WIDTH, FFN, LAYERS, HEAD_DIM, MTP, VOCAB, EXPERTS = 64, 96, 4, 32, 3, 1024, 4
HEADS, WINDOW_HEADS, KV_HEADS = 2, 4, 2
FULL, WINDOW = "full_attention", "sliding_attention"
KINDS = [FULL, WINDOW, WINDOW, FULL, WINDOW, WINDOW, WINDOW]
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "head_dim": HEAD_DIM,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
    "moe_router_scaling_factor": 3.0,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "eos_token_id": 5,
    "pad_token_id": 1,
    "swiglu_limits": [0.0, 0.0, 0.5, None, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0],
}
THETAS = {FULL: 5e6, WINDOW: 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
    "original_max_position_embeddings": 256,
}
# With the keys of Step-3.5-Flash, nested as in Step-3.7-Flash.
TEXT_CONFIG: dict[str, Any] = {
    **SHARED,
    "num_attention_groups": KV_HEADS,
    "attention_other_setting": {
        "attention_type": WINDOW,
        "num_attention_heads": WINDOW_HEADS,
        "num_attention_groups": KV_HEADS,
        "head_dim": HEAD_DIM,
    },
    "moe_num_experts": EXPERTS,
    "moe_top_k": 2,
    "moe_layers_enum": "1,2,3",
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "rms_norm_eps": 1e-5,
    "layer_types": KINDS,
    "rope_theta": [THETAS[kind] for kind in KINDS],
    "partial_rotary_factors": [1.0 if kind == WINDOW else 0.5 for kind in KINDS],
    "rope_scaling": LLAMA3,
    "num_nextn_predict_layers": MTP,
}
PUBLISHED = {
    "architectures": ["Step3p7ForConditionalGeneration"],
    "model_type": "step",  # upstream reads a known one through transformers, which renames keys
    "text_config": TEXT_CONFIG,
}


def make() -> Any:
    from transformers import (  # noqa: PLC0415
        Step3p7Config,
        Step3p7ForConditionalGeneration,
        Step3p7TextConfig,
        Step3p7VisionConfig,
    )

    rope = {
        kind: {"rope_type": "default", "rope_theta": THETAS[kind], "partial_rotary_factor": part}
        for kind, part in ((FULL, 0.5), (WINDOW, 1.0))
    }
    rope[FULL] |= LLAMA3
    text = Step3p7TextConfig(
        **SHARED,
        num_key_value_heads=KV_HEADS,
        num_sliding_attention_heads=WINDOW_HEADS,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        layer_types=KINDS,
        mlp_layer_types=["dense", *["sparse"] * 3, *["dense"] * MTP],
        num_nextn_predict_layers=MTP,
        rope_parameters=rope,
    )
    tower = Step3p7VisionConfig(width=32, layers=1, heads=2, image_size=28, patch_size=14)
    return Step3p7ForConditionalGeneration(Step3p7Config(text_config=text, vision_config=tower))


def spread(name: str) -> tuple[float, float] | None:
    return (0, 0.2) if "norm" in name or "correction" in name else None


QUERIES, KEYS = WINDOW_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
HEAD = {  # of a layer, under the names of the published ones
    "eh_proj.weight": (WIDTH, 2 * WIDTH),
    "enorm.weight": (WIDTH,),
    "hnorm.weight": (WIDTH,),
    "input_layernorm.weight": (WIDTH,),
    "post_attention_layernorm.weight": (WIDTH,),
    "mlp.gate_proj.weight": (FFN, WIDTH),
    "mlp.up_proj.weight": (FFN, WIDTH),
    "mlp.down_proj.weight": (WIDTH, FFN),
    "self_attn.q_proj.weight": (QUERIES, WIDTH),
    "self_attn.k_proj.weight": (KEYS, WIDTH),
    "self_attn.v_proj.weight": (KEYS, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, QUERIES),
    "self_attn.g_proj.weight": (WINDOW_HEADS, WIDTH),
    "self_attn.q_norm.weight": (HEAD_DIM,),
    "self_attn.k_norm.weight": (HEAD_DIM,),
    "transformer.shared_head.norm.weight": (WIDTH,),
    "transformer.shared_head.output.weight": (VOCAB, WIDTH),
}


def differences(expected: Path, found: Path) -> list[str]:
    """Differences between two files. The factors of the rotation may differ by their rounding."""
    ours, theirs = describe(found), describe(expected)
    name = "rope_freqs.weight"
    factors = [
        {t.name: t.data for t in GGUFReader(path).tensors if t.name == name}
        for path in (expected, found)
    ]
    if all(factors):
        assert np.allclose(factors[0][name], factors[1][name], rtol=1e-6, atol=0)
        ours, theirs = (
            replace(d, tensors={n: t for n, t in d.tensors.items() if n != name})
            for d in (ours, theirs)
        )
    return compare.differences(theirs, ours)


def publish(folder: Path) -> None:
    """Leave out the vision tower, and write a published config."""
    towers = ("vision_model.", "vit_large_projector.")
    save(folder, {n: t for n, t in tensors_of(folder).items() if not n.startswith(towers)})
    (folder / "config.json").write_text(json.dumps(PUBLISHED), encoding="utf-8")


FAMILY = Family(
    make,
    spread,
    {
        f"model.layers.{LAYERS + i}.{name}": shape
        for i in range(MTP)
        for name, shape in HEAD.items()
    },
    tolerance=1e-2,  # of logits up to 4
    said="MTP head in blocks 4 to 6",
    in_f16="blk.6.attn_q.weight",
    publish=publish,
    inside="text_config",
    joined={"num_nextn_predict_layers": 0},
    compared=("--filter", "blk"),  # no checkpoint has rope_freqs
    differences=differences,
    golden={
        "blk.6.nextn.enorm.weight": plus_one("model.layers.6.enorm.weight"),
        "blk.6.nextn.shared_head_norm.weight": plus_one(
            "model.layers.6.transformer.shared_head.norm.weight"
        ),
        "blk.5.attn_q_norm.weight": plus_one("model.layers.5.self_attn.q_norm.weight"),
    },
    damaged=[
        (
            "model.layers.5.enorm.weight",
            missing,
            "model.layers.5.enorm.weight: expected shape [64] by the config, found no such",
        )
    ],
    refused=[
        ({"layer_types": KINDS[:2]}, "layer_types: expected at least 4 entries"),
        ({"layer_types": ["linear"] * 7}, "layer_types: expected entries full_attention and"),
        ({"partial_rotary_factors": [1.0] * 7}, "partial_rotary_factors: expected 0.5, and 1 with"),
        ({"rope_theta": [1e4]}, "rope_theta: expected at least 4 numbers"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type: expected default or llama3"),
        ({"swiglu_limits": ["7"]}, "swiglu_limits: expected a list of numbers"),
        ({"swiglu_limits": 7}, "swiglu_limits: expected a list of numbers"),
        ({"moe_layers_enum": "a,b"}, "moe_layers_enum: expected numbers of layers"),
        ({"moe_layers_enum": None}, "moe_layers_enum: expected numbers of layers"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation: expected sigmoid"),
        ({"attention_other_setting": 3}, "attention_other_setting: expected an object, found 3"),
        ({"use_qk_norm": False}, "use_qk_norm: expected true"),
        ({"attention_bias": True}, "attention_bias: expected false, as in llama.cpp"),
        ({"moe_every_n_layer": 2}, "moe_every_n_layer: expected 1"),
        ({"norm_expert_weight": 1}, "norm_expert_weight: expected true or false"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, but the checkpoint has"),
    ],
)


class TestFamily(FamilyTests, UpstreamTests):
    pass


def test_towers_are_skipped(trunk: Trunk, tmp_path: Path) -> None:
    said = succeed("convert", trunk[0], "--no-mtp", "-o", tmp_path / "x.gguf")
    assert "source tensors skipped: vision and audio towers" in said


def test_layouts_of_draft_vocabularies(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    layout = ("--fastmtp-layout", "table", "-o", out)
    words = ("expected layout ids for step35",)
    refused(tmp_path, "convert", checkpoint, "--fastmtp", "512", *layout, words=words)
    said = succeed("convert", checkpoint, "--fastmtp", "512", "-o", out)
    assert "FastMTP 512 tokens, layout ids" in said
