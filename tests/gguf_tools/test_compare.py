"""`compare` finds differences, measures them, and distinguishes rounding from damage."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mtp_gguf.gguf_tools.compare import explained_difference, explained_error
from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import TensorCopy
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.gguf_tools.model import Metadata
from mtp_gguf.quantize import ggml
from support.checkpoint_edits import edit_tensors
from support.checkpoints import COVERED, DENSE, MOE, SPECS, Spec
from support.commands import check_refusal, invoke, refused
from support.gguf_files import edited, renumber
from support.models import Models

UNIFORM = ("--quant", "Q8_0")
F32_FILE = ("--quant", "F32", "--mtp-type", "F32")


def compare(first: Path, second: Path, *options: object, code: int) -> dict[str, Any]:
    """The output of `compare --json`, by tensor and by key."""
    result = invoke("compare", first, second, "--json", *options)
    assert result.exit_code == code, result.output
    fields = json.loads(result.stdout)
    order = [d["error"] for d in fields["tensors"] if d["error"] is not None]
    assert order == sorted(order, reverse=True)
    return {
        "tensors": {d["name"]: d for d in fields["tensors"]},
        "metadata": {d["key"]: d["values"] for d in fields["metadata"]},
    }


def changed(source: Path, target: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """A copy of a file with `change` applied to the rows of the F32 tensor `name`."""
    return edited(source, target, tensors=renumber(f"^{name}$", change))


QUANTIZED = [name for name, kind in BY_NAME.items() if kind.is_quantized]
# ggml takes up to a minute to build the tables with which it quantizes to these.
SLOW_TABLES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S")


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_decode_as_the_gguf_package_has_them(name: str) -> None:
    kind = BY_NAME[name]
    blocks = np.random.default_rng(1).integers(0, 256, (50, kind.block_bytes), np.uint8)
    try:
        with np.errstate(all="ignore"):
            theirs = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    except (NotImplementedError, KeyError):
        pytest.skip("the gguf package does not decode this type")
    ours = ggml.dequantize(kind, blocks.tobytes())
    same = (ours == theirs.reshape(-1)) | ~np.isfinite(ours)
    assert same.mean() > 0.99  # NaN scales
    assert np.isfinite(ours).any()


@pytest.mark.parametrize("name", [n for n in QUANTIZED if n not in SLOW_TABLES])
@pytest.mark.parametrize("tails", [1, 3])
def test_rounding_is_told_from_damage(name: str, tails: int) -> None:
    """The error of ggml's quantizers on normal and heavy-tailed rows is just below the bound."""
    kind = BY_NAME[name]
    rows = (np.random.default_rng(1).standard_normal((8, 512)) ** tails).astype(np.float32)
    try:
        blocks = ggml.quantize(kind, rows, np.ones(512, np.float32))
    except ggml.GgmlError:
        pytest.skip("ggml does not write this type")
    values = ggml.dequantize(kind, blocks.tobytes()).reshape(rows.shape)
    error = math.sqrt(((values - rows) ** 2).sum() / (rows**2).sum())
    bound = explained_error((name, None), (False, False))
    assert bound / 20 < error < bound


@pytest.mark.parametrize(
    "name", ["Q3_K", "Q4_K", "Q6_K", "Q8_0", "Q4_0", "IQ4_NL", "IQ4_XS", "F16"]
)
def test_rounding_of_tiny_values(name: str) -> None:
    """Also for tiny weights: scales are F16, which underflows below 6e-8."""
    kind = BY_NAME[name]
    rng = np.random.default_rng(3)
    for exponent in range(-9, 1):
        rows = (rng.standard_normal((16, 1024)) * 10.0**exponent).astype(np.float32)
        rounded = ggml.dequantize(kind, bytes(ggml.quantize(kind, rows))).reshape(rows.shape)
        size = np.sqrt(np.square(rows, dtype=np.float64).mean())
        apart = np.sqrt(np.square(rounded - rows, dtype=np.float64).mean())
        kinds, exact = ("BF16", name), (True, False)
        bound = explained_error(kinds, exact) * size + explained_difference(kinds, exact)
        assert apart <= bound, exponent


