"""Heads of Qwen3.8-Flash-Next, by the tensor and key lists of published files.

Unsloth ships them apart from the model: `MTP/mtp-…-Q8_0.gguf` with 34 tensors, and `…-shared-…`
with 32. llama.cpp at the version of this package loads the trunk and has no graph for the head.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from mtp_gguf.gguf_tools.heads.nextn import BLOCKS
from support.commands import check_refusal, invoke, refused, succeed
from support.gguf_files import differing, finish, loads, tensors_of, value_of
from support.stand_in_server import PATCHED_HELP, write_stand_in

ARCH = "qwen4exp"
LAYERS, WIDTH, STREAMS, RANK, TOKENS = 4, 64, 4, 8, 128
EXPERTS, FFN, HEADS, KV, SIZE = 4, 32, 2, 1, 32
STATE, VALUE_HEADS, KEY_HEADS = 16, 4, 2
WIDE, INDEX_HEADS, INDEX_SIZE = STREAMS * WIDTH, 2, 16

Shapes = dict[str, tuple[int, ...]]  # in ggml's order


def block(full_attention: bool) -> Shapes:
    shapes: Shapes = {}
    for half in ("attn", "ffn"):
        shapes |= {
            f"hc_{half}_norm.weight": (WIDE,),
            f"hc_{half}_down.weight": (WIDE, RANK),
            f"hc_{half}_up.weight": (RANK, WIDE),
            f"hc_{half}_inject.weight": (WIDE, STREAMS),
        }
    shapes |= {
        "ffn_gate_inp.weight": (WIDTH, EXPERTS),
        "ffn_gate_exps.weight": (WIDTH, FFN, EXPERTS),
        "ffn_up_exps.weight": (WIDTH, FFN, EXPERTS),
        "ffn_down_exps.weight": (FFN, WIDTH, EXPERTS),
        "ffn_gate_inp_shexp.weight": (WIDTH,),
        "ffn_gate_shexp.weight": (WIDTH, FFN),
        "ffn_up_shexp.weight": (WIDTH, FFN),
        "ffn_down_shexp.weight": (FFN, WIDTH),
    }
    if full_attention:
        return shapes | {
            "attn_q.weight": (WIDTH, 2 * HEADS * SIZE),
            "attn_k.weight": (WIDTH, KV * SIZE),
            "attn_v.weight": (WIDTH, KV * SIZE),
            "attn_output.weight": (HEADS * SIZE, WIDTH),
            "attn_q_norm.weight": (SIZE,),
            "attn_k_norm.weight": (SIZE,),
            "indexer.q_proj.weight": (WIDTH, INDEX_HEADS * INDEX_SIZE),
            "indexer.k_proj.weight": (WIDTH, INDEX_SIZE),
            "indexer.q_norm.weight": (INDEX_SIZE,),
            "indexer.k_norm.weight": (INDEX_SIZE,),
        }
    channels = (2 * KEY_HEADS + VALUE_HEADS) * STATE
    return shapes | {
        "attn_qkv.weight": (WIDTH, channels),
        "attn_gate.weight": (WIDTH, VALUE_HEADS * STATE),
        "ssm_conv1d.weight": (4, channels),
        "ssm_dt.bias": (VALUE_HEADS,),
        "ssm_a": (VALUE_HEADS,),
        "ssm_beta.weight": (WIDTH, VALUE_HEADS),
        "ssm_alpha.weight": (WIDTH, VALUE_HEADS),
        "ssm_norm.weight": (STATE,),
        "ssm_out.weight": (VALUE_HEADS * STATE, WIDTH),
    }


TRUNK: Shapes = {
    "token_embd.weight": (WIDTH, TOKENS),
    "output.weight": (WIDTH, TOKENS),
    "output_hc_norm.weight": (WIDE,),
    "output_hc_down.weight": (WIDE, RANK),
    "output_hc_up.weight": (RANK, WIDE),
    **{
        f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in block(i % 4 == 3).items()
    },
}
HEAD: Shapes = {
    f"blk.{LAYERS}.{name}": shape
    for name, shape in {
        **block(full_attention=True),
        "nextn.eh_proj.weight": (2 * WIDTH, WIDTH),
        "nextn.enorm.weight": (WIDTH,),
        "nextn.hnorm.weight": (WIDE,),
        "nextn.hc_head_norm.weight": (WIDE,),
        "nextn.hc_head_down.weight": (WIDE, RANK),
        "nextn.hc_head_up.weight": (RANK, WIDE),
    }.items()
}
OUTSIDE = {name: TRUNK[name] for name in ("token_embd.weight", "output.weight")}


def write(path: Path, shapes: Shapes, *, head: bool, shared: bool = False) -> Path:
    """A file with these tensors, of random values that depend on their names only."""
    writer = GGUFWriter(path, ARCH)
    writer.add_vocab_size(TOKENS)
    integers = {
        "block_count": LAYERS + head,
        "context_length": 256,
        "embedding_length": WIDTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.key_length": SIZE,
        "attention.value_length": SIZE,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": FFN,
        "expert_shared_feed_forward_length": FFN,
        "ssm.conv_kernel": 4,
        "ssm.state_size": STATE,
        "ssm.group_count": KEY_HEADS,
        "ssm.time_step_rank": VALUE_HEADS,
        "ssm.inner_size": VALUE_HEADS * STATE,
        "full_attention_interval": 4,
        "rope.dimension_count": 16,
        "hyper_connection.count": STREAMS,
        "hyper_connection.low_rank": RANK,
        "attention.indexer.head_count": INDEX_HEADS,
        "attention.indexer.key_length": INDEX_SIZE,
        "attention.indexer.top_k": 64,
    }
    if head:
        integers["nextn_predict_layers"] = 1
    for key, value in integers.items():
        writer.add_uint32(f"{ARCH}.{key}", value)
    writer.add_float32(f"{ARCH}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_array(f"{ARCH}.rope.dimension_sections", [4, 2, 2, 0])
    writer.add_array(f"{ARCH}.attention.compress_ratios", [0, 0, 0, 4, *([0] if head else [])])
    if shared:
        writer.add_bool(f"{ARCH}.nextn_shared_target_tensors", True)
    writer.add_tokenizer_model("none")
    for name, shape in shapes.items():
        seed = np.frombuffer(name.encode(), np.uint8)
        values = np.random.default_rng(seed).normal(0.0, 0.05, shape[::-1]).astype(np.float32)
        writer.add_tensor(name, values + np.float32("norm" in name))
    finish(writer)
    return path


@pytest.fixture
def trunk(tmp_path: Path) -> Path:
    return write(tmp_path / "Flash-Next-F32.gguf", TRUNK, head=False)


@pytest.fixture(params=[False, True], ids=["with embedding", "shared"])
def sidecar(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "MTP").mkdir()
    shapes = HEAD if request.param else {**OUTSIDE, **HEAD}
    name = f"MTP/mtp-Flash-Next-{'shared-' if request.param else ''}F32.gguf"
    return write(tmp_path / name, shapes, head=True, shared=request.param)


def doctor(*arguments: object) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(invoke("doctor", *arguments, "--json").stdout)
    return fields


def test_the_lists_are_those_of_published_files(trunk: Path) -> None:
    assert len(HEAD) == 32
    assert {name.removeprefix(f"blk.{LAYERS}.") for name in HEAD} == {*BLOCKS[ARCH].required}
    assert loads(trunk)


def test_a_sidecar(trunk: Path, sidecar: Path) -> None:
    listed = json.loads(succeed("list-tensors", sidecar, "--json"))
    assert listed["head"]["ready"], listed["head"]
    assert listed["head"]["stock"] is False
    assert listed["head"]["shared"] is ("shared" in sidecar.name)
    fields = doctor(sidecar)
    codes = {finding["code"]: finding for finding in fields["findings"]}
    assert set(codes) == {"sidecar", "no-graph"}
    assert f"it fits {trunk.name} beside it" in codes["sidecar"]["text"]
    fields = doctor(trunk, "--head", sidecar)
    assert fields["can_draft"]
    assert fields["runs_with"] == [
        f"llama-server -m {trunk} -md {sidecar} --spec-type draft-mtp  (a newer llama.cpp)"
    ]


def test_there_and_back(trunk: Path, sidecar: Path, tmp_path: Path) -> None:
    whole, again = tmp_path / "whole.gguf", tmp_path / "again.gguf"
    succeed("graft", trunk, "--from", sidecar, "-o", whole)
    assert value_of(whole, f"{ARCH}.block_count") == LAYERS + 1
    assert value_of(whole, f"{ARCH}.attention.compress_ratios") == [0, 0, 0, 4, 0]
    assert {t.name for t in GGUFReader(whole).tensors} == {*TRUNK, *HEAD}
    assert not loads(whole)  # the pinned llama.cpp knows no tensors of the head
    assert "cannot load a file that has both" in str(doctor(whole)["findings"])
    succeed("strip", whole, "-o", again)
    assert again.read_bytes() == trunk.read_bytes() or (
        differing(tensors_of(again), tensors_of(trunk)) == [] and loads(again)
    )
    layout = "unsloth" if "shared" in sidecar.name else "ggml-org"
    succeed("extract", whole, "--layout", layout, "-o", tmp_path / "mtp.gguf")
    assert differing(tensors_of(tmp_path / "mtp.gguf"), tensors_of(sidecar)) == []


@pytest.mark.parametrize("suffix", BLOCKS[ARCH].required)
def test_each_tensor_is_needed(suffix: str, tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in HEAD.items() if not name.endswith(f".{suffix}")}
    assert len(shapes) in (len(HEAD) - 1, len(HEAD) - 2)  # q_norm ends attn_q_norm, too
    path = write(tmp_path / "mtp-x.gguf", shapes, head=True, shared=True)
    [fault] = [f for f in doctor(path)["findings"] if f["severity"] == "fault"]
    assert fault["code"] in ("incomplete-head", "blocks", "no-head")


def test_a_head_of_other_widths_does_not_fit(trunk: Path, tmp_path: Path) -> None:
    wrong = {**HEAD, f"blk.{LAYERS}.nextn.hnorm.weight": (WIDTH,)}
    path = write(tmp_path / "mtp-x.gguf", wrong, head=True, shared=True)
    [fault] = [f for f in doctor(path)["findings"] if f["severity"] == "fault"]
    assert fault["code"] == "head-shape"
    refused(tmp_path, "graft", trunk, "--from", path, "-o", tmp_path / "made.gguf")


def test_serve_leaves_it_to_a_newer_server(trunk: Path, sidecar: Path, tmp_path: Path) -> None:
    server = write_stand_in(tmp_path / "server", PATCHED_HELP)
    words = ("serve", trunk, "--llama-server", server, "--print-command")
    result = invoke(*words)
    assert result.exit_code == 0
    assert "-md" not in result.stdout
    assert "does not draft with qwen4exp" in result.stderr
    assert f"-md {sidecar}" in succeed(*words, "--head", sidecar, "--depth", 2)
    copy = Path(shutil.copy(sidecar, tmp_path / "alone.gguf"))
    result = invoke("serve", copy, "--llama-server", server, "--print-command")
    check_refusal(result.exit_code, result.stderr, "contains only a head")
