"""Quantized checkpoints: refusals, and heads taken from or given to them.

The goldens (`quantized-*`) show that the supported ones give upstream's bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.convert.checkpoints.checkpoint import PlacedTensor, Quantization
from mtp_gguf.convert.checkpoints.quantized import SCHEMES, wants_16_bit_inputs
from mtp_gguf.convert.checkpoints.ways_out import WAYS
from mtp_gguf.convert.checkpoints.weights import Nvfp4Weight, ScaledWeight, nvfp4_group_order
from mtp_gguf.gguf_tools.files.safetensors import StoredTensor
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.gguf_tools.hub.sources import FileSource
from support.checkpoint_edits import edit_json, edit_tensors, read_tensors
from support.checkpoints import Array, Spec, write_safetensors
from support.commands import check_refusal, invoke, succeed
from support.conversions import converted, refuse
from support.gguf_files import differing, loads, tensors_of, value_of
from support.models import Models
from support.quantized_layouts import LAYOUTS

# All rows are multiples of every group.
BASE = Spec("base", layers=2, interval=2, kv_heads=1, v_heads=6, linear_dim=32)
WEIGHT = "model.layers.0.mlp.down_proj"
# A mix that does not depend on the number of layers, which a graft does not change afterwards.
UNIFORM = ("--quant", "Q8_0")


def quantized(layout: str, **changes: Any) -> Spec:
    return replace(BASE, name=layout, layout=layout, **changes)


def as_other_scheme(folder: Path, method: str) -> Path:
    """A checkpoint whose trunk is in 4 bits, of which the config says that `method` made it."""
    edit_json(
        folder / "config.json", lambda c: c.update(quantization_config={"quant_method": method})
    )
    return folder


REFUSED = [scheme for scheme in SCHEMES if scheme.reader is None and not scheme.formats]
CARD = "---\nbase_model: example/Tiny\n---\n"


def names_the_original(model: Path, output: Path, *words: str) -> None:
    """Refused with the command that converts the original, by the model card if that says it."""
    refuse(model, output, *words, "mtp-gguf convert OWNER/NAME")
    (model / "README.md").write_text(CARD)
    command = "mtp-gguf convert example/Tiny"
    message = refuse(model, output, *words, f"(example/Tiny, by its model card): {command}")
    config = json.loads((model / "config.json").read_text())["quantization_config"]
    assert message.rstrip().endswith(WAYS.get(config["quant_method"]) or command)


@pytest.mark.parametrize("scheme", REFUSED, ids=lambda scheme: scheme.method)
def test_other_schemes_are_refused_by_name(
    scheme: Any, models: Models, tmp_path: Path, output: Path
) -> None:
    """Before shapes are looked at, and with the checkpoint that its card says it was made of."""
    model = as_other_scheme(models.copy(quantized("gptq-4"), tmp_path), scheme.method)
    edit_json(model / "config.json", lambda c: c.update(hidden_size=64))
    name = f"found {scheme.name};"
    names_the_original(model, output, "quantization_config", name)
    listed = invoke("list-tensors", model)
    assert listed.exit_code == 0
    assert listed.output.splitlines()[-1].startswith("cannot be converted: ")
    assert "can be taken from it" in listed.output
    for said in (listed.output, " ".join(invoke("doctor", model).output.split())):
        assert name in said
        assert "16-bit checkpoint (example/Tiny" in said


def test_each_scheme_has_its_line() -> None:
    assert {scheme.method for scheme in SCHEMES} - set(WAYS) == {"fp8"}  # all of it is read


VARIANTS: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("gptq-4", {"quant_method": scheme.method, "format": scheme.formats[0]}, scheme.name)
        for scheme in SCHEMES
        if scheme.reader is None and scheme.formats
    ),
    ("gptq-4", {"quant_method": "novel"}, "novel"),
    ("gptq-4", {"quant_method": None}, "quant_method None"),
    ("gptq-4", {"bits": 3}, "GPTQ in 3 bits"),
    ("gptq-4", {"bits": "4"}, "GPTQ in '4' bits"),
    ("gptq-4", {"checkpoint_format": "marlin"}, "the layout 'marlin'"),
    ("compressed-int8", {"format": "marlin-24"}, "compressed-tensors: marlin-24"),
    ("compressed-int8", {"format": None}, "compressed-tensors: no format"),
    ("compressed-int8", {"config_groups": {}}, "0 groups"),
    ("compressed-int8", {"config_groups": {"a": {}}}, "an object under weights"),
    ("compressed-int8", {"config_groups": {"a": {}, "b": {}}}, "2 groups"),
    ("compressed-int8", {"sparsity_config": {"format": "sparse-24"}}, "sparse ('sparse-24')"),
    ("compressed-int8", {"transform_config": {"config_groups": {"u": 1}}}, "transforms"),
    ("compressed-fp8", {"format": "mixed-precision"}, "several kinds"),
    ("modelopt-fp8", {"quant_algo": "INT4_AWQ"}, "ModelOpt: int4_awq"),
]
# The same with the settings for weights of its only group.
GROUPS: list[tuple[str, dict[str, Any], str]] = [
    ("compressed-w4a16", {"num_bits": 16}, "num_bits"),
    ("compressed-w4a16", {"group_size": 0}, "group_size"),
    ("compressed-w4a16", {"strategy": "block"}, "strategy 'block'"),
    ("compressed-w4a16", {"actorder": "group"}, "actorder"),
    ("compressed-int8", {"symmetric": False}, "with zero points"),
    ("compressed-int8", {"strategy": "token"}, "strategy 'token'"),
]


def weights_of(config: dict[str, Any]) -> Any:
    return config["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(("layout", "change", "word"), [*VARIANTS, *GROUPS])
def test_variants_that_are_not_converted(
    layout: str, change: dict[str, Any], word: str, models: Models, tmp_path: Path, output: Path
) -> None:
    model = models.copy(quantized(layout), tmp_path)

    def edit(config: dict[str, Any]) -> None:
        settings = config["quantization_config"]
        of_a_group = (layout, change, word) in GROUPS
        (weights_of(settings) if of_a_group else settings).update(change)

    edit_json(model / "config.json", edit)
    names_the_original(model, output, word)


Edit = Callable[[Path], object]


def in_group(**changes: object) -> Edit:
    """Change the settings for weights of the only group."""
    return lambda model: edit_json(
        model / "config.json", lambda c: weights_of(c["quantization_config"]).update(changes)
    )


def part(suffix: str, value: Callable[[Array], Array] | None) -> Edit:
    """Change a part of a quantized matrix, or leave it out."""

    def edit(tensors: dict[str, Array]) -> None:
        array = tensors.pop(f"{WEIGHT}.{suffix}")
        if value is not None:
            tensors[f"{WEIGHT}.{suffix}"] = value(array)

    return lambda model: edit_tensors(model, edit)


def shorter(array: Array) -> Array:
    return array[:-1]


def wider(array: Array) -> Array:
    return array.astype(np.int64)


ALL = (None, shorter, wider)
DAMAGED: tuple[tuple[str, str, tuple[Callable[[Array], Array] | None, ...]], ...] = (
    ("fp8-tensor", "weight weight_scale_inv", (None,)),
    ("modelopt-fp8", "weight_scale", (wider,)),
    ("compressed-fp8", "weight_scale", (shorter,)),
    ("gptq-4", "qweight qzeros scales g_idx", ALL),
    ("compressed-w4a16", "weight_packed weight_scale weight_shape", (None, shorter)),
    ("compressed-w4a16-asymmetric", "weight_zero_point", (shorter, wider)),
    ("modelopt-nvfp4", "weight_scale", ALL),
    ("compressed-nvfp4", "weight_packed weight_scale", ALL),
)


@pytest.mark.parametrize(
    ("layout", "edit", "said"),
    [
        *(
            pytest.param(layout, part(suffix, damage), WEIGHT, id=f"{layout}-{suffix}-{i}")
            for layout, suffixes, damages in DAMAGED
            for suffix in suffixes.split()
            for i, damage in enumerate(damages)
        ),
        ("gptq-4", part("g_idx", lambda a: a + np.int32(4)), f"{WEIGHT} … g_idx below 4"),
        ("gptq-4", part("g_idx", lambda a: a - np.int32(1)), f"{WEIGHT} … g_idx below 4"),
        (
            *("compressed-w4a16", part("weight_shape", lambda a: a[::-1] + 1)),
            f"{WEIGHT} … shape [256, 256] … 257",
        ),
        (
            *("modelopt-nvfp4", part("weight_scale", lambda a: np.full_like(a, np.nan))),
            f"{WEIGHT} … NaN",
        ),
        (
            *("compressed-nvfp4", part("weight_global_scale", lambda a: a * 0)),
            f"{WEIGHT} … finite … inf",
        ),
        (
            *("modelopt-nvfp4", part("weight_scale_2", lambda a: np.array([a, a]))),
            f"{WEIGHT} … one value",
        ),
        (
            *("fp8-tensor", part("weight_scale_inv", lambda _: np.ones((256, 256), np.float32))),
            f"{WEIGHT} … expected shape [256, 1] … found [256, 256]",
        ),
        ("compressed-w4a16", in_group(num_bits=1), "num_bits … 2 to 8"),
        ("compressed-w4a16", in_group(group_size=-1), "group_size … from 1"),
        ("compressed-w4a16", in_group(group_size=32), "expected shape [320, 256] … [320, 128]"),
        (
            *("compressed-fp8", in_group(strategy="block", block_structure="128x128")),
            "block_structure … [rows, columns]",
        ),
    ],
)
def test_weights_that_contradict_the_config(
    layout: str, edit: Edit, said: str, models: Models, tmp_path: Path, output: Path
) -> None:
    model = models.copy(quantized(layout), tmp_path)
    edit(model)
    refuse(model, output, *said.split(" … "))


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_do_not_show(
    layout: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows read in slices that no group and no word divides are the rows read at once."""
    model = models.checkpoint(quantized(layout))
    whole = converted(model, tmp_path / "whole.gguf", "--quant", "F32")
    monkeypatch.setattr("mtp_gguf.convert.pipeline._SLICE_VALUES", 256 * 37)
    assert not differing(whole, converted(model, tmp_path / "sliced.gguf", "--quant", "F32"))


