"""Qwen3.8-Flash-Next: conversions of checkpoints that transformers' own class writes.

The trunk is compared with the pinned llama.cpp's converter and with transformers' logits, the whole
model with the converter of llama.cpp b11549, which knows the head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.native.runtime import llama_cpp
from support.commands import succeed
from support.gguf_files import value_of
from support.upstream import compare
from support.upstream.compare import without_ones
from support.upstream.convert_upstream import convert
from support.upstream.describe import describe
from support.upstream.families import NEEDS_TRANSFORMERS, Family, FamilyTests, missing, plus_one

pytestmark = NEEDS_TRANSFORMERS

ARCH = "qwen4exp"
WIDTH, STREAMS, RANK, LAYERS, INDEX_DIM = 64, 4, 8, 4, 16
PLE = "model.layers.1.ple.ple_embedding."
INDEXER = "mtp.layers.0.self_attn.indexer.index_qk_proj.weight"
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hc_count": STREAMS,
    "hc_lowrank": RANK,
    "ple_layer_ids": [2],
    "ngram_vocab_size_base": 40,
    "heads_per_ngram": 2,
    "split_ngram_parts": 4,
    "make_ngram_vocab_size_divisible_by": 32,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": INDEX_DIM,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "eos_token_id": 5,
    "max_position_embeddings": 512,
    "output_gate_type": "sigmoid",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
# Upstream reads the config through transformers, which renames full attention to indexed attention.
# Then upstream finds no layer of the trunk that has an indexer.
RATIOS = f"{ARCH}.attention.compress_ratios"


def make() -> Any:
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig  # noqa: PLC0415

    return Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**SIZES))


def spread(name: str) -> tuple[float, float] | None:
    return (0, 0.2) if "norm" in name or "dt_bias" in name else None


HEAD = {  # beside its layer, under the names of the published one; transformers does not load it
    "fc_embedding.weight": (WIDTH, WIDTH),
    "fc_hidden.weight": (WIDTH, WIDTH),
    "pre_fc_norm_embedding.weight": (WIDTH,),
    "pre_fc_norm_hidden.weight": (STREAMS * WIDTH,),
    "hyper_connection_mixer.hc_norm.weight": (STREAMS * WIDTH,),
    "hyper_connection_mixer.input_mix_weight_down.weight": (RANK, STREAMS * WIDTH),
    "hyper_connection_mixer.input_mix_weight_up.weight": (STREAMS * WIDTH, RANK),
}


def differences(expected: Path, found: Path) -> list[str]:
    """Differences between two files, but for RATIOS and dimensions of 1."""
    theirs, ours = (without_ones(describe(path)) for path in (expected, found))
    return compare.differences(theirs, ours, (RATIOS,))


FAMILY = Family(
    make,
    spread,
    {f"mtp.{name}": shape for name, shape in HEAD.items()},
    like={"mtp.layers.0.": f"model.layers.{LAYERS - 1}."},
    scale=0.05,
    tolerance=2e-3,  # of logits up to 1.6; a wrong norm, order or constant shows as 0.05 to 1
    said="MTP head in block 4, for a llama.cpp that drafts with qwen4exp",
    in_f16="blk.4.attn_q.weight",
    drafts=False,
    differences=differences,
    golden={
        "blk.4.nextn.eh_proj.weight": lambda t: np.concatenate(
            [t["mtp.fc_embedding.weight"], t["mtp.fc_hidden.weight"]], axis=1
        ),
        "blk.4.nextn.hc_head_norm.weight": plus_one("mtp.hyper_connection_mixer.hc_norm.weight"),
        "blk.4.nextn.enorm.weight": plus_one("mtp.pre_fc_norm_embedding.weight"),
        "blk.4.nextn.hnorm.weight": plus_one("mtp.pre_fc_norm_hidden.weight"),
        "blk.4.indexer.q_proj.weight": lambda t: t[INDEXER][:-INDEX_DIM],
        "blk.4.indexer.k_proj.weight": lambda t: t[INDEXER][-INDEX_DIM:],
    },
    damaged=[
        (f"{PLE}layer_multipliers", lambda t: t.float(), "multipliers: expected I64, found F32"),
        (f"{PLE}layer_multipliers", lambda t: -t, "expected no negative number, found -"),
        (f"{PLE}ngram_heads_offsets", lambda t: t[:3], "shape [4] by the config, found [3]"),
        (f"{PLE}ngram_heads_offsets", missing, "by the config, found no such tensor"),
        (f"{PLE}ngram_embedding.shard_1.weight", lambda t: t[:, :8], "expected rows of 16 by the"),
    ],
    refused=[
        ({"ple_layer_ids": [1, 2]}, "ple_layer_ids: expected a list of one layer from 1 to 4"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids: expected a layer with linear attention, found 4"),
        ({"output_gate_type": "silu"}, "output_gate_type: expected sigmoid, as in llama.cpp"),
        ({"norm_topk_prob": False}, "norm_topk_prob: expected true, as llama.cpp normalizes"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads: expected 1, as in llama.cpp, found 2"),
        ({"indexer_budget": 63}, "indexer_budget: expected a multiple of indexer_compress_ratio"),
        ({"ple_embed_dim": 62}, "ple_embed_dim: expected a multiple of 4 n-gram heads, found 62"),
        ({"eos_token_id": []}, "eos_token_id: expected a token, at which the n-grams begin anew"),
        ({"hc_count": 1}, "hc_count: expected a whole number from 2"),
        ({"split_ngram_parts": 5}, "shard_4.weight: expected rows of 16 by the config, found no"),
        ({"split_ngram_parts": 3}, "split_ngram_parts: expected parts of 184 to 2147483647 rows"),
    ],
)


class TestFamily(FamilyTests):
    pass


def test_the_trunk_is_upstreams(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "ours.gguf"
    succeed("convert", checkpoint, "--no-mtp", "--quant", "BF16", "-o", out)
    assert differences(convert(checkpoint, tmp_path / "theirs.gguf", "bf16"), out) == []
    assert value_of(out, RATIOS) == [0, 0, 0, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "flags"), [((), ()), (("--head-only",), ("--mtp",)), (("--no-mtp",), ("--no-mtp",))]
)
def test_the_whole_model_is_that_of_a_newer_converter(
    options: tuple[str, ...], flags: tuple[str, ...], checkpoint: Path, tmp_path: Path
) -> None:
    """Of b11549, which pip downloads."""
    out = tmp_path / "ours.gguf"
    succeed("convert", checkpoint, *options, "--quant", "BF16", "-o", out)
    theirs = convert(checkpoint, tmp_path / "theirs.gguf", "bf16", flags, base="b11549")
    assert differences(theirs, out) == []
    assert value_of(out, RATIOS) == [0, 0, 0, 4, *([] if options == ("--no-mtp",) else [4])]


def test_a_mix_of_the_trunk(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "mix.gguf"
    succeed("convert", checkpoint, "--no-mtp", "--quant", "Q4_K_M", "-o", out)
    assert llama_cpp.Llama(str(out), n_ctx=64, verbose=False).n_vocab() == SIZES["vocab_size"]


def test_graft_from_the_checkpoint(checkpoint: Path, whole: Path, tmp_path: Path) -> None:
    base, out = tmp_path / "base.gguf", tmp_path / "grafted.gguf"
    succeed("convert", checkpoint, "--no-mtp", "--quant", "BF16", "-o", base)
    succeed("graft", base, "--from", checkpoint, "--mtp-type", "BF16", "-o", out)
    assert differences(whole, out) == []
    assert value_of(out, RATIOS) == [0, 0, 0, 4, 4]
