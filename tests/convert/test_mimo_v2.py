"""MiMo-V2: conversions of checkpoints that transformers' own class writes, with a head added.

Compared with the pinned llama.cpp's converter and with transformers' logits. Published checkpoints
are in FP8, with queries, keys and values in one tensor; they are imitated.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.commands import invoke, refused, succeed
from support.upstream.compare import file_differences
from support.upstream.convert_upstream import convert
from support.upstream.describe import describe
from support.upstream.families import (
    NEEDS_TRANSFORMERS,
    Family,
    FamilyTests,
    Trunk,
    UpstreamTests,
    change,
    missing,
    save,
    tensors_of,
    values_of,
)

pytestmark = NEEDS_TRANSFORMERS

WIDTH, FFN, LAYERS, HEADS, KEY, VALUE, MTP = 64, 96, 4, 8, 32, 16, 3
WINDOWS = [0, 1, 1, 0]
KV_HEADS = (4, 8)  # transformers has twice as many in layers with a window
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "swa_num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS[0],
    "swa_num_key_value_heads": KV_HEADS[1],
    "head_dim": KEY,
    "swa_head_dim": KEY,
    "v_head_dim": VALUE,
    "swa_v_head_dim": VALUE,
    "hybrid_layer_pattern": WINDOWS,
    "layer_types": [("full_attention", "sliding_attention")[w] for w in WINDOWS],
    "moe_layer_freq": [0, 1, 1, 1],
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "sliding_window": 8,
    "layernorm_epsilon": 1e-5,
    "attention_value_scale": 0.707,
    "max_position_embeddings": 512,
    "eos_token_id": 5,
}
ROPE: dict[str, Any] = {"rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.5}


def make() -> Any:
    from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM  # noqa: PLC0415

    partial = {"rope_type": "default", "partial_rotary_factor": ROPE["partial_rotary_factor"]}
    rope = {
        "full_attention": {**partial, "rope_theta": ROPE["rope_theta"]},
        "sliding_attention": {**partial, "rope_theta": ROPE["swa_rope_theta"]},
    }
    return MiMoV2FlashForCausalLM(MiMoV2FlashConfig(**SIZES, rope_parameters=rope))


def spread(name: str) -> tuple[float, float] | None:
    if "norm" in name:
        return 1, 0.2
    return (0, 0.2) if "sinks" in name or "correction" in name else None


HEAD = {  # of a layer, under the names of the published ones
    "enorm.weight": (WIDTH,),
    "hnorm.weight": (WIDTH,),
    "eh_proj.weight": (WIDTH, 2 * WIDTH),
    "input_layernorm.weight": (WIDTH,),
    "self_attn.q_proj.weight": (HEADS * KEY, WIDTH),
    "self_attn.k_proj.weight": (KV_HEADS[1] * KEY, WIDTH),
    "self_attn.v_proj.weight": (KV_HEADS[1] * VALUE, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, HEADS * VALUE),
    "self_attn.attention_sink_bias": (HEADS,),
    "pre_mlp_layernorm.weight": (WIDTH,),
    "mlp.gate_proj.weight": (FFN, WIDTH),
    "mlp.up_proj.weight": (FFN, WIDTH),
    "mlp.down_proj.weight": (WIDTH, FFN),
    "final_layernorm.weight": (WIDTH,),
}


def publish(folder: Path) -> None:
    """Write a config that upstream reads.

    It reads that of a `mimo_v2_flash` through transformers, which renames what it needs.
    """
    named: dict[str, Any] = {"model_type": "mimo_v2", "architectures": ["MiMoV2ForCausalLM"]}
    change(folder, rope_parameters=None, **ROPE, **named)


FAMILY = Family(
    make,
    spread,
    {f"model.mtp.layers.{i}.{n}": shape for i in range(MTP) for n, shape in HEAD.items()},
    tolerance=8e-3,  # of logits up to 4; a window of one token less shows as 0.5
    said="MTP head in blocks 4 to 6",
    in_f16="blk.6.attn_qkv.weight",
    publish=publish,
    golden={
        "blk.6.attn_qkv.weight": lambda t: np.concatenate(
            [t[f"model.mtp.layers.2.self_attn.{part}_proj.weight"] for part in "qkv"]
        ),
        "blk.4.layer_output_norm.weight": lambda t: t["model.mtp.layers.0.final_layernorm.weight"],
    },
    damaged=[
        (
            "model.mtp.layers.1.hnorm.weight",
            missing,
            "hnorm.weight: expected shape [64] by the config, found no such",
        )
    ],
    refused=[
        ({"swa_head_dim": 64}, "swa_head_dim: expected head_dim (32), as in llama.cpp, found 64"),
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern: expected 4 entries"),
        ({"hybrid_layer_pattern": [0, 1, 2, 0]}, "hybrid_layer_pattern: expected entries 0 and 1"),
        ({"topk_method": "greedy"}, "topk_method: expected noaux_tc, as in llama.cpp"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor: expected 1"),
        ({"n_shared_experts": 1}, "n_shared_experts: expected none, as in llama.cpp, found 1"),
        ({"norm_topk_prob": False}, "norm_topk_prob: expected true, as llama.cpp normalizes"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type: expected default, found 'yarn'"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, but the checkpoint has"),
        ({"v_head_dim": 24, "swa_v_head_dim": 24}, "by the config, found"),
        ({"scoring_func": "softmax"}, "scoring_func: expected sigmoid, as in llama.cpp"),
    ],
)


class TestFamily(FamilyTests, UpstreamTests):
    pass


@pytest.fixture(scope="module")
def fused(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with queries, keys and values in one tensor, as in MiMo-V2.5."""
    import torch  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("mimo") / "mimo-fused"
    shutil.copytree(checkpoint, folder)
    tensors = tensors_of(folder)
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    save(folder, tensors)
    return folder