# ------------------------------------------------------------------------------- donors


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("base_layout", "layout"),
    [
        *(("", layout) for layout in ("fp8-tensor", "compressed-w4a16-asymmetric", "gptq-8-v2")),
        ("", "modelopt-nvfp4"),
        ("compressed-w4a16", ""),
        ("compressed-w4a16", "compressed-fp8"),
    ],
)
def test_heads_from_checkpoints_of_any_kind(
    base_layout: str, layout: str, models: Models, tmp_path: Path
) -> None:
    """`--from` and `graft` take the same head, whatever either side is quantized by."""
    base = models.checkpoint(replace(BASE, name=base_layout or "plain", layout=base_layout))
    donor = models.checkpoint(replace(BASE, name=f"donor-{layout}", layout=layout, seed=2))
    joined = converted(base, tmp_path / "joined.gguf", *UNIFORM, "--mtp-f16", "--from", donor)
    converted(base, tmp_path / "trunk.gguf", *UNIFORM, "--no-mtp")
    out = tmp_path / "grafted.gguf"
    result = invoke(
        *("graft", tmp_path / "trunk.gguf", "--from", donor, "--mtp-f16", "-o", out, "--no-check")
    )
    assert result.exit_code == 0, result.output
    assert out.read_bytes() == (tmp_path / "joined.gguf").read_bytes()
    own = converted(donor, tmp_path / "own.gguf", "--mtp-f16")
    head = {name: t for name, t in own.items() if name.startswith("blk.2.")}
    assert not differing(head, {n: t for n, t in joined.items() if n in head})
    assert loads(out)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["awq", "no embeddings", "resized", "no tokenizer"])
