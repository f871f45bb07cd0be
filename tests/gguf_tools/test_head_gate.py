"""A head that accepts far fewer drafts than its source is reported, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.convert.heads.head_gate import FAIL, WARN, HeadGate, is_small
from mtp_gguf.gguf_tools.machine import process_memory
from support.commands import invoke, refused, succeed
from support.gguf_files import edited, renumber
from support.models import Models


@pytest.fixture(scope="module")
def whole(models: Models) -> Path:
    return models.convert("demo", "--mtp-f16")


@pytest.fixture
def trunk(whole: Path, tmp_path: Path) -> Path:
    path = tmp_path / "trunk.gguf"
    succeed("strip", whole, "-o", path)
    return path


def graft(trunk: Path, source: Path, *options: object) -> dict[str, Any] | None:
    """Graft with --json; the comparison with the source's head."""
    target = trunk.with_name("made.gguf")
    words = ("graft", trunk, "--from", source, "-o", target, "--overwrite", "--json", *options)
    fields: dict[str, Any] = json.loads(succeed(*words))
    compared: dict[str, Any] | None = fields["compared"]
    return compared


@pytest.mark.thorough
def test_the_types_of_a_trained_head(trunk: Path, models: Models) -> None:
    """When this was written: F16 72 %, Q4_0 71 %, Q3_K 70 %, Q2_K 55 %."""
    source = models.checkpoint("demo")
    for name in ("F16", "Q8_0"):
        assert graft(trunk, source, "--mtp-type", name) is None
    for name in ("Q4_0", "Q3_K"):
        compared = graft(trunk, source, "--mtp-type", name)
        assert compared is not None
        assert compared["source_share"] > 0.6
        assert compared["lost"] < WARN
        assert compared["better"] is None
    compared = graft(trunk, source, "--mtp-type", "Q2_K")
    assert compared is not None
    assert WARN < compared["lost"] < FAIL
    assert compared["better"] == "Q4_K"
    assert compared["failed"] is False
    words = ("--mtp-type", "Q2_K", "-o", trunk.with_name("again.gguf"))
    report = succeed("graft", trunk, "--from", source, *words)
    assert "warning: the head in Q2_K accepts" in report
    assert "fewer than the source's head" in report
    assert "use --mtp-type Q4_K" in report
    assert graft(trunk, source, "--mtp-type", "Q2_K", "--no-check") is None


@pytest.mark.thorough
def test_a_type_that_loses_too_much_is_not_recommended(
    trunk: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.checkpoint("demo")
    compared = graft(trunk, source, "--mtp-type", "Q4_K")
    assert compared is not None
    assert compared["lost"] > 0
    monkeypatch.setattr("mtp_gguf.convert.heads.head_gate.WARN", compared["lost"] * 0.9)
    compared = graft(trunk, source, "--mtp-type", "Q2_K")
    assert compared is not None
    assert compared["better"] in {"Q5_K", "Q6_K", "Q8_0", "F16"}


@pytest.mark.thorough
def test_too_much_is_refused_before_anything_is_written(
    trunk: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_gguf.convert.heads.head_gate.FAIL", 0.1)
    source, made = models.checkpoint("demo"), trunk.with_name("made.gguf")
    words = ("--from", source, "-o", made, "--mtp-type", "Q2_K")
    message = refused(trunk.parent, "graft", trunk, *words, words=("--mtp-type Q4_K", "--force"))
    assert "the head in Q2_K accepts" in message
    succeed("graft", trunk, *words, "--force")
    converted = trunk.with_name("converted.gguf")
    options = ("--mtp-type", "Q2_K", "-o", converted)
    result = invoke("convert", source, *options)
    assert result.exit_code == 1
    assert f"{converted}: written, but the head in Q2_K accepts" in result.stderr
    assert "use --mtp-type Q4_K" in succeed("convert", source, *options, "--overwrite", "--force")


@pytest.mark.thorough
def test_a_head_that_only_its_own_model_accepts(whole: Path, trunk: Path, tmp_path: Path) -> None:
    compared = graft(trunk, whole)
    assert compared is not None
    assert (compared["head_type"], compared["lost"], compared["failed"]) == (None, 0.0, False)

    def another(norm: Any) -> Any:
        """Permute the last norm, after which the head reads the hidden states."""
        order = np.random.default_rng(3).permutation(len(norm))
        return norm[order] * np.random.default_rng(4).choice([-1, 1], len(norm))

    edit = renumber("^output_norm.weight$", another)
    other = edited(trunk, tmp_path / "other.gguf", tensors=edit)
    words = ("--from", whole, "-o", tmp_path / "made2.gguf")
    message = refused(tmp_path, "graft", other, *words, words=("fewer than in its own model",))
    assert "take the head of exactly this model" in message
    succeed("graft", other, *words, "--force", "--no-check")


def test_what_is_not_measured_is_said(
    trunk: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "free_memory", lambda: 200 << 20)
    source, made = models.checkpoint("demo"), trunk.with_name("made.gguf")
    result = invoke("graft", trunk, "--from", source, "-o", made, "--mtp-type", "Q2_K")
    assert result.exit_code == 0
    assert "note: not compared with the source's head: the model takes" in result.stderr


def test_types() -> None:
    assert [t for t in ("F16", "BF16", "Q8_0", "q6_K", "IQ4_XS", "NVFP4") if is_small(t)] == [
        "q6_K",
        "IQ4_XS",
        "NVFP4",
    ]
    gate = HeadGate("Q2_K", 0.3, 0.7, "Q5_K")
    assert gate.failed
    assert not HeadGate("Q2_K", 0.66, 0.7).warnings()
