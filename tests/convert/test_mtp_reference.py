"""The NumPy reference computes what transformers and llama.cpp's graphs compute."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.checkpoints import SPECS, Spec
from support.models import Models
from support.reference_model import ReferenceModel
from support.upstream.convert_upstream import convert
from support.upstream.llama_mtp import LlamaMtp

# Logits have a standard deviation of 1.1. F32 implementations differ by up to 2e-4 in them after
# eight layers (sums in another order); a wrong norm, head or position shows as 0.05 to 5.
F32_TOLERANCE = 1e-3
# Upstream adds 1 to an F16 norm in F16 and computes -exp(A_log) there, which its files keep.
F16_NORM_TOLERANCE = 0.1

DEPTH = 4
TOKENS = [int(t) for t in np.random.PCG64(7).random_raw(33) % np.uint64(922)]
PROMPT = TOKENS[:-1]

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs the `upstream` extra")

FOR_LLAMA_CPP = [
    SPECS[name]
    for name in (
        *("dense-tied", "dense-3v", "dense-f16", "dense-fp8", "moe-fused", "moe-mixed"),
        *("next-unfused", "next-fp8"),
    )
]


def largest_difference(a: Any, b: Any) -> float:
    assert a.shape == b.shape
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


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
def test_trunk_and_head_equal_transformers(spec: Spec, models: Models) -> None:
    hf = load_hf(models.checkpoint(spec), spec)
    torch: Any = pytest.importorskip("torch")
    model = models.reference(spec)
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
def test_equal_to_llama_cpp_on_upstreams_file(spec: Spec, models: Models, tmp_path: Path) -> None:
    gguf = convert(models.checkpoint(spec), tmp_path / "f32.gguf", "f32")
    tolerance = F16_NORM_TOLERANCE if spec.dtype == "F16" else F32_TOLERANCE
    assert_equal_to_llama_cpp(models.reference(spec), gguf, tolerance)


@pytest.mark.sample(3)
@pytest.mark.parametrize("spec", FOR_LLAMA_CPP, ids=str)
def test_equal_to_llama_cpp_on_our_file(spec: Spec, models: Models) -> None:
    gguf = models.gguf(spec)
    tolerance = F16_NORM_TOLERANCE if spec.dtype == "F16" else F32_TOLERANCE
    assert_equal_to_llama_cpp(models.reference(spec), gguf, tolerance)
