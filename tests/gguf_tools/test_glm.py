"""GLM-4.5: a head from the hub's layout of checkpoints onto a headless GGUF, and its drafts.

The checkpoint is random, in the layout of zai-org/GLM-4.5-Air: the head is the layer after the
trunk's. Upstream's converter makes the GGUF that the results are compared with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mtp_gguf.bench.options import BenchOptions
from mtp_gguf.bench.run import run_bench
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native import MTPLlama
from mtp_gguf.native.head import Head
from support.checkpoints import TINY, write_checkpoint, write_safetensors
from support.commands import refused, succeed
from support.gguf_files import differing, tensors_of
from support.hub_commands import run_commands
from support.hub_server import Hub
from support.upstream.convert_upstream import convert
from support.upstream.llama_mtp import LlamaMtp

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra"),
]

LAYERS, WIDTH, HEADS, PAIRS, HEAD_DIM, FFN, EXPERTS, WORDS = 2, 64, 4, 2, 32, 32, 4, 1024
CONFIG = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [896],
    "first_k_dense_replace": 1,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "model_type": "glm4_moe",
    "moe_intermediate_size": FFN,
    "n_group": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": PAIRS,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": WORDS,
}
HUB_MODEL = "somebody/glm-tiny"
SPECIAL = ("[gMASK]", "<|user|>", "<|observation|>")
# Of logits; a wrong norm, bias, expert or position shows as 0.05 to 5.
TOLERANCE = 0.01
TOKENS = [int(t) for t in np.random.PCG64(11).random_raw(24) % np.uint64(800)]


def _network(prefix: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (size, WIDTH)
    yield f"{prefix}.up_proj.weight", (size, WIDTH)
    yield f"{prefix}.down_proj.weight", (WIDTH, size)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (WORDS, WIDTH)
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (WORDS, WIDTH)
    for layer in range(LAYERS + 1):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (WIDTH,)
        yield f"{prefix}post_attention_layernorm.weight", (WIDTH,)
        for name, rows in (("q", HEADS), ("k", PAIRS), ("v", PAIRS)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows * HEAD_DIM, WIDTH)
            yield f"{prefix}self_attn.{name}_proj.bias", (rows * HEAD_DIM,)
        yield f"{prefix}self_attn.o_proj.weight", (WIDTH, HEADS * HEAD_DIM)
        if layer == 0:
            yield from _network(f"{prefix}mlp", 96)
            continue
        yield f"{prefix}mlp.gate.weight", (EXPERTS, WIDTH)
        yield f"{prefix}mlp.gate.e_score_correction_bias", (EXPERTS,)
        for part in ("shared_experts", *(f"experts.{i}" for i in range(EXPERTS))):
            yield from _network(f"{prefix}mlp.{part}", FFN)
    prefix = f"model.layers.{LAYERS}."
    yield f"{prefix}eh_proj.weight", (WIDTH, 2 * WIDTH)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{prefix}{name}.weight", (WIDTH,)
    yield f"{prefix}embed_tokens.weight", (WORDS, WIDTH)
    yield f"{prefix}shared_head.head.weight", (WORDS, WIDTH)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("glm") / "glm-tiny", TINY)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    first = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**like, "id": first + i, "content": text, "special": True}
        for i, text in enumerate(SPECIAL)
    ]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    noise = np.random.default_rng(5)
    tensors = {}
    for name, shape in _shapes():
        values = noise.standard_normal(shape, np.float32) * (shape[-1] ** -0.5)
        if "norm" in name:
            values = values / 4 + 1
        kind = np.float32 if "correction_bias" in name else ml_dtypes.bfloat16
        tensors[name] = values.astype(kind)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture(scope="module")
def upstream(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole model, as llama.cpp's converter writes it."""
    return convert(checkpoint, tmp_path_factory.mktemp("glm") / "whole.gguf", "bf16")