def test_donors_of_which_only_the_head_is_sound(kind: str, models: Models, tmp_path: Path) -> None:
    vocab = 1088 if kind == "resized" else 1024
    spec = replace(BASE, name=f"lender-{vocab}", layout="gptq-4", seed=2, vocab_size=vocab)
    donor = models.copy(spec, tmp_path)
    if kind == "awq":
        as_other_scheme(donor, "awq")
    if kind in ("no embeddings", "no tokenizer"):
        shared = ("model.", "lm_head.")
        edit_tensors(donor, lambda t: [t.pop(name) for name in list(t) if name.startswith(shared)])
    if kind == "no tokenizer":
        (donor / "tokenizer.json").unlink()
    base = models.checkpoint(BASE)
    converted(base, tmp_path / "joined.gguf", *UNIFORM, "--from", donor)
    converted(base, tmp_path / "trunk.gguf", *UNIFORM, "--no-mtp")
    out = tmp_path / "out.gguf"
    succeed("graft", tmp_path / "trunk.gguf", "--from", donor, "-o", out, "--no-check")
    assert out.read_bytes() == (tmp_path / "joined.gguf").read_bytes()
    trunk = tmp_path / "trunk16.gguf"
    converted(base, trunk, "--no-mtp", "--quant", "BF16")
    again = converted(trunk, tmp_path / "again.gguf", *UNIFORM, "--from", donor)
    assert not differing(again, tensors_of(tmp_path / "joined.gguf"))


