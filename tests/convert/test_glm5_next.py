"""GLM-5.3-Flash: conversions of checkpoints that transformers' own class writes, with a head added.

Compared with the pinned llama.cpp's converter and with transformers' logits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from mtp_gguf.convert import pipeline
from support.checkpoint_edits import edit_json
from support.commands import invoke, succeed
from support.gguf_files import value_of
from support.stand_in_server import PATCHED_HELP, write_stand_in
from support.upstream.compare import file_differences
from support.upstream.convert_upstream import convert, quantize
from support.upstream.describe import describe
from support.upstream.families import (
    NEEDS_TRANSFORMERS,
    Family,
    FamilyTests,
    Trunk,
    UpstreamTests,
    change,
    missing,
    tensors_of,
)

pytestmark = NEEDS_TRANSFORMERS

WIDTH, HEADS, LINEAR_HEAD, CONV = 64, 4, 32, 4
Q_RANK, KV_RANK, KEY, VALUE = 48, 32, 24, 16
INDEX_HEADS, INDEX_DIM, POOL = 32, 128, 4  # with few heads, pools have equal scores
EXPERTS, EXPERT_FFN, VOCAB = 4, 32, 1024
LINEAR, LATENT = "linear_attention", "indexed_attention"
KINDS = [LINEAR, LATENT, LINEAR, LATENT, LATENT]
LAYERS = len(KINDS)
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "moe_intermediate_size": EXPERT_FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "kv_lora_rank": KV_RANK,
    "q_lora_rank": Q_RANK,
    "v_head_dim": VALUE,
    "qk_nope_head_dim": KEY,
    "max_position_embeddings": 512,
    "pad_token_id": 1,
    "eos_token_id": 5,
    "index_topk": 2 * POOL,
    "index_kpool": POOL,
    "index_head_dim": INDEX_DIM,
    "index_n_heads": INDEX_HEADS,
    "layer_types": KINDS,
    "indexer_types": ["full", "full", "full", "full", "shared"],
    "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
    "swiglu_limit": 0.5,  # so small that it is reached
    "linear_head_dim": LINEAR_HEAD,
    "linear_num_heads": HEADS,
    "linear_conv_kernel_dim": CONV,
    "linear_lower_bound": -5.0,
}
# The keys of the published config that upstream's converter needs, and transformers does not save.
PUBLISHED = {
    "linear_attn_config": {
        "num_heads": HEADS,
        "head_dim": LINEAR_HEAD,
        "short_conv_kernel_size": CONV,
        "gate_lower_bound": -5.0,
    },
    "mla_use_nope": True,
    "mhc": True,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": WIDTH,
    "projection_intermediate_size": 32,
    "patch_size": 4,
    "image_size": 16,
}


def make() -> Any:
    from transformers import (  # noqa: PLC0415
        Glm5NextConfig,
        Glm5NextForConditionalGeneration,
    )

    tokens = {f"{kind}_token_id": 1000 + i for i, kind in enumerate(("image", "video"))}
    return Glm5NextForConditionalGeneration(
        Glm5NextConfig(text_config=TEXT, vision_config=VISION, **tokens)
    )


def spread(name: str) -> tuple[float, float] | None:
    if "norm" in name:
        return 1, 0.2
    around_zero = ("correction", "dt_bias", "A_log", ".base", "compress_ape")
    if name.endswith("_hc.scale"):
        return 1, 0.1
    return (0, 0.3) if any(part in name for part in around_zero) else None


HEAD = f"model.language_model.layers.{LAYERS}."


HEAD_SHAPES = {
    "eh_proj.weight": (WIDTH, 2 * WIDTH),
    "enorm.weight": (WIDTH,),
    "hnorm.weight": (WIDTH,),
    "shared_head.norm.weight": (WIDTH,),
}
OF_A_LAYER = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")


def publish(folder: Path) -> None:
    """Write the config's keys and the tokens of the published one."""
    change(folder, inside="text_config", **PUBLISHED)
    renamed = dict(
        zip(
            ("<|im_start|>", "<|im_end|>", "<|object_ref_start|>"),
            ("[gMASK]", "<|user|>", "<|observation|>"),
            strict=True,
        )
    )

    def rename(tokenizer: dict[str, Any]) -> None:
        for token in tokenizer["added_tokens"]:
            token["content"] = renamed.get(token["content"], token["content"])

    edit_json(folder / "tokenizer.json", rename)
    settings = (folder / "tokenizer_config.json").read_text(encoding="utf-8")
    for old, new in renamed.items():
        settings = settings.replace(old, new)
    (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")


FAMILY = Family(
    make,
    spread,
    {f"{HEAD}{name}": shape for name, shape in HEAD_SHAPES.items()},
    tolerance=1e-2,  # of logits up to 4
    said="MTP head in block 5, for a llama.cpp that drafts with glm5-next",
    in_f16="blk.5.attn_q_b.weight",
    like={f"{HEAD}{part}": f"model.language_model.layers.3.{part}" for part in OF_A_LAYER},
    scale=0.05,
    publish=publish,
    inside="text_config",
    drafts=False,
    golden={
        "blk.5.ffn_down_exps.weight": lambda t: np.stack(
            [t[f"{HEAD}mlp.experts.{i}.down_proj.weight"] for i in range(EXPERTS)]
        ),
        "blk.5.nextn.enorm.weight": lambda t: t[f"{HEAD}enorm.weight"],
    },
    damaged=[
        (
            "model.language_model.layers.1.self_attn.indexer.wk.weight",
            missing,
            "indexer.wk.weight: expected shape [128, 64] by the config",
        )
    ],
    refused=[
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim: expected 0, as llama.cpp rotates no part"),
        ({"hc_mult": 2}, "hc_mult: expected 4, as in llama.cpp, found 2"),
        ({"mhc": False}, "mhc: expected true"),
        ({"attention_bias": True}, "attention_bias: expected false, as in llama.cpp"),
        ({"scoring_func": "softmax"}, "scoring_func: expected sigmoid, as in llama.cpp"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ({"linear_attn_config": {"num_heads": 2}}, "num_heads: expected num_attention_heads (4)"),
        ({"linear_attn_config": 3}, "linear_attn_config: expected an object, found 3"),
        ({"index_topk": 10}, "index_topk: expected a multiple of index_kpool (4), found 10"),
        ({"layer_types": KINDS[1:]}, "layer_types: expected 5 entries (num_hidden_layers)"),
        ({"layer_types": ["x", *KINDS[1:]]}, "layer_types: expected entries linear_attention and"),
        ({"indexer_types": ["all"] * 5}, "indexer_types: expected entries full and shared"),
        (
            {"indexer_types": None, "index_topk_pattern": "FFX"},
            "index_topk_pattern: expected 5 letters F and S",
        ),
        (
            {"mlp_layer_types": ["sparse", "dense", *["sparse"] * 3]},
            "mlp_layer_types: expected layers without experts before those with them",
        ),
        ({"norm_topk_prob": 1}, "norm_topk_prob: expected true or false, found 1"),
        ({"v_head_dim": 20}, "kv_b_proj.weight: expected shape [176, 32] by the config, found"),
    ],
)


class TestFamily(FamilyTests, UpstreamTests):
    pass


def test_what_the_file_tools_say(checkpoint: Path, whole: Path, tmp_path: Path) -> None:
    head, small = tmp_path / "head.gguf", tmp_path / "small.gguf"
    said = succeed("doctor", whole)
    assert "has no MTP graph of glm5-next; a newer llama-server drafts with it" in said
    assert "nextn.eh_proj" in succeed("list-tensors", whole, "--mtp")
    succeed("extract", whole, "-o", head)
    assert "blk.5.attn_k_b.weight" in describe(head).tensors
    succeed("convert", checkpoint, "--fastmtp", 300, "--fastmtp-layout", "ids", "-o", small)
    assert "300 tokens" in succeed("fastmtp", "show", small)


def test_a_quantized_trunk_is_upstreams(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours.gguf"
    succeed("convert", checkpoint, "--no-mtp", "--quant", "Q4_0", "-o", out)
    wide = convert(checkpoint, tmp_path / "wide.gguf", "f32", ("--no-mtp",))
    theirs = quantize(wide, tmp_path / "theirs.gguf", "Q4_0")
    kernels = [f"blk.{i}.ssm_conv1d_{part}.weight" for i in (0, 2) for part in "qkv"]
    shape = f"{CONV}, 1, {HEADS * LINEAR_HEAD}"  # llama-quantize drops a last dimension of 1
    expected = [f"{name}: expected [{shape}], found [{shape}, 1]" for name in kernels]
    assert sorted(file_differences(theirs, out)) == sorted(expected)


def test_a_newer_server_drafts_with_the_file_itself(whole: Path, tmp_path: Path) -> None:
    server = write_stand_in(tmp_path / "server", PATCHED_HELP)
    words = ("serve", whole, "--llama-server", server, "--print-command")
    result = invoke(*words)
    assert result.exit_code == 0
    assert "draft-mtp" not in result.stdout
    assert "or this file if it has one; serving without drafts" in result.stderr
    command = succeed(*words, "--head", whole)
    assert "--spec-type draft-mtp" in command
    assert "-md" not in command


def test_keys_of_transformers_and_of_the_published_config(
    trunk: Trunk, checkpoint: Path, tmp_path: Path
) -> None:
    """The same metadata, whichever keys the config has."""
    published = shutil.copytree(trunk[0], tmp_path / "published")
    renamed = dict.fromkeys(("layer_types", "mlp_layer_types", "indexer_types"))
    renamed |= {key: None for key in TEXT if key.startswith("linear_")}
    own = {
        "layer_types": [kind.replace("indexed", "full") for kind in KINDS],
        "index_topk_pattern": "FFFFS",
    }
    head = {"num_nextn_predict_layers": None}
    change(published, inside="text_config", **renamed | PUBLISHED | own | head)
    files = [tmp_path / "saved.gguf", tmp_path / "published.gguf"]
    for folder, out in zip((trunk[0], published), files, strict=True):
        succeed("convert", folder, "--quant", "BF16", "-o", out)
    named = ("general.name", "general.basename")  # after the folder
    assert [d for d in file_differences(*files) if not d.startswith(named)] == []


def test_decay_without_a_bound(trunk: Trunk, tmp_path: Path) -> None:
    folder = shutil.copytree(trunk[0], tmp_path / "unbounded")
    unbound = {"linear_lower_bound": None}
    edit_json(folder / "config.json", lambda config: config["text_config"].update(unbound))
    out = tmp_path / "unbounded.gguf"
    succeed("convert", folder, "--quant", "BF16", "-o", out)
    assert "glm5-next.kda.gate_lower_bound" not in describe(out).metadata


def test_tokens_and_split_of_glm(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def set_split(tokenizer: dict[str, Any]) -> None:
        first, *_ = tokenizer["pre_tokenizer"]["pretokenizers"]
        first["pattern"] = {"Regex": split}

    edit_json(folder / "tokenizer.json", set_split)
    out = tmp_path / "out.gguf"
    succeed("convert", folder, "--quant", "BF16", "-o", out)
    assert value_of(out, "tokenizer.ggml.pre") == "glm4"
    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    assert value_of(out, "tokenizer.ggml.bos_token_id") == ids["[gMASK]"]
    assert value_of(out, "tokenizer.ggml.eot_token_id") == ids["<|user|>"]


@pytest.mark.parametrize("rows", [5, KV_RANK + 5])  # of a slice
def test_keys_are_transposed_for_each_head(
    rows: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Independent of upstream: from the checkpoint's own matrix."""
    monkeypatch.setattr(pipeline, "_SLICE_VALUES", KEY * rows)
    out = tmp_path / "out.gguf"
    succeed("convert", checkpoint, "--quant", "F32", "-o", out)
    found = {t.name: t.data for t in GGUFReader(out).tensors}
    tensors = tensors_of(checkpoint)
    name = "model.language_model.layers.1.self_attn.kv_b_proj.weight"
    both = tensors[name].float().numpy().reshape(HEADS, KEY + VALUE, KV_RANK)
    for head in range(HEADS):
        np.testing.assert_array_equal(found["blk.1.attn_k_b.weight"][head], both[head, :KEY].T)
        np.testing.assert_array_equal(found["blk.1.attn_v_b.weight"][head], both[head, KEY:])
