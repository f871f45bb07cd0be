"""Grafting the head of a Hugging Face checkpoint equals converting with the head."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from support.checkpoint_edits import edit_json, edit_tensors
from support.checkpoints import COVERED, DENSE, MOE, SPECS, Spec
from support.commands import refused, succeed
from support.gguf_files import edited, value_of
from support.models import Models

UNIFORM = ("--quant", "Q8_0")


@pytest.mark.sample(2)
@pytest.mark.parametrize("spec", [*COVERED, SPECS["dense-fp8"], SPECS["moe-fp8"]], ids=str)
@pytest.mark.parametrize("head", ["F16", "Q6_K"])
def test_equal_to_converting(spec: Spec, head: str, models: Models, tmp_path: Path) -> None:
    whole = models.convert(spec, *UNIFORM, "--mtp-type", head)
    trunk = models.convert(spec, *UNIFORM, "--no-mtp")
    folder = models.checkpoint(spec)
    made = tmp_path / "made.gguf"
    succeed("graft", "--no-check", trunk, "--from", folder, "--mtp-type", head, "-o", made)
    assert made.read_bytes() == whole.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["made.gguf"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("quant", ["F16", "BF16", "F32"])
def test_equal_to_converting_unquantized(quant: str, models: Models, tmp_path: Path) -> None:
    spec = SPECS["dense-ragged"]  # where fallbacks differ from those of a quantized file
    whole = models.convert(spec, "--quant", quant, "--mtp-type", "Q6_K")
    trunk = models.convert(spec, "--quant", quant, "--no-mtp")
    made, folder = tmp_path / "made.gguf", models.checkpoint(spec)
    succeed("graft", "--no-check", trunk, "--from", folder, "--mtp-type", "Q6_K", "-o", made)
    assert made.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("spec", [DENSE, MOE], ids=str)
@pytest.mark.parametrize("ranking", ["id", "corpus", "list"])
def test_draft_vocabularies(spec: Spec, ranking: str, models: Models, tmp_path: Path) -> None:
    """From the checkpoint, and from a GGUF with the base's own tokenizer: the same list."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("def main():\n    return 'naïve café' <|im_end|>\n" * 50, encoding="utf-8")
    (tmp_path / "ids.json").write_text(str(list(range(100, 400))))
    options: tuple[object, ...] = {
        "id": ("--fastmtp", 128),
        "corpus": ("--fastmtp", "--fastmtp-corpus", corpus),
        "list": ("--fastmtp-ids", tmp_path / "ids.json"),
    }[ranking]
    made = tmp_path / "made.gguf"
    whole = tmp_path / "whole.gguf"
    succeed("convert", models.checkpoint(spec), *UNIFORM, *options, "-o", whole)
    trunk = models.convert(spec, *UNIFORM, "--no-mtp")
    for donor in (models.checkpoint(spec), models.convert(spec, *UNIFORM, "--head-only")):
        succeed("graft", "--no-check", trunk, "--from", donor, *options, "-o", made, "--overwrite")
        assert made.read_bytes() == whole.read_bytes()
    # Unless a list is requested, a graft takes over the donor's.
    succeed("graft", "--no-check", trunk, "--from", whole, "-o", made, "--overwrite")
    assert made.read_bytes() == whole.read_bytes()
    succeed("strip", whole, "-o", made, "--overwrite")
    assert made.read_bytes() == trunk.read_bytes()