def test_a_conversion_of_tiny_weights(models: Models, tmp_path: Path) -> None:
    """The converter's own Q6_K of weights of 1e-4 is not damage; that of another tensor is."""
    folder = models.copy(DENSE, tmp_path)

    def shrink(tensors: dict[str, Any]) -> None:
        for name, values in tensors.items():
            if name.endswith("layers.0.mlp.gate_proj.weight"):
                scaled = values.astype(np.float32) * np.float32(2.0**-9)
                tensors[name] = scaled.astype(values.dtype)

    edit_tensors(folder, shrink)
    made = tmp_path / "made.gguf"
    assert invoke("convert", folder, "-o", made, "--quant", "Q6_K").exit_code == 0
    found = compare(made, folder, code=0)["tensors"]["blk.0.ffn_gate.weight"]
    assert found["outcome"] == "rounded"
    assert found["types"][0] == "Q6_K"
    plain = tmp_path / "plain.gguf"
    assert invoke("convert", models.checkpoint(DENSE), "-o", plain, *F32_FILE).exit_code == 0
    assert compare(made, plain, code=1)["tensors"]["blk.0.ffn_gate.weight"]["outcome"] == "damaged"


def test_data_that_cannot_be_decoded() -> None:
    for name, data in (("Q8_0", b"x" * 33), ("I64", b"x" * 8)):
        with pytest.raises(ggml.GgmlError):
            ggml.dequantize(BY_NAME[name], data)


def test_errors_are_those_of_numpy(models: Models) -> None:
    a, b = models.convert(DENSE, *UNIFORM), models.convert(DENSE, "--quant", "Q6_K")
    found = compare(a, b, code=0)["tensors"]
    name = "blk.0.ffn_gate.weight"
    tensors = [{t.name: t for t in gguf.GGUFReader(p).tensors}[name] for p in (a, b)]
    x, y = (gguf.dequantize(t.data, t.tensor_type).astype(np.float64) for t in tensors)
    want = math.sqrt(((x - y) ** 2).sum() / (y**2).sum())
    assert found[name]["error"] == pytest.approx(want, rel=1e-5)
    assert found[name]["largest"] == pytest.approx(np.abs(x - y).max(), rel=1e-6)
    assert found[name]["types"] == ["Q8_0", "Q6_K"]


