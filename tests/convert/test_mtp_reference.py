"""The NumPy reference: consistent with itself, with transformers and with llama.cpp's graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mtp_gguf.cli import app
from support.checkpoints import SPECS, Spec, fp8_blocks, write_checkpoint
from support.reference_model import ReferenceModel
from support.upstream.convert_upstream import convert
from support.upstream.llama_mtp import LlamaMtp

# Logits have a standard deviation of 1.1. F32 implementations differ by up to 2e-4 in them after
# eight layers (sums in another order); a wrong norm, head or position shows as 0.05 to 5.
F32_TOLERANCE = 1e-3
# The same sums in float64.
F64_TOLERANCE = 1e-11
# Upstream adds 1 to an F16 norm in F16 and computes -exp(A_log) there, which its files keep.
F16_NORM_TOLERANCE = 0.1

DEPTH = 4
TOKENS = [int(t) for t in np.random.PCG64(7).random_raw(33) % np.uint64(922)]
PROMPT = TOKENS[:-1]

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra")

Folder = Callable[[Spec], Path]
FOR_LLAMA_CPP = [
    SPECS[name]
    for name in (
        *("dense-tied", "dense-3v", "dense-f16", "dense-fp8", "moe-fused", "moe-mixed"),
        *("next-unfused", "next-fp8"),
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("reference")

    def get(spec: Spec) -> Path:
        path = root / spec.name
        return path if path.is_dir() else write_checkpoint(path, spec)

    return get


def largest_difference(a: Any, b: Any) -> float:
    assert a.shape == b.shape
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


# -------------------------------------------------------------------- with itself


@pytest.mark.parametrize("spec", [SPECS["dense-3v"], SPECS["moe-fused"]], ids=str)
def test_a_prefix_does_not_see_what_follows(spec: Spec, folder: Folder) -> None:
    model = ReferenceModel(folder(spec))
    logits, h = model.trunk(TOKENS)
    short_logits, short_h = model.trunk(TOKENS[:20])
    assert largest_difference(logits[:20], short_logits) < F64_TOLERANCE
    rows, short_rows = model.mtp_rows(TOKENS, h), model.mtp_rows(TOKENS[:20], short_h)
    assert largest_difference(rows[:20], short_rows) < F64_TOLERANCE


def test_the_layout_of_a_checkpoint_does_not_matter(folder: Folder) -> None:
    spec = SPECS["moe-unfused"]
    other = replace(spec, name="other", fused_experts=True, fused_mtp_experts=True, nested=True)
    other = replace(other, shards=3, layer_types=False)
    a, b = ReferenceModel(folder(spec)), ReferenceModel(folder(other))
    logits, h = a.trunk(PROMPT)
    assert largest_difference(logits, b.trunk(PROMPT)[0]) == 0
    assert largest_difference(a.draft(TOKENS, h, 2)[1], b.draft(TOKENS, h, 2)[1]) == 0


def test_fp8_blocks_are_scaled(folder: Folder) -> None:
    spec = SPECS["dense-fp8"]
    model = ReferenceModel(folder(spec))
    plain = ReferenceModel(folder(replace(spec, name="plain", fp8=False, dtype="F32")))
    name = "model.layers.3.self_attn.k_proj.weight"  # its 64 rows fill half of a block
    weight, scale = fp8_blocks(plain.w[name].astype(np.float32))
    assert scale.shape == (1, 2)
    want = weight.astype(np.float64) * np.repeat(scale.astype(np.float64), 128, axis=1)
    assert largest_difference(model.w[name], want) == 0
    # e4m3 keeps four significant bits: an error of at most 1 / 16 of a value above its subnormals.
    assert np.allclose(model.w[name], plain.w[name], rtol=1 / 16, atol=1e-3)


def test_draft_steps_feed_the_blocks_own_hidden_state(folder: Folder) -> None:
    model = ReferenceModel(folder(SPECS["dense-tied"]))
    h = model.trunk(PROMPT)[1]
    drafted, logits = model.draft(TOKENS, h, DEPTH)
    assert logits.shape == (DEPTH, model.vocab_size)
    assert drafted == logits.argmax(axis=1).tolist()

    zeros = np.zeros((1, model.hidden))
    first = model.mtp_rows(TOKENS, np.concatenate([zeros, h]))
    assert largest_difference(first[-1] @ model.head.T, logits[0]) < F64_TOLERANCE
    second = model.mtp_rows([*TOKENS, drafted[0]], np.concatenate([zeros, h, first[-1:]]))
    assert largest_difference(second[-1] @ model.head.T, logits[1]) < F64_TOLERANCE

    followed = model.draft(TOKENS, h, DEPTH, follow=drafted)
    assert followed[0] == drafted
    assert largest_difference(followed[1], logits) == 0
    other = model.draft(TOKENS, h, DEPTH, follow=[1, 2, 3, 4])[1]
    assert largest_difference(other[0], logits[0]) == 0
    assert largest_difference(other[1], logits[1]) > F32_TOLERANCE


def test_the_row_of_zeros_matters_and_extra_states_do_not(folder: Folder) -> None:
    model = ReferenceModel(folder(SPECS["dense-tied"]))
    h = model.trunk(TOKENS)[1]
    logits = model.draft(TOKENS, h, 1)[1]
    assert largest_difference(model.draft(TOKENS, h[:-1], 1)[1], logits) == 0
    assert largest_difference(model.draft(TOKENS, h, 1, zero_row=False)[1], logits) > F32_TOLERANCE
    with pytest.raises(ValueError, match="33 tokens need 32 hidden states: 31"):
        model.draft(TOKENS, h[:31], 1)


# ------------------------------------------------------------- with transformers


def load_hf(path: Path, spec: Spec) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    torch: Any = pytest.importorskip("torch")
    if spec.family == "qwen3_next":
        family = "Qwen3NextForCausalLM"
    else:
        family = "Qwen3_5MoeForCausalLM" if spec.experts else "Qwen3_5ForCausalLM"
    text = transformers.AutoConfig.from_pretrained(path).get_text_config()
    # transformers runs any MTP layer that a config declares in these words; Qwen3.5's has others.
    text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    model, report = getattr(transformers, family).from_pretrained(
        path,
        config=text,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not report["missing_keys"]
    return model.eval()


@pytest.mark.sample(4)
@pytest.mark.upstream
@needs_torch
@pytest.mark.parametrize(
    "spec", [s for s in SPECS.values() if not s.fp8 and not s.layout and s.rope != "yarn"], ids=str
)
def test_trunk_and_head_equal_transformers(spec: Spec, folder: Folder) -> None:
    hf = load_hf(folder(spec), spec)
    torch: Any = pytest.importorskip("torch")
    model = ReferenceModel(folder(spec))
    logits, h = model.trunk(TOKENS)
    with torch.no_grad():
        want = hf(torch.tensor([TOKENS])).logits[0].numpy()
    assert largest_difference(logits, want) < F32_TOLERANCE
    if not spec.mtp:
        return

    layers: Any = pytest.importorskip("transformers.modeling_layers")
    head = layers.MtpModel.from_pretrained(hf).eval()
    with torch.no_grad():
        rows = head.forward_layer(
            0,
            torch.tensor(h[None, :-1], dtype=torch.float32),
            torch.arange(1, len(TOKENS))[None],
            None,
            input_ids=torch.tensor([TOKENS[1:]]),
        )
    assert largest_difference(model.mtp_rows(TOKENS[1:], h[:-1], 1), rows[0]) < F32_TOLERANCE


# --------------------------------------------------------------- with llama.cpp


def assert_equal_to_llama_cpp(model: ReferenceModel, gguf: Path, tolerance: float) -> None:
    logits, h = model.trunk(PROMPT)
    drafted, drafts = model.draft(TOKENS, h, DEPTH)
    with LlamaMtp(gguf) as llama:
        their_logits, their_h = llama.trunk(PROMPT)
        their_drafts = llama.draft(TOKENS, their_h, DEPTH, follow=drafted)[1]
    assert largest_difference(logits, their_logits) < tolerance
    assert largest_difference(h, their_h) < tolerance
    assert largest_difference(drafts, their_drafts) < tolerance


@pytest.mark.sample(2)
@pytest.mark.upstream
@needs_torch
@pytest.mark.parametrize("spec", FOR_LLAMA_CPP, ids=str)
def test_equal_to_llama_cpp_on_upstreams_file(spec: Spec, folder: Folder, tmp_path: Path) -> None:
    gguf = convert(folder(spec), tmp_path / "f32.gguf", "f32")
    tolerance = F16_NORM_TOLERANCE if spec.dtype == "F16" else F32_TOLERANCE
    assert_equal_to_llama_cpp(ReferenceModel(folder(spec)), gguf, tolerance)


@pytest.mark.sample(3)
@pytest.mark.parametrize("spec", FOR_LLAMA_CPP, ids=str)
def test_equal_to_llama_cpp_on_our_file(spec: Spec, folder: Folder, tmp_path: Path) -> None:
    gguf = tmp_path / "f32.gguf"
    arguments = ["convert", str(folder(spec)), "-o", str(gguf)]
    arguments += ["--quant", "F32", "--mtp-type", "F32"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    tolerance = F16_NORM_TOLERANCE if spec.dtype == "F16" else F32_TOLERANCE
    assert_equal_to_llama_cpp(ReferenceModel(folder(spec)), gguf, tolerance)
