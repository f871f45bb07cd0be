"""A head quantized while it is loaded: its drafts, the text, and the choice of a type."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.native.checks import head_types
from mtp_gguf.native.checks.head_trial import measure_types
from mtp_gguf.native.checks.head_types import STORED, MeasuredType, TypeChoice
from mtp_gguf.native.errors import NativeError
from mtp_gguf.native.head import Head
from mtp_gguf.native.llama.mtp_llama import MTPLlama
from support.commands import invoke
from support.generation import load, take
from support.models import DEMO, Models

TOKENS = list(range(40, 52))


def logits(path: Path, mtp_type: str | None = None, n_threads: int = 1) -> np.ndarray:
    with Head(path, mtp_type=mtp_type, n_threads=n_threads) as head:
        hidden = np.random.default_rng(2).normal(size=(len(TOKENS), head.n_embd))
        found = head.draft(TOKENS, hidden.astype(np.float32), 0, 3, logits=True).logits
    assert found is not None
    return found


@pytest.mark.parametrize("mtp_type", ["Q8_0", "q4_K", "Q6_K"])
def test_it_is_the_head_of_a_file_of_this_type(models: Models, mtp_type: str) -> None:
    whole = models.gguf(DEMO, "F16", "F32")
    assert np.array_equal(logits(whole, mtp_type), logits(models.gguf(DEMO, "F16", mtp_type)))
    assert not np.array_equal(logits(whole, mtp_type), logits(whole))


def test_threads_change_nothing(models: Models) -> None:
    path = models.gguf(DEMO, "F16", "F16")
    assert np.array_equal(logits(path, "Q4_K"), logits(path, "Q4_K", n_threads=3))


@pytest.mark.thorough
def test_every_type_that_is_offered(models: Models) -> None:
    path = models.gguf(DEMO, "F16", "F16")
    with pytest.raises(NativeError) as refused:
        Head(path, mtp_type="Q9")
    listed = re.fullmatch(r"mtp_type: expected one of (.*), found Q9", str(refused.value))
    assert listed is not None
    names = listed[1].split(", ")
    assert {"q8_0", "q4_K", "iq4_xs"} <= {*names}
    for name in names:
        assert np.isfinite(logits(path, name)).all(), name


def test_what_has_no_more_bits_stays(models: Models) -> None:
    path = models.gguf(DEMO, "F16", "Q4_K")
    assert np.array_equal(logits(path, "Q8_0"), logits(path))
    with Head(path) as stored, Head(path, mtp_type="Q8_0") as same:
        assert stored.mapped_bytes == same.mapped_bytes


@pytest.mark.parametrize("layout", ["ids", "table"])
@pytest.mark.parametrize("spec", ["moe-fused", "dense-untied"])
def test_experts_and_draft_vocabularies(models: Models, spec: str, layout: str) -> None:
    path = models.gguf(spec, "F32", "F32", layout)
    assert not np.array_equal(found := logits(path, "Q8_0"), stored := logits(path))
    assert np.abs(found - stored).max() < 0.1 * np.abs(stored).max()


def text(path: Path, n: int = 40, **options: Any) -> tuple[list[int], tuple[int, ...]]:
    with load(path, depth=3, lookup=False, profile=False, **options) as llm:
        tokens = take(llm, n, llm.tokenize(b"The history of the town begins with"))
        return tokens, llm.mtp_stats.accepted


def test_text_and_file_are_as_before(models: Models) -> None:
    path = models.gguf(DEMO, "F16", "F16")
    before = path.read_bytes()
    plain, accepted = text(path)
    worse, fewer = text(path, mtp_type="Q2_K")
    assert worse == plain
    assert sum(fewer) != sum(accepted)  # it is another head
    assert path.read_bytes() == before


@pytest.mark.parametrize("mtp_type", ["Q8_0", "auto"])
def test_a_type_without_drafts_has_no_effect_aloud(models: Models, mtp_type: str) -> None:
    words = f"{mtp_type} has no effect, because nothing is drafted with a head"
    whole, trunk = models.gguf(DEMO, "F16", "F16"), models.convert("dense-tied", "--no-mtp")
    for path, depth in ((whole, 0), (trunk, None)):
        options: dict[str, Any] = {"depth": depth, "n_ctx": 64, "mtp_type": mtp_type}
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            MTPLlama(str(path), **options).close()
        assert f"mtp_type: {words}" in [str(one.message) for one in found]
    result = invoke("generate", whole, *("-p", "a", "-n", 1, "--depth", 0, "--mtp-type", mtp_type))
    assert result.exit_code == 0, result.output
    assert f"mtp-gguf: --mtp-type: {words}\n" in result.stderr


def test_a_session_goes_on_with_another_type(models: Models, tmp_path: Path) -> None:
    path, saved = models.gguf(DEMO, "F16", "F16"), tmp_path / "saved.session"
    whole, _ = text(path, 20)
    with load(path, depth=3, profile=False) as llm:
        prompt = llm.tokenize(b"The history of the town begins with")
        begun = take(llm, 8, prompt)
        llm.save_session(saved)
    with load(path, depth=3, profile=False, mtp_type="Q4_K") as llm:
        llm.load_session(saved)
        assert begun + take(llm, 12, [*prompt, *begun]) == whole


def measured(path: Path, *types: str) -> tuple[MeasuredType, ...]:
    with load(path, depth=head_types.DEPTH, lookup=False, profile=False, n_ctx=512) as llm:
        return measure_types(llm, types, seconds=300.0)


@pytest.mark.thorough
def test_a_type_that_loses_drafts_is_not_chosen(models: Models) -> None:
    found = measured(models.gguf(DEMO, "F16", "F16"), "Q8_0", "Q2_K")
    assert [one.name for one in found] == [STORED, "Q8_0", "Q2_K"]
    assert len({one.chains for one in found}) == 1
    stored, fine, bad = found
    print(found)
    assert bad.accepted < stored.accepted * (1 - head_types.MOST_LOSS) <= fine.accepted
    slow = replace(stored, draft_ms=1e3, verify_ms=1.0)
    fast = replace(bad, draft_ms=1e-3, verify_ms=1.0)
    assert TypeChoice((slow, fast)).name is None
    assert TypeChoice((slow, replace(fine, draft_ms=1e-3), fast)).name == "Q8_0"


def test_only_a_gain_is_chosen() -> None:
    stored = MeasuredType(STORED, 100, 200, 10.0, 40.0)
    barely = MeasuredType("Q8_0", 100, 200, 9.5, 40.0)
    much = MeasuredType("Q4_K", 100, 199, 6.0, 44.0)
    assert TypeChoice((stored, barely)).name is None
    assert TypeChoice((stored, barely, much)).name == "Q4_K"
    assert "head Q4_K: 1.08 times" in TypeChoice((stored, barely, much)).text


@pytest.mark.thorough
def test_auto_measures_once(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = models.gguf(DEMO, "F16", "F16")
    with load(path, depth=2, mtp_type="auto") as llm:
        choice = llm.type_choice
    assert choice is not None
    assert [one.name for one in choice.measured] == [STORED, *head_types.TYPES], choice.text
    monkeypatch.setattr(head_types, "run_module", None)  # it is not measured again
    with load(path, depth=2, mtp_type="auto") as llm:
        assert llm.type_choice == choice
    [known] = (tmp_path / "mtp-gguf" / "head-types").iterdir()
    known.write_text('[{"name": 1}]')
    with pytest.raises(TypeError):  # what is not ours is measured again
        load(path, depth=2, mtp_type="auto")


def test_what_cannot_be_measured_is_said(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MTP_GGUF_LIBS", str(tmp_path / "none"))  # of the subprocess
    choice = head_types.choose_type(models.gguf(DEMO, "F16", "F16"), None, "stock", {})
    assert choice.name is None
    assert "its types were not compared" in choice.text
    assert not (tmp_path / "mtp-gguf").exists()
