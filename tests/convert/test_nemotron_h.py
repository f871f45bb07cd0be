"""Nemotron 3: conversions of checkpoints that transformers' own class writes, with a head added.

Compared with the pinned llama.cpp's converter and with transformers' logits.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.native.runtime import llama_cpp
from support.checkpoints import TINY, write_checkpoint
from support.commands import refused, succeed
from support.upstream.compare import file_differences
from support.upstream.convert_upstream import convert
from support.upstream.describe import describe
from support.upstream.nextn_models import drafts

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra"),
]

WIDTH, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, LATENT = 64, 4, 2, 32, 4, 32
EXPERT_FFN, SHARED_FFN = 48, 80
KINDS = ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": WIDTH,
    "layers_block_type": KINDS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_FFN,
    "moe_shared_expert_intermediate_size": SHARED_FFN,
    "moe_latent_size": LATENT,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 512,
    "eos_token_id": 5,
}
IDS = [5, 9, 77, 300, 5, 12, 44, 600, 601, 9, 77, 300, 17, 18, 19, 20, 21, 33, 34]
TOLERANCE = 1e-2  # of logits up to 4


def write_model(folder: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Write a random trunk, as transformers saves it, and return its logits of IDS."""
    import torch  # noqa: PLC0415
    from transformers.models.nemotron_h.configuration_nemotron_h import (  # noqa: PLC0415
        NemotronHConfig,
    )
    from transformers.models.nemotron_h.modeling_nemotron_h import (  # noqa: PLC0415
        NemotronHForCausalLM,
    )

    torch.manual_seed(3)
    model = NemotronHForCausalLM(NemotronHConfig(**SIZES)).float().eval()
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or "dt_bias" in name:
                values.normal_(1, 0.2)
            elif "correction" in name or name.endswith(".D") or "conv1d.bias" in name:
                values.normal_(0, 0.2)
            elif values.ndim > 1:
                values.normal_(0, values.shape[-1] ** -0.5)
        model = model.to(torch.bfloat16).float()
        logits: np.ndarray[Any, np.dtype[np.float32]] = model(torch.tensor([IDS])).logits[0].numpy()
        model.to(torch.bfloat16).save_pretrained(folder)
    return logits


def add_head(folder: Path) -> None:
    """Add the two layers of the MTP head, under the names of the published ones."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    experts = {
        f"1.mixer.experts.{i}.{part}": shape
        for i in range(EXPERTS)
        for part, shape in (
            ("up_proj.weight", (EXPERT_FFN, LATENT)),
            ("down_proj.weight", (LATENT, EXPERT_FFN)),
        )
    }
    shapes = {
        "0.enorm.weight": (WIDTH,),
        "0.hnorm.weight": (WIDTH,),
        "0.eh_proj.weight": (WIDTH, 2 * WIDTH),
        "0.norm.weight": (WIDTH,),
        "0.mixer.q_proj.weight": (HEADS * HEAD_DIM, WIDTH),
        "0.mixer.k_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
        "0.mixer.v_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
        "0.mixer.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        "1.norm.weight": (WIDTH,),
        "1.final_layernorm.weight": (WIDTH,),
        "1.mixer.gate.weight": (EXPERTS, WIDTH),
        "1.mixer.gate.e_score_correction_bias": (EXPERTS,),
        "1.mixer.fc1_latent_proj.weight": (LATENT, WIDTH),
        "1.mixer.fc2_latent_proj.weight": (WIDTH, LATENT),
        "1.mixer.shared_experts.up_proj.weight": (SHARED_FFN, WIDTH),
        "1.mixer.shared_experts.down_proj.weight": (WIDTH, SHARED_FFN),
        **experts,
    }
    noise = torch.Generator().manual_seed(4)
    path = folder / "model.safetensors"
    head = {
        f"mtp.layers.{name}": torch.randn(*shape, generator=noise).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(load_file(path) | head, path, metadata={"format": "pt"})


def change(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | keys
    path.write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    """A checkpoint without a head, as transformers saves it, and its logits of IDS."""
    folder = tmp_path_factory.mktemp("nemotron") / "nemotron-tiny"
    logits = write_model(folder)
    vocabulary = write_checkpoint(tmp_path_factory.mktemp("words") / "words", TINY)
    for path in vocabulary.glob("*token*"):
        shutil.copy(path, folder)
    return folder, logits


@pytest.fixture(scope="module")
def checkpoint(
    trunk: tuple[Path, np.ndarray[Any, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("nemotron") / "nemotron-mtp"
    shutil.copytree(trunk[0], folder)
    add_head(folder)
    return folder


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("nemotron") / "whole.gguf"
    text = succeed("convert", checkpoint, "--quant", "BF16", "-o", out)
    assert "can draft: MTP head in block 5" in text
    return out


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ((), ()),
        pytest.param(("--head-only",), ("--mtp",), marks=pytest.mark.slow),
        pytest.param(("--no-mtp",), ("--no-mtp",), marks=pytest.mark.slow),
    ],
)
def test_files_are_upstreams(
    options: tuple[str, ...], flags: tuple[str, ...], checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "ours.gguf"
    succeed("convert", checkpoint, *options, "--quant", "BF16", "-o", out)
    theirs = convert(checkpoint, tmp_path / "theirs.gguf", "bf16", flags)
    of_head = [] if "--no-mtp" in flags else ["blk.5.ffn_gate_inp.weight: expected BF16, found F32"]
    assert file_differences(theirs, out) == of_head  # upstream has F32 for those of the trunk


def test_logits_are_those_of_transformers(
    trunk: tuple[Path, np.ndarray[Any, Any]], tmp_path: Path
) -> None:
    folder, expected = trunk
    out = tmp_path / "f32.gguf"
    succeed("convert", folder, "--no-mtp", "--quant", "F32", "-o", out)
    model = llama_cpp.Llama(str(out), n_ctx=64, verbose=False, logits_all=True)
    model.eval(IDS)
    found = np.array(model.scores[: len(IDS)])
    model.close()
    assert np.abs(expected).max() > 1
    assert np.abs(found - expected).max() < TOLERANCE


def test_llama_cpp_drafts_with_it(whole: Path, tmp_path: Path) -> None:
    head = tmp_path / "head.gguf"
    succeed("extract", whole, "-o", head)
    found = drafts([whole, head])
    assert found[0] is not None
    assert found[0] == found[1]


def test_a_mix_and_a_graft(
    trunk: tuple[Path, np.ndarray[Any, Any]], checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    base, mixed, grafted, joined = (tmp_path / f"{name}.gguf" for name in "abcd")
    succeed("convert", checkpoint, "--quant", "Q4_K_M", "--mtp-f16", "-o", mixed)
    assert describe(mixed).tensors["blk.5.attn_q.weight"].type == "F16"
    assert "can draft" in succeed("doctor", mixed)
    assert "can draft" in succeed("doctor", checkpoint)
    succeed("strip", whole, "-o", base)
    succeed("graft", base, "--from", checkpoint, "--mtp-type", "BF16", "-o", grafted)
    assert file_differences(whole, grafted) == []
    assert "error" not in succeed("compare", grafted, checkpoint, "--all")
    succeed("convert", trunk[0], "--from", checkpoint, "--quant", "BF16", "-o", joined)
    assert describe(joined).tensors == describe(whole).tensors


@pytest.mark.parametrize(
    ("keys", "said"),
    [
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
def test_configs_that_llama_cpp_has_no_model_for(
    keys: dict[str, Any], said: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    change(folder, **keys)
    refused(tmp_path, "convert", folder, "-o", tmp_path / "x.gguf", words=(said,))