def test_a_quantized_head_of_another_scheme_lends_nothing(
    models: Models, tmp_path: Path, output: Path
) -> None:
    donor = models.copy(quantized("gptq-8-v2"), tmp_path)
    as_other_scheme(donor, "awq")
    refuse(models.checkpoint(BASE), output, "found AWQ;", options=("--from", donor))
    trunk = tmp_path / "trunk.gguf"
    converted(models.checkpoint(BASE), trunk, "--no-mtp")
    result = invoke("graft", trunk, "--from", donor, "-o", output / "x.gguf")
    check_refusal(result.exit_code, result.stderr, "found AWQ;")


@pytest.mark.parametrize("indexed", [False, True])
def test_a_head_in_a_file_of_its_own(indexed: bool, models: Models, tmp_path: Path) -> None:
    """`mtp.safetensors` beside `model.safetensors` counts, unless an index leaves it out."""
    model = models.copy(BASE, tmp_path)
    tensors = read_tensors(model / "model.safetensors")
    head = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    write_safetensors(model / "model.safetensors", tensors)
    write_safetensors(model / "mtp.safetensors", head)
    (model / "training_args.safetensors").write_bytes(b"no part of the model")
    if indexed:
        weight_map = dict.fromkeys(tensors, "model.safetensors")
        (model / "model.safetensors.index.json").write_text("{}")
        edit_json(model / "model.safetensors.index.json", lambda i: i.update(weight_map=weight_map))
    listed = invoke("list-tensors", model).output
    told = invoke("doctor", model)
    converts = invoke("convert", model, "-o", tmp_path / "out.gguf", "--quant", "F16")
    if indexed:
        assert "cannot draft" in listed
        assert told.exit_code == converts.exit_code == 1
        return
    assert "can draft once converted: 15 mtp.* tensors" in listed
    assert told.exit_code == converts.exit_code == 0, converts.output
    whole = converted(models.checkpoint(BASE), tmp_path / "whole.gguf", "--quant", "F16")
    assert not differing(whole, converted(model, tmp_path / "again.gguf", "--quant", "F16"))


# -------------------------------------------------------------------------------- NVFP4

MIXTURE = replace(BASE, name="mixture", v_heads=4, linear_dim=64, experts=4, fused_experts=False)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["modelopt-nvfp4", "compressed-nvfp4"])
@pytest.mark.parametrize("spec", [BASE, MIXTURE], ids=["dense", "moe"])
def test_nvfp4_stays_and_is_compared_with_its_scales(
    layout: str, spec: Spec, models: Models, tmp_path: Path
) -> None:
    """In every mix; llama.cpp loads the file, and its numbers are those of the checkpoint."""
    model = models.checkpoint(replace(spec, name=f"{spec.name}-{layout}", layout=layout))
    out = tmp_path / "out.gguf"
    tensors = converted(model, out, "--quant", "Q4_K_M", "--mtp-f16")
    kept = {name for name, t in tensors.items() if t.tensor_type == BY_NAME["NVFP4"].id}
    assert kept
    assert not any(name.startswith("blk.2.") for name in kept)
    assert {name.removesuffix("weight") + "scale" for name in kept} <= set(tensors)
    assert value_of(out, "general.file_type") == 15
    assert loads(out)
    succeed("compare", out, model, "--json")
    damaged = tmp_path / "damaged.gguf"
    data = bytearray(out.read_bytes())
    name = sorted(kept)[0].removesuffix("weight") + "scale"
    data[tensors[name].data_offset + 3] ^= 1
    damaged.write_bytes(data)
    for other in (out, model):
        result = invoke("compare", damaged, other)
        assert result.exit_code == 1, result.output
        assert sorted(kept)[0] in result.output.splitlines()[0]


