"""A carrier computes what its original does, and can be turned back into it."""

from __future__ import annotations

import filecmp
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.files.tensor_types import F32
from mtp_gguf.native import MTPLlama
from support.carried_models import HEAD, LAYERS, VOCABULARY, WIDTH, write_model
from support.commands import invoke, refused, succeed
from support.gguf_files import Tensor, loads, rewritten, tensors_of, value_of

TOKENS = [int(t) for t in np.random.default_rng(2).integers(0, VOCABULARY, 40)]


def logits(path: Path, tokens: list[int] = TOKENS, alone: int = 8) -> NDArray[np.float32]:
    """Of all tokens: of a prompt, and of the last `alone` one by one."""
    options: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1}
    with closing(MTPLlama(str(path), depth=0, logits_all=True, **options)) as llm:
        llm.eval(tokens[:-alone])
        for token in tokens[-alone:]:
            llm.eval([token])
        scores: NDArray[np.float32] = llm.scores[: len(tokens)].copy()
        return scores


@pytest.mark.stock
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen2", {"biased": True}),
        ("qwen2", {"fused": True, "tied": True, "biased": True, "kind": Type.Q4_0}),
        ("qwen3", {"kind": Type.Q8_0}),
        ("llama", {"halves": False}),
        ("llama", {"halves": False, "biased": True, "kind": Type.Q8_0, "tied": True}),
        ("llama", {"halves": False, "fused": True, "biased": True, "kind": Type.Q4_0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_a_carrier_has_the_logits_of_its_original(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """To the bit. Rows of a `llama` are in another order, in which sums of attention round.

    So a carrier of one is also held against the same weights written as a `qwen2`.
    """
    model = write_model(tmp_path / "model.gguf", architecture, **options)
    carrier = tmp_path / "carrier.gguf"
    assert "cannot draft" in succeed("carry", model, "-o", carrier)
    wanted, found = logits(model), logits(carrier)
    if architecture == "llama":
        exact = options.get("kind", Type.F32) is Type.F32
        assert np.allclose(found, wanted, atol=(1e-4 if exact else 0.05) * wanted.std())
        twin = write_model(tmp_path / "twin.gguf", "qwen2", **options | {"halves": True})
        wanted = logits(twin)
    assert np.array_equal(found, wanted)
    assert wanted.std() > 0.5  # tells models apart

    back = tmp_path / "back.gguf"
    succeed("carry", "--back", carrier, "-o", back)
    assert back.read_bytes() == model.read_bytes()


def test_what_a_carrier_is(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", "qwen3")
    out = succeed("carry", model, "-o", tmp_path)
    carrier = tmp_path / "model-carrier.gguf"
    assert f"next: mtp-gguf train-head {carrier} --text FILES" in out
    assert loads(carrier)  # stock llama.cpp, without a head
    assert value_of(carrier, "glm4moe.block_count") == LAYERS
    assert value_of(carrier, "general.name") == "A carried model"
    assert not any(name.startswith(f"blk.{LAYERS}.") for name in tensors_of(carrier))
    assert "train-head" in refused(tmp_path, "carry", carrier, "-o", tmp_path / "x.gguf")
    found = succeed("list-tensors", carrier)
    assert "carrier of a qwen3 model" in found
    result = invoke("doctor", carrier)
    report = str(result.output)
    assert result.exit_code == 1
    assert "fault: the file, a carrier of a qwen3 model, has no MTP head" in report
    assert f"fix: mtp-gguf train-head {carrier} --text FILES" in report


def test_back_is_for_carriers(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", "qwen3")
    words = ("expected a carrier", "architecture qwen3")
    refused(tmp_path, "carry", "--back", model, "-o", tmp_path / "x.gguf", words=words)


def text(value: str) -> Value:
    return Value(ValueType.STRING, value)


def whole(value: int) -> Value:
    return Value(ValueType.U32, value)


FACTORS: Tensor = ((HEAD // 2,), F32, np.ones(HEAD // 2, np.float32).tobytes())
BIAS: Tensor = ((WIDTH,), F32, bytes(4 * WIDTH))


@pytest.mark.parametrize(
    ("keys", "tensors", "word"),
    [
        ({}, {"rope_freqs.weight": FACTORS}, "frequency factors"),
        ({"llama.attention.sliding_window": whole(64)}, {}, "sliding window"),
        ({"llama.logit_scale": Value(ValueType.F32, 0.5)}, {}, "scaled logits"),
        ({"llama.expert_count": whole(8)}, {}, "mixture of experts"),
        ({"llama.new_idea": whole(1)}, {}, "the key llama.new_idea"),
        ({"glm4moe.expert_count": whole(2)}, {}, "the key glm4moe.expert_count"),
        ({"llama.rope.scaling.type": text("longrope")}, {}, "rope scaling 'longrope'"),
        ({"llama.attention.value_length": whole(16)}, {}, "value_length 16"),
        ({"llama.feed_forward_length": Value(ValueType.U32, [96, 96])}, {}, "an array"),
        (
            {"llama.attention.head_count": whole(0)},
            {},
            "attention.head_count: expected a whole number from 1, found 0",
        ),
        ({}, {"blk.0.attn_output.bias": BIAS}, "the tensor blk.0.attn_output.bias"),
        ({}, {f"blk.{LAYERS}.attn_norm.weight": BIAS}, f"expected {LAYERS} blocks by llama.block"),
        ({"llama.block_count": whole(2**32 - 1)}, {}, "expected 4294967295 blocks"),
        ({"llama.attention.head_count": whole(2**31)}, {}, "expected a whole number from 1"),
        ({"llama.attention.key_length": whole(2**31)}, {}, "rope.dimension_count"),
        ({}, {"blk.1.ffn_up.weight": None}, "expected the tensor blk.1.ffn_up.weight"),
        ({}, {"blk.0.attn_q.weight": BIAS}, "blk.0.attn_q.weight: expected"),
        ({"general.architecture": text("gemma3")}, {}, "found gemma3, which has no carrier"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_carried_is_refused(
    keys: dict[str, Value], tensors: dict[str, Tensor | None], word: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model.gguf", "llama", halves=False)
    changed = rewritten(model, tmp_path / "changed.gguf", keys, tensors)
    refused(tmp_path, "carry", changed, "-o", tmp_path / "x.gguf", words=(word,))


def test_another_layout_is_restored_as_the_same_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", "llama", halves=False)
    longer = tmp_path / "longer.gguf"
    longer.write_bytes(model.read_bytes() + bytes(32))
    assert "but not the same bytes" in succeed("carry", longer, "-o", tmp_path / "carrier.gguf")
    succeed("carry", "--back", tmp_path / "carrier.gguf", "-o", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == model.read_bytes()


@pytest.mark.slow
@pytest.mark.skipif("MTP_GGUF_REAL_MODELS" not in os.environ, reason="set MTP_GGUF_REAL_MODELS")
def test_real_models(tmp_path: Path) -> None:
    """Every GGUF in the folder that the environment names."""
    for model in sorted(Path(os.environ["MTP_GGUF_REAL_MODELS"]).glob("*.gguf")):
        carrier, back = tmp_path / "carrier.gguf", tmp_path / "back.gguf"
        succeed("carry", model, "-o", carrier, "--overwrite")
        wanted, found = logits(model), logits(carrier)
        if value_of(model, "general.architecture") == "llama":
            assert (found.argmax(-1) == wanted.argmax(-1)).mean() > 0.9
        else:
            assert np.array_equal(found, wanted)
        succeed("carry", "--back", carrier, "-o", back, "--overwrite")
        assert filecmp.cmp(back, model, shallow=False)