def test_slices_add_up(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = models.convert(MOE, *UNIFORM), models.convert(MOE, "--quant", "Q6_K")
    whole = compare(a, b, code=0)["tensors"]
    monkeypatch.setattr("mtp_gguf.gguf_tools.compare._SLICE_VALUES", 1000)
    for name, found in compare(a, b, code=0)["tensors"].items():
        assert found["outcome"] == whole[name]["outcome"]
        assert found["error"] == pytest.approx(whole[name]["error"], rel=1e-5)


def test_equal_slices_count_too(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row in 256 that is 10 % off gives an error of about 0.1 / 16, whatever the slices."""
    monkeypatch.setattr("mtp_gguf.gguf_tools.compare._SLICE_VALUES", 1000)
    name = "blk.3.attn_output.weight"

    def change(w: Any) -> Any:
        return w * np.where(np.arange(len(w)) == 7, 1.1, 1)[:, None]

    whole = models.convert(DENSE, *F32_FILE)
    found = compare(changed(whole, tmp_path / "b.gguf", name, change), whole, code=1)["tensors"]
    assert found[name]["error"] == pytest.approx(0.1 / 16, rel=0.5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("spec", [*COVERED, SPECS["dense-fp8"], SPECS["dense-f16"]], ids=str)
def test_a_sound_conversion(spec: Spec, models: Models) -> None:
    """At F32 no value differs; at mixed precision the differences are explained by rounding."""
    folder = models.checkpoint(spec)
    exact = compare(models.convert(spec, *F32_FILE), folder, code=0)
    assert {d["outcome"] for d in exact["tensors"].values()} == {"same"}
    assert exact["metadata"] == {}
    mixed = compare(models.convert(spec), folder, code=0)
    outcomes = {d["outcome"] for d in mixed["tensors"].values()}
    assert outcomes == {"same", "rounded"}
    assert mixed["metadata"] == {}


@pytest.mark.parametrize("part", ["--no-mtp", "--head-only", "table", "sidecar"])
def test_parts_of_a_model(part: str, models: Models) -> None:
    options: tuple[str, ...] = (part,)
    if not part.startswith("-"):
        options = ("--fastmtp", "100", "--fastmtp-layout", part)
    compare(models.convert(DENSE, *UNIFORM, *options), models.checkpoint(DENSE), code=0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("blk.4.nextn.enorm.weight", lambda w: w - 1),  # never raised by 1
        ("blk.4.attn_norm.weight", lambda w: w + 1),  # twice
        ("blk.4.nextn.eh_proj.weight", lambda w: np.roll(w, 256, axis=1)),  # halves swapped
        ("blk.0.ssm_a", lambda w: np.log(-w)),  # the decay as it is stored
        ("blk.0.attn_gate.weight", lambda w: w[::-1]),  # value heads in another order
        ("blk.3.attn_q.weight", lambda w: w * np.float32(1.01)),
    ],
)
def test_a_wrong_transform_is_found(
    name: str, change: Callable[[Any], Any], models: Models, tmp_path: Path
) -> None:
    broken = changed(models.convert(DENSE, *F32_FILE), tmp_path / "b.gguf", name, change)
    found = compare(broken, models.checkpoint(DENSE), code=1)["tensors"]
    assert {n for n, d in found.items() if d["outcome"] != "same"} == {name}
    assert found[name]["outcome"] == "damaged"


def test_values_that_are_not_numbers(models: Models, tmp_path: Path) -> None:
    name = "blk.4.nextn.enorm.weight"

    def spoil(w: Any) -> Any:
        return np.concatenate([[np.nan, np.inf], w[2:]])

    broken = changed(models.convert(DENSE, *F32_FILE), tmp_path / "b.gguf", name, spoil)
    for other in (models.checkpoint(DENSE), models.convert(DENSE, *F32_FILE)):
        found = compare(broken, other, code=1)["tensors"][name]
        assert found["outcome"] == "damaged"
        assert found["note"] == "2 values are not finite"


def test_values_too_large_for_their_squares(models: Models, tmp_path: Path) -> None:
    name = "blk.4.nextn.enorm.weight"
    whole = models.convert(DENSE, *F32_FILE)
    large = changed(whole, tmp_path / "a.gguf", name, lambda w: w * np.float32(1e30))
    other = changed(whole, tmp_path / "b.gguf", name, lambda w: w * np.float32(1.1e30))
    assert compare(other, large, code=1)["tensors"][name]["error"] == pytest.approx(0.1, rel=1e-4)


def test_missing_tensors_shapes_and_keys(models: Models, tmp_path: Path) -> None:
    def rearrange(tensors: dict[str, TensorCopy]) -> None:
        del tensors["blk.1.ssm_a"]
        tensor = tensors["blk.4.attn_k.weight"]
        spec = dataclasses.replace(tensor.spec, shape=(128, 256))
        tensors["blk.4.attn_k.weight"] = dataclasses.replace(tensor, spec=spec)
        tensors["new"] = dataclasses.replace(
            tensors["output_norm.weight"],
            spec=dataclasses.replace(tensors["output_norm.weight"].spec, name="new"),
        )

    def rename(keys: Metadata) -> None:
        del keys["general.sampling.top_k"]
        keys["qwen35.context_length"] = Value(ValueType.U32, 7)
        keys["new.key"] = Value(ValueType.BOOL, True)
        tokens = [f"t{i}" for i in range(1024)]
        keys["tokenizer.ggml.tokens"] = Value(ValueType.STRING, tokens)

    whole = models.convert(DENSE, *UNIFORM)
    broken = edited(whole, tmp_path / "b.gguf", metadata=rename, tensors=rearrange)
    found = compare(broken, whole, code=1)
    outcomes = {n: d["outcome"] for n, d in found["tensors"].items() if d["outcome"] != "same"}
    assert outcomes == {
        "blk.1.ssm_a": "only in OTHER",
        "new": "only in MODEL",
        "blk.4.attn_k.weight": "other shape",
    }
    assert found["metadata"].keys() == {
        "general.sampling.top_k",
        "qwen35.context_length",
        "new.key",
        "tokenizer.ggml.tokens",
    }
    assert found["metadata"]["qwen35.context_length"] == ["7", "262144"]
    assert found["metadata"]["new.key"] == ["True", None]
    assert found["metadata"]["tokenizer.ggml.tokens"][0] == "1024 entries, [0] = 't0'"
    result = invoke("compare", broken, whole)
    assert "context_length: 7 / 262144" in result.output
    assert "1 only in OTHER" in result.output


@pytest.mark.parametrize("options", [(), ("--split-max-size", "1M")])
def test_the_same_model(options: tuple[str, ...], models: Models) -> None:
    files = models.convert(DENSE, *UNIFORM, *options), models.convert(DENSE, *UNIFORM)
    found = compare(*files, code=0)
    assert {d["outcome"] for d in found["tensors"].values()} == {"same"}
    assert found["metadata"] == {}
    assert "70 tensors: 70 same" in invoke("compare", *files).output


def test_integers_are_compared(models: Models, tmp_path: Path) -> None:
    options = (*UNIFORM, "--fastmtp", "100", "--fastmtp-layout", "table")
    table = models.convert(DENSE, *options)
    other = renumber("^d2t$", lambda ids: np.arange(len(ids)))
    made = edited(table, tmp_path / "b.gguf", tensors=other)
    found = compare(made, table, code=1)["tensors"]
    assert {n for n, d in found.items() if d["outcome"] != "same"} == {"d2t"}


def test_options(models: Models, tmp_path: Path) -> None:
    mixed, folder = models.convert(DENSE), models.checkpoint(DENSE)
    found = compare(mixed, folder, "--filter", "nextn", code=0)["tensors"]
    assert found.keys() == {
        f"blk.4.nextn.{n}.weight" for n in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    }
    compare(mixed, folder, "--max-error", "0.2", code=0)
    compare(mixed, folder, "--max-error", "0.01", code=1)
    short = invoke("compare", mixed, folder).output.splitlines()
    long = invoke("compare", mixed, folder, "--all").output.splitlines()
    assert len(short) < 25 < len(long)
    refused(tmp_path, "compare", mixed, folder, "--filter", "(", words=("(",), code=2)


def test_refusals(models: Models, tmp_path: Path) -> None:
    mixed = models.convert(DENSE)
    for arguments, words in (
        ((tmp_path / "absent.gguf", mixed), ("absent.gguf", "cannot be opened")),
        ((mixed, tmp_path / "absent.gguf"), ("absent.gguf", "cannot be opened")),
        ((mixed, tmp_path / "absent"), ("absent",)),
        ((mixed, models.checkpoint(DENSE) / "config.json"), ("config.json", "a GGUF file")),
    ):
        refused(tmp_path, "compare", *arguments, words=words)
    other = invoke("compare", mixed, models.checkpoint(MOE))
    assert other.exit_code == 1
    assert "only in OTHER" in other.output


def test_a_checkpoint_that_is_broken(models: Models, tmp_path: Path) -> None:
    folder = models.copy(DENSE, tmp_path)
    edit_tensors(folder, lambda t: t.pop("model.norm.weight"))
    result = invoke("compare", models.convert(DENSE), folder)
    check_refusal(result.exit_code, result.stderr, "model.norm.weight")