@pytest.fixture(scope="module")
def grafted(upstream: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm")
    trunk = folder / "trunk.gguf"
    succeed("strip", upstream, "-o", trunk)
    out = folder / "grafted.gguf"
    text = succeed("graft", trunk, "--from", checkpoint, "--mtp-type", "BF16", "-o", out)
    assert "can draft: MTP head in block 2" in text
    return out


def test_the_head_has_upstreams_bytes(upstream: Path, grafted: Path) -> None:
    assert differing(tensors_of(grafted), tensors_of(upstream)) == []
    assert "0 keys of the metadata differ" in succeed("compare", upstream, grafted)


def test_graft_from_the_hub(
    upstream: Path, checkpoint: Path, grafted: Path, tmp_path: Path
) -> None:
    """The same tensors as from a folder; of the weights, only ranges are fetched."""
    trunk, out = tmp_path / "trunk.gguf", tmp_path / "out.gguf"
    succeed("strip", upstream, "-o", trunk)
    with Hub(HUB_MODEL, {"main": checkpoint}) as hub:
        command = ("graft", trunk, "--from", HUB_MODEL, "--mtp-type", "BF16", "-o", out)
        (done,) = run_commands(hub, tmp_path / "home", command)
        assert done.code == 0, done.stderr
        assert "can draft: MTP head in block 2" in done.stdout
        assert hub.weights_sent < (checkpoint / "model.safetensors").stat().st_size
    assert differing(tensors_of(out), tensors_of(grafted)) == []


def test_drafts_equal_llama_cpps(grafted: Path) -> None:
    with LlamaMtp(grafted) as upstream, Head(grafted, n_threads=1) as head:
        hidden = upstream.trunk(TOKENS[:-1])[1]
        rows = np.concatenate([np.zeros((1, WIDTH)), hidden]).astype(np.float32)
        draft = head.draft(TOKENS, rows, 0, 4, logits=True)
        want = upstream.draft(TOKENS, hidden, 4, follow=draft.tokens)[1]
    assert draft.logits is not None
    assert np.abs(draft.logits - want).max() < TOLERANCE


@pytest.mark.parametrize("rollback", ["snapshot", "checkpoint", "two-phase", "host"])
def test_greedy_text_is_the_same_at_every_depth(grafted: Path, rollback: str) -> None:
    """A trunk of attention alone: a rollback is a shorter cache."""
    texts = []
    for depth in (0, 1, 3):
        options = {"n_ctx": 256, "n_threads": 1, "rollback": rollback, "exact": depth > 0}
        with closing(MTPLlama(str(grafted), depth=depth, **options)) as llm:
            texts.append(list(islice(llm.generate(TOKENS, temp=0.0), 40)))
            if depth:
                assert sum(llm.mtp_stats.drafted) > 0
    assert texts[1:] == texts[:1] * 2


def test_bench(grafted: Path) -> None:
    options = BenchOptions(kinds=["code"], depths=(0, 2), tokens=12, rounds=1, threads=1, prompts=1)
    texts = run_bench(grafted, options).to_json()["texts"]
    assert {t["depth"] for t in texts if t["kind"] == "all"} == {0, 2}


def test_draft_vocabularies(grafted: Path, tmp_path: Path) -> None:
    out = tmp_path / "listed.gguf"
    succeed("fastmtp", "add", grafted, "-n", "300", "-o", out)
    found = json.loads(succeed("doctor", out, "--json"))
    assert found["can_draft"]
    assert [f["code"] for f in found["findings"]] == ["not-counted"]
    with Head(out, n_threads=1) as head:
        assert head.n_draft_vocab < WORDS


def test_whole_models_are_left_to_upstream(checkpoint: Path, tmp_path: Path) -> None:
    words = ("of GLM-4.5 only the MTP head is converted", "convert_hf_to_gguf.py")
    refused(tmp_path, "convert", checkpoint, "-o", tmp_path / "x.gguf", words=words)


def test_training(grafted: Path, tmp_path: Path) -> None:
    """Upstream's converter gives the head copies of embedding and output, which stay."""
    text, out = tmp_path / "text.txt", tmp_path / "x.gguf"
    text.write_text("".join(f"Line {i} of {i * i} lines.\n" for i in range(400)), encoding="utf-8")
    options = ("--tokens", 700, "--length", 64, "--epochs", 1, "--steps", 2, "-t", 1)
    succeed("train-head", grafted, "--text", text, "-o", out, *options)
    with open_model(grafted) as before, open_model(out) as after:
        same = {name for name in before.tensors if before.read(name) == after.read(name)}
        own = {f"blk.2.nextn.{name}.weight" for name in ("embed_tokens", "shared_head_head")}
        assert own <= same
        assert "blk.2.nextn.eh_proj.weight" in before.tensors.keys() - same
        assert after.tensors.keys() >= before.tensors.keys()
    succeed("doctor", out)
