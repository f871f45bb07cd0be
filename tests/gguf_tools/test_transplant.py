"""graft, extract and strip produce the same files as convert."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from support.checkpoints import COVERED, DENSE, MOE, SPECS, Spec
from support.commands import refused, succeed
from support.gguf_files import differing, drop, edited, reshape, tensors_of, value_of
from support.models import Models

# The same mix for every layer: Q4_K_M and the like give layers types by their number, and the MTP
# block is one of them, so a file converted without its head has another trunk.
UNIFORM = ("--quant", "Q8_0")


@pytest.mark.sample(3)
@pytest.mark.parametrize("spec", COVERED, ids=str)
def test_equal_to_converting(spec: Spec, models: Models, tmp_path: Path) -> None:
    whole = models.convert(spec, *UNIFORM, "--mtp-f16")
    trunk = models.convert(spec, *UNIFORM, "--no-mtp")
    head = models.convert(spec, *UNIFORM, "--mtp-f16", "--head-only")
    made = tmp_path / "made.gguf"

    succeed("extract", whole, "-o", made)
    assert made.read_bytes() == head.read_bytes()
    succeed("strip", whole, "-o", made, "--overwrite")
    assert made.read_bytes() == trunk.read_bytes()
    for donor in (head, whole):
        succeed("graft", "--no-check", trunk, "--from", donor, "-o", made, "--overwrite")
        assert made.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("spec", [DENSE, MOE], ids=str)
def test_there_and_back_at_mixed_precision(spec: Spec, models: Models, tmp_path: Path) -> None:
    whole = models.convert(spec, "--mtp-f16")
    trunk, head, again = (tmp_path / f"{n}.gguf" for n in ("trunk", "head", "again"))
    succeed("strip", whole, "-o", trunk)
    succeed("extract", whole, "-o", head)
    succeed("graft", "--no-check", trunk, "--from", head, "-o", again)
    assert again.read_bytes() == whole.read_bytes()
    succeed("strip", again, "-o", tmp_path / "trunk2.gguf")
    assert (tmp_path / "trunk2.gguf").read_bytes() == trunk.read_bytes()


def test_a_split_base_becomes_one_file(models: Models, tmp_path: Path) -> None:
    whole = models.convert(DENSE, *UNIFORM, "--mtp-f16")
    shards = models.convert(DENSE, *UNIFORM, "--no-mtp", "--split-max-size", "1M")
    assert shards.name == "model-00001-of-00004.gguf"
    succeed("graft", "--no-check", shards, "--from", whole, "-o", tmp_path / "made.gguf")
    assert (tmp_path / "made.gguf").read_bytes() == whole.read_bytes()
    second = models.convert(DENSE, *UNIFORM, "--mtp-f16", "--split-max-size", "1M")
    last = sorted(second.parent.iterdir())[-1]
    succeed("strip", last, "-o", tmp_path)
    made = tmp_path / "model-no-mtp.gguf"
    assert made.read_bytes() == models.convert(DENSE, *UNIFORM, "--no-mtp").read_bytes()


def test_per_layer_lists_grow_and_shrink(models: Models, tmp_path: Path) -> None:
    lists = {"qwen35.attention.head_count_kv": Value(ValueType.U32, [2, 2, 2, 2])}
    base = models.convert(DENSE, *UNIFORM, "--no-mtp")
    trunk = edited(base, tmp_path / "trunk.gguf", metadata=lists)
    made = tmp_path / "made.gguf"
    succeed("graft", "--no-check", trunk, "--from", models.convert(DENSE, *UNIFORM), "-o", made)
    kv = value_of(made, "qwen35.attention.head_count_kv")
    recurrent = value_of(made, "qwen35.attention.recurrent_layers")
    assert kv == [2] * 5
    assert recurrent == [True, True, True, False, False]
    succeed("strip", made, "-o", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == trunk.read_bytes()


def test_a_label_from_the_models_name_stays(models: Models, tmp_path: Path) -> None:
    named = {
        "general.name": Value(ValueType.STRING, "Tiny 3.5M"),
        "general.size_label": Value(ValueType.STRING, "3.5M"),
    }
    base = models.convert(DENSE, *UNIFORM, "--no-mtp")
    trunk = edited(base, tmp_path / "trunk.gguf", metadata=named)
    made = tmp_path / "made.gguf"
    succeed("graft", "--no-check", trunk, "--from", models.convert(DENSE, *UNIFORM), "-o", made)
    assert value_of(made, "general.size_label") == "3.5M"


def test_a_head_that_is_claimed_and_missing_is_put_back(models: Models, tmp_path: Path) -> None:
    whole = models.convert(DENSE, *UNIFORM, "--mtp-f16")
    claims = edited(whole, tmp_path / "claims.gguf", tensors=drop("blk.4."))
    succeed("graft", "--no-check", claims, "--from", whole, "-o", tmp_path / "made.gguf")
    assert differing(tensors_of(tmp_path / "made.gguf"), tensors_of(whole)) == []
    assert value_of(tmp_path / "made.gguf", "qwen35.block_count") == 5
    succeed("strip", claims, "-o", tmp_path / "trunk.gguf")
    assert value_of(tmp_path / "trunk.gguf", "qwen35.nextn_predict_layers") is None
    assert value_of(tmp_path / "trunk.gguf", "qwen35.block_count") == 4


@pytest.mark.parametrize(
    ("key", "number"),
    [("qwen35.block_count", 6), ("qwen35.block_count", 4), ("qwen35.nextn_predict_layers", None)],
)
def test_strip_believes_the_tensors(
    key: str, number: int | None, models: Models, tmp_path: Path
) -> None:
    lie = {key: None if number is None else Value(ValueType.U32, number)}
    lying = edited(models.convert(DENSE, *UNIFORM), tmp_path / "lying.gguf", metadata=lie)
    succeed("strip", lying, "-o", tmp_path / "made.gguf")
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    assert differing(tensors_of(tmp_path / "made.gguf"), tensors_of(trunk)) == []
    assert value_of(tmp_path / "made.gguf", "qwen35.block_count") == 4
    assert len(value_of(tmp_path / "made.gguf", "qwen35.attention.recurrent_layers")) == 4


def test_half_a_head_is_stripped_and_not_extracted(models: Models, tmp_path: Path) -> None:
    halve = drop("blk.4.nextn.eh_proj.", "blk.4.ffn_up.")
    whole, trunk = models.convert(DENSE, *UNIFORM), models.convert(DENSE, *UNIFORM, "--no-mtp")
    half, made = edited(whole, tmp_path / "half.gguf", tensors=halve), tmp_path / "made.gguf"
    for arguments, words in (
        (("extract", half), ("half.gguf", "no complete MTP head", "eh_proj")),
        (("graft", trunk, "--from", half), ("eh_proj.weight and 1 more",)),
        (("graft", half, "--from", whole), ("in block 4 already", "mtp-gguf strip")),
    ):
        refused(tmp_path, *arguments, "-o", made, words=words)
    succeed("strip", half, "-o", made)
    assert differing(tensors_of(made), tensors_of(trunk)) == []


def other(base: Spec = DENSE, **changes: Any) -> Spec:
    return dataclasses.replace(base, name="other", **changes)


@pytest.mark.parametrize(
    ("base", "spec", "words"),
    [
        (DENSE, other(hidden=320), ("embedding_length 320", "has 256")),
        (DENSE, other(heads=6), ("attention.head_count 6", "has 4")),
        (DENSE, other(kv_heads=1), ("attention.head_count_kv 1", "has 2")),
        (DENSE, other(head_dim=32), ("attention.key_length 32", "has 64")),
        (DENSE, other(intermediate=512), ("feed_forward_length 512", "has 256")),
        (DENSE, other(layers=8), ("8 trunk layers", "has 4")),
        (DENSE, MOE, ("is qwen35moe", "is qwen35: its head")),
        (MOE, other(MOE, experts=8), ("expert_count 8", "has 16")),
    ],
)
def test_a_head_of_another_model(
    base: Spec, spec: Spec, words: tuple[str, ...], models: Models, tmp_path: Path
) -> None:
    trunk, donor = models.convert(base, *UNIFORM, "--no-mtp"), models.convert(spec, *UNIFORM)
    words = (*words, str(trunk), str(donor))
    refused(tmp_path, "graft", trunk, "--from", donor, "-o", tmp_path / "x.gguf", words=words)


def test_another_tokenizer(models: Models, tmp_path: Path) -> None:
    tokens = Value(ValueType.STRING, [f"t{i}" for i in range(1024)])
    rename = {"tokenizer.ggml.tokens": tokens}
    donor = edited(models.convert(DENSE, *UNIFORM), tmp_path / "donor.gguf", metadata=rename)
    base = models.convert(DENSE, *UNIFORM, "--no-mtp")
    target = tmp_path / "x.gguf"
    words = ("different tokenizers", "1024 tokens differ")
    refused(tmp_path, "graft", base, "--from", donor, "-o", target, words=words)


def test_a_resized_vocabulary_of_the_same_tokens(models: Models, tmp_path: Path) -> None:
    """A head has no rows of the vocabulary; without tokens to compare only equal sizes will do."""
    base = models.convert(DENSE, *UNIFORM, "--no-mtp")
    donor = models.convert(other(vocab_size=1056), *UNIFORM)
    succeed("graft", "--no-check", base, "--from", donor, "-o", tmp_path / "whole.gguf")
    (tmp_path / "out").mkdir()

    bare = edited(donor, tmp_path / "bare.gguf", metadata={"tokenizer.ggml.tokens": None})
    words = ("vocabulary of 1056", "1024")
    target = tmp_path / "out" / "x.gguf"
    refused(tmp_path / "out", "graft", base, "--from", bare, "-o", target, words=words)


def test_a_transposed_projection(models: Models, tmp_path: Path) -> None:
    name = "blk.4.nextn.eh_proj.weight"
    transpose = reshape(name, lambda shape: shape[::-1])
    donor = edited(models.convert(DENSE, *UNIFORM), tmp_path / "donor.gguf", tensors=transpose)
    base = models.convert(DENSE, *UNIFORM, "--no-mtp")
    target = tmp_path / "x.gguf"
    words = (name, "expected shape [512, 256]", "found [256, 512] (transposed)")
    refused(tmp_path, "graft", base, "--from", donor, "-o", target, words=words)


def test_strip_needs_a_head(models: Models, tmp_path: Path) -> None:
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    head = models.convert(DENSE, *UNIFORM, "--head-only")
    whole = models.convert(DENSE, *UNIFORM)
    target = tmp_path / "x.gguf"
    for arguments, words in (
        (("strip", trunk), ("has no MTP head",)),
        (("strip", head), ("head alone",)),
        (("extract", head), ("head alone already",)),
        (("extract", trunk), ("no complete MTP head",)),
        (("graft", head, "--from", whole), ("head alone",)),
        (("graft", trunk, "--from", trunk), ("no complete MTP head",)),
        (("graft", whole, "--from", head), ("already", "mtp-gguf strip")),
    ):
        refused(tmp_path, *arguments, "-o", target, words=words)


def test_blocks_that_no_model_has(models: Models, tmp_path: Path) -> None:
    hole = drop("blk.2.")
    holed = edited(models.convert(DENSE, *UNIFORM), tmp_path / "holed.gguf", tensors=hole)
    words = ("expected blocks 0 to 3", "found 3 of them")
    refused(tmp_path, "strip", holed, "-o", tmp_path / "x.gguf", words=words)


def test_outputs_are_not_overwritten_unasked(models: Models, tmp_path: Path) -> None:
    whole = models.convert(DENSE, *UNIFORM)
    taken = tmp_path / "taken.gguf"
    taken.write_bytes(b"mine")
    refused(tmp_path, "strip", whole, "-o", taken, words=("exists", "--overwrite"))
    own = tmp_path / "own.gguf"
    own.write_bytes(whole.read_bytes())
    link = tmp_path / "link.gguf"
    link.hardlink_to(own)
    for target in (own, link):
        refused(tmp_path, "strip", own, "-o", target, "--overwrite", words=("is the input",))
    refused(tmp_path, "strip", tmp_path / "absent.gguf", words=("cannot be opened",))
    refused(tmp_path, "strip", whole, "-o", tmp_path / "no" / "x.gguf", words=("folder to exist",))


def test_default_names_are_made_of_the_inputs(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = models.convert(DENSE, *UNIFORM)
    succeed("strip", whole)
    succeed("extract", whole)
    succeed("graft", "--no-check", "model-no-mtp.gguf", "--from", "mtp-model.gguf")
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"model-no-mtp.gguf", "mtp-model.gguf", "model-no-mtp-MTP.gguf"}
    assert (tmp_path / "model-no-mtp-MTP.gguf").read_bytes() == whole.read_bytes()


def test_every_spec_with_a_head_is_covered_or_a_variant() -> None:
    """A new kind of checkpoint shows up here, to be put into COVERED or named as a variant."""
    variants = {"dense-deep", "dense-f16", "dense-f32", "dense-fp8", "moe-fp8"}
    variants |= {"dense-no-mtp", "Qwen3.5-1.5M-Chat-v1.1", "next-fused", "next-fp8"}
    variants |= {spec.name for spec in SPECS.values() if spec.layout}
    assert {spec.name for spec in COVERED} | variants == set(SPECS)