def test_a_short_corpus_is_reported(models: Models, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("def main():\n", encoding="utf-8")
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    for donor in (models.checkpoint(DENSE), models.convert(DENSE, *UNIFORM, "--head-only")):
        words = ("--from", donor, "--fastmtp-corpus", corpus, "-o", tmp_path / "made.gguf")
        output = succeed("graft", "--no-check", trunk, *words, "--overwrite")
        assert "tokens are too few to rank a draft vocabulary" in output


@pytest.mark.parametrize("layout", ["table", "sidecar"])
def test_stored_draft_rows_of_a_donor(layout: str, models: Models, tmp_path: Path) -> None:
    donor = models.convert(DENSE, *UNIFORM, "--fastmtp", "128", "--fastmtp-layout", layout)
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    made = tmp_path / "made.gguf"
    succeed("graft", "--no-check", trunk, "--from", donor, "-o", made)
    kept = "table" if layout == "table" else "ids"
    whole = models.convert(DENSE, *UNIFORM, "--fastmtp", "128", "--fastmtp-layout", kept)
    assert made.read_bytes() == whole.read_bytes()
    # A requested list replaces the donor's.
    succeed(
        "graft", "--no-check", trunk, "--from", donor, "--fastmtp", 64, "-o", made, "--overwrite"
    )
    assert made.read_bytes() == models.convert(DENSE, *UNIFORM, "--fastmtp", "64").read_bytes()
    if layout == "table":
        succeed("strip", donor, "-o", made, "--overwrite")
        assert made.read_bytes() == trunk.read_bytes()
        succeed("extract", donor, "-o", made, "--overwrite")
        assert "layout table" in succeed("list-tensors", made)


def test_a_donors_broken_list_is_not_taken_over(models: Models, tmp_path: Path) -> None:
    relative = {"mtp_gguf.fastmtp.token_ids": Value(ValueType.U32, [5, 5, 7, 7, 7])}
    whole = models.convert(DENSE, *UNIFORM, "--fastmtp", "64")
    donor = edited(whole, tmp_path / "d.gguf", metadata=relative)
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    target = tmp_path / "x.gguf"
    words = ("d.gguf", "relative to their index", "--fastmtp")
    refused(tmp_path, "graft", trunk, "--from", donor, "-o", target, words=words)
    succeed("graft", "--no-check", trunk, "--from", donor, "--fastmtp", 64, "-o", target)
    assert target.read_bytes() == whole.read_bytes()


def test_checkpoints_that_do_not_fit(models: Models, tmp_path: Path) -> None:
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    target = tmp_path / "x.gguf"
    wide = dataclasses.replace(DENSE, name="wide", hidden=320)
    for spec, words in (
        (wide, ("wide has embedding_length 320", "has 256")),
        (MOE, ("qwen35moe", "does not fit")),
        (SPECS["dense-no-mtp"], ("expected mtp.* tensors, found none",)),
    ):
        folder = models.checkpoint(spec)
        refused(tmp_path, "graft", trunk, "--from", folder, "-o", target, words=words)
    refused(
        tmp_path, "graft", trunk, "--from", tmp_path / "nothing", "-o", target, words=("nothing",)
    )


def test_a_head_that_does_not_fit_is_refused_before_it_is_read(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("mtp_gguf.convert.checkpoints.source_rows.SourceRows.read", unexpected)
    folder = models.checkpoint(dataclasses.replace(DENSE, name="deep", layers=8))
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    words = ("8 trunk layers",)
    refused(tmp_path, "graft", trunk, "--from", folder, "-o", tmp_path / "x.gguf", words=words)


def test_a_failure_while_converting_leaves_nothing(models: Models, tmp_path: Path) -> None:
    folder = models.copy(DENSE, tmp_path)
    edit_tensors(folder, lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"] * np.nan}))
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    target = tmp_path / "x.gguf"
    words = ("mtp.fc.weight", "NaN or infinity")
    refused(tmp_path, "graft", trunk, "--from", folder, "-o", target, words=words)


def test_options_that_do_not_go_together(models: Models, tmp_path: Path) -> None:
    trunk, whole = models.convert(DENSE, *UNIFORM, "--no-mtp"), models.convert(DENSE, *UNIFORM)
    folder, target = models.checkpoint(DENSE), tmp_path / "x.gguf"
    for arguments, words in (
        ((whole, "--mtp-f16"), ("a GGUF's head is copied as it is",)),
        ((folder, "--mtp-f16", "--mtp-type", "Q8_0"), ("contradict",)),
        ((folder, "--mtp-type", "Q9"), ("Q9",)),
        ((folder, "--fastmtp", "0"), ("from 1",)),
        ((folder, "--fastmtp-corpus", trunk, "--fastmtp-ids", trunk), ("contradict",)),
    ):
        refused(tmp_path, "graft", trunk, "--from", *arguments, "-o", target, words=words, code=2)
    too_many = ("below the vocabulary", "5000")
    for donor in (folder, whole):
        words_of_graft = ("graft", trunk, "--from", donor, "--fastmtp", 5000, "-o", target)
        refused(tmp_path, *words_of_graft, words=too_many)


def test_an_unknown_pre_tokenizer_is_the_bases(models: Models, tmp_path: Path) -> None:
    folder = models.copy(DENSE, tmp_path)
    edit_json(
        folder / "tokenizer.json",
        lambda t: t["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="x+"),
    )
    trunk, target = models.convert(DENSE, *UNIFORM, "--no-mtp"), tmp_path / "x.gguf"
    succeed("graft", "--no-check", trunk, "--from", folder, "-o", target)
    assert value_of(target, "tokenizer.ggml.pre") == value_of(trunk, "tokenizer.ggml.pre")
    shutil.rmtree(folder)