def test_nvfp4_compares_with_another_type(models: Models, tmp_path: Path) -> None:
    """The tensors of scales are no tensors that the other file lacks."""
    for layout, file in (("compressed-nvfp4", "a.gguf"), ("", "b.gguf")):
        model = models.checkpoint(replace(BASE, name=f"as-{layout}", layout=layout))
        converted(model, tmp_path / file, "--quant", "Q8_0")
    assert "only in" not in succeed("compare", tmp_path / "a.gguf", tmp_path / "b.gguf")


def test_nvfp4_of_other_sizes_is_dequantized(models: Models, tmp_path: Path) -> None:
    """Rows that blocks of 64 do not divide take the mix; upstream's converter fails on them."""
    spec = replace(quantized("compressed-nvfp4", intermediate=288), name="narrow")
    tensors = converted(models.checkpoint(spec), tmp_path / "out.gguf", "--quant", "F16")
    down, up = (tensors[f"blk.0.ffn_{part}.weight"] for part in ("down", "up"))
    assert down.tensor_type.name == "F16"
    assert up.tensor_type.name == "NVFP4"


@pytest.mark.parametrize("start", [8, 16])
def test_columns_that_share_a_scale_stay_together(start: int) -> None:
    """Groups of 16 may change places; runs of 16 that begin inside a group may not."""
    columns = np.arange(start, start + 48)
    if start % 16:
        with pytest.raises(ValueError, match="not neighbours"):
            nvfp4_group_order(columns)
    else:
        order = nvfp4_group_order(columns)
        assert order is not None
        assert order.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("model.layers.0.mlp.up_proj", True), ("model.layers.0", True), ("model.layers.1", False)],
)
def test_modelopt_lists_a_module_or_one_around_it(
    listed: str, expected: bool, tmp_path: Path
) -> None:
    (tmp_path / "x").touch()
    config = {"quant_algo": "NVFP4", "quantized_layers": {listed: {"quant_algo": "W4A16_NVFP4"}}}
    name = "model.layers.0.mlp.up_proj.weight"
    stored = StoredTensor(name, "U8", (1, 8), 0, 8)
    source = FileSource(tmp_path / "x")
    values = PlacedTensor(stored, source, Quantization("config.json", config))
    weight = Nvfp4Weight(name, values, values, None, None, inverted=False)
    assert wants_16_bit_inputs(weight) is expected
    source.close()


def test_blocks_of_a_stack_begin_anew_in_each_matrix(tmp_path: Path) -> None:
    """Two experts of three rows in blocks of two: the last block of each has one row."""
    values = np.arange(1, 25, dtype=np.int8).reshape(2, 3, 4)
    scales = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], np.float32)
    (tmp_path / "x").write_bytes(scales.tobytes() + values.tobytes())
    source = FileSource(tmp_path / "x")
    weight = ScaledWeight(
        "w",
        PlacedTensor(StoredTensor("w", "I8", (2, 3, 4), 32, 24), source),
        PlacedTensor(StoredTensor("s", "F32", (2, 2, 2), 0, 32), source),
        "s",
        (2, 2),
    )
    weight.check()
    expected = values * scales.repeat(2, axis=1)[:, :3].repeat(2, axis=2)
    for start, stop in ((0, 6), (2, 5)):
        assert np.array_equal(weight.rows(start, stop), expected.reshape(6, 4)[start:stop])
    source.close()