@pytest.fixture(scope="module")
def published(fused: Path) -> Path:
    return fused


def test_separate_projections(checkpoint: Path, fused: Path, whole: Path, tmp_path: Path) -> None:
    """The trunk is upstream's. Of the head upstream makes a file that llama.cpp refuses."""
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    succeed("convert", checkpoint, "--no-mtp", "--quant", "BF16", "-o", ours)
    assert file_differences(convert(checkpoint, theirs, "bf16", ("--no-mtp",)), ours) == []
    succeed("convert", fused, "--quant", "BF16", "-o", tmp_path / "fused.gguf")
    heads = [
        {name: t for name, t in describe(path).tensors.items() if name >= "blk.4."}
        for path in (whole, tmp_path / "fused.gguf")
    ]
    assert heads[0] == heads[1]


@pytest.mark.parametrize("devices", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_blocks_of_several_devices(devices: int, fused: Path, tmp_path: Path) -> None:
    """FP8, with the rows and scales of each device after those of the one before."""
    folder = shutil.copytree(fused, tmp_path / "mimo-fp8")
    save(folder, dict(in_fp8(tensors_of(folder), devices)))
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    change(folder, quantization_config=block)
    out = tmp_path / "ours.gguf"
    succeed("convert", folder, "--quant", "F32", "-o", out)
    assert file_differences(convert(folder, tmp_path / "theirs.gguf", "f32"), out) == []


def test_experts_in_mxfp4(fused: Path, tmp_path: Path) -> None:
    """As MiMo-V2.6 has them; the type MXFP4 keeps them as they are."""
    import torch  # noqa: PLC0415

    folder = shutil.copytree(fused, tmp_path / "mimo-mxfp4")
    tensors = tensors_of(folder)
    noise = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        rows, columns = tensors[name].shape
        codes = torch.randint(0, 256, (rows, columns // 2), generator=noise, dtype=torch.uint8)
        codes[:, ::16] = 0x0F  # of the largest size in each block, as an encoder's
        exponents = torch.randint(118, 130, (rows, columns // 32), generator=noise)
        tensors |= {name: codes, f"{name}_scale": exponents.to(torch.uint8)}
    save(folder, tensors)
    config = {"quant_method": "fp8", "store_dtype": "mxfp4", "weight_block_size": [128, 128]}
    change(folder, quantization_config=config)
    out = tmp_path / "ours.gguf"
    succeed("convert", folder, "--quant", "BF16", "--tensor-type", "_exps=MXFP4", "-o", out)
    theirs = values_of(convert(folder, tmp_path / "theirs.gguf", "bf16"))
    ours = values_of(out)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []


def in_fp8(tensors: dict[str, Any], devices: int) -> Iterator[tuple[str, Any]]:
    """The fused projections and the dense networks in FP8, the former divided among devices."""
    import torch  # noqa: PLC0415

    def scaled(name: str, values: Any, groups: int) -> Iterator[tuple[str, Any]]:
        rows = len(values) // groups
        scale = torch.rand(groups * -(-rows // 128), 1) + 0.5
        yield name, values.to(torch.float8_e4m3fn)
        yield f"{name}_scale_inv", scale

    for name, values in tensors.items():
        if "qkv_proj" in name:
            kv_heads = KV_HEADS[len(values) > (HEADS + KV_HEADS[0]) * KEY + KV_HEADS[0] * VALUE]
            sizes = [HEADS * KEY, kv_heads * KEY, kv_heads * VALUE]
            parts = [part.chunk(devices) for part in values.split(sizes)]
            divided = torch.cat(
                [rows for of_device in zip(*parts, strict=True) for rows in of_device]
            )
            yield from scaled(name, divided, devices)
        elif "up_proj" in name:
            yield from scaled(name, values, 1)
        else:
            yield name, values


def test_vocabularies_are_for_our_own_drafting(checkpoint: Path, tmp_path: Path) -> None:
    words = ("--fastmtp: draft vocabularies are for", "found mimo2, which drafts over the whole")
    refused(
        tmp_path, "convert", checkpoint, "--fastmtp", "512", "-o", tmp_path / "x.gguf", words=words
    )
    assert "--fastmtp" not in succeed("doctor", checkpoint)


def test_a_head_that_the_config_promises(trunk: Trunk, tmp_path: Path) -> None:
    folder = shutil.copytree(trunk[0], tmp_path / "model")
    change(folder, num_nextn_predict_layers=3)
    words = ("num_nextn_predict_layers is 3, but the checkpoint has no MTP layers", "--no-mtp")
    refused(tmp_path, "convert", folder, "-o", tmp_path / "x.gguf", words=words)
    assert "claimed-head" in invoke("doctor", folder, "--json").output
    succeed("convert", folder, "--no-mtp", "-o", tmp_path / "x.gguf")
