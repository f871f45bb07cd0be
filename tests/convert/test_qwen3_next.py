"""Qwen3-Next: configs that llama.cpp has no model for, and what the file tools know of its files.

Its goldens are among those of test_goldens.py, its arithmetic in test_mtp_reference.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.vision import PROJECTOR, VisionTower, misfits
from support.checkpoint_edits import edit_json
from support.checkpoints import SPECS
from support.commands import invoke, refused, succeed
from support.gguf_files import edited
from support.models import Models

SPEC = replace(SPECS["next-fp8"], name="next-tiny", fp8=False, shards=1, seed=4)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("mlp_only_layers", [1], "mlp_only_layers: expected [], as llama.cpp has experts"),
        ("decoder_sparse_step", 2, "decoder_sparse_step: expected 1, as llama.cpp has experts"),
        ("norm_topk_prob", False, "norm_topk_prob: expected true, as llama.cpp normalizes"),
    ],
)
def test_models_that_llama_cpp_does_not_have(
    key: str, value: Any, said: str, models: Models, tmp_path: Path
) -> None:
    """Upstream's converter writes files of them that do not load, or compute something else."""
    folder = models.copy(SPEC, tmp_path)
    edit_json(folder / "config.json", lambda config: config.update({key: value}))
    refused(tmp_path, "convert", folder, "-o", tmp_path / "x.gguf", words=(said,))


def test_doctor_knows_the_whole_model(models: Models, tmp_path: Path) -> None:
    path = models.convert(SPEC, "--mtp-f16", "--fastmtp", "256")
    found = json.loads(succeed("doctor", path, "--json"))
    assert found["can_draft"]
    assert [f["code"] for f in found["findings"]] == ["not-counted"]
    assert found["memory"]["state_log"] == found["memory"]["state_copy"]  # it has no replay
    assert "in place of each state copy" not in succeed("doctor", path)
    base = tmp_path / "base.gguf"
    succeed("strip", path, "-o", base)
    broken = edited(base, tmp_path / "broken.gguf", tensors=lambda t: t.pop("blk.0.ssm_ba.weight"))
    succeed("extract", path, "-o", tmp_path / "head.gguf")
    report = invoke("doctor", broken, "--head", tmp_path / "head.gguf", "--json").stdout
    text = json.loads(report)["findings"][0]["text"]
    assert text == "blk.0.ssm_ba.weight: expected this tensor, found none"


def test_graft_from_a_checkpoint(models: Models, tmp_path: Path) -> None:
    whole = models.convert(SPEC, "--mtp-f16", "--quant", "Q8_0")
    base = models.convert(SPEC, "--no-mtp", "--quant", "Q8_0")
    out = tmp_path / "grafted.gguf"
    succeed("graft", base, "--from", models.checkpoint(SPEC), "--mtp-f16", "-o", out)
    assert " same\n" in succeed("compare", whole, out)
    with open_model(whole) as a, open_model(out) as b:
        for name in a.tensors:
            assert np.array_equal(a.read(name), b.read(name)), name


def test_qwen3_next_takes_no_pictures() -> None:
    tower = VisionTower(PROJECTOR, 2048, 27, {}, ())
    assert misfits(tower, "qwen3next", 2048) == ["qwen3next models take no pictures"]
    assert not misfits(tower, "qwen35moe", 2048)
