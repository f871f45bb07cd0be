"""Every refusal of a checkpoint's format names what to convert instead, with the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.convert.checkpoints.quantized import SCHEMES
from mtp_gguf.convert.checkpoints.ways_out import WAYS
from support.checkpoint_edits import edit_header, edit_json
from support.checkpoints import TINY, Spec
from support.conversions import refuse
from support.models import Models

# All rows are multiples of every group.
BASE = Spec("base", layers=2, interval=2, kv_heads=1, v_heads=6, linear_dim=32)
COMMAND = re.compile(
    r"mtp-gguf convert example/Tiny|mtp-gguf convert OWNER/NAME|python -c \"from \w+ import |"
    r"python \S+zero_to_fp32\.py |accelerate merge-weights |mv \S+model\.pt \S+pytorch_model\.bin"
)
CARD = "---\nbase_model: example/Tiny\n---\n"
ANY = "mtp-gguf convert example/Tiny"

# Layouts of support/quantized_layouts.py with a quantization_config that is not read.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{scheme.method} {' '.join(scheme.formats)}".strip(): (
            "gptq-4",
            {"quant_method": scheme.method, "format": (*scheme.formats, None)[0]},
        )
        for scheme in SCHEMES
        if scheme.reader is None
    },
    "an unknown method": ("gptq-4", {"quant_method": "novel"}),
    "a method of null": ("gptq-4", {"quant_method": None}),
    "GPTQ in 3 bits": ("gptq-4", {"bits": 3}),
    "GPTQ in another layout": ("gptq-4", {"checkpoint_format": "marlin"}),
    "another format": ("compressed-int8", {"format": "marlin-24"}),
    "no format": ("compressed-int8", {"format": None}),
    "no groups": ("compressed-int8", {"config_groups": {}}),
    "groups of nothing": ("compressed-int8", {"config_groups": {"a": {}}}),
    "two groups": ("compressed-int8", {"config_groups": {"a": {}, "b": {}}}),
    "sparse": ("compressed-int8", {"sparsity_config": {"format": "sparse-24"}}),
    "transforms": ("compressed-int8", {"transform_config": {"config_groups": {"u": 1}}}),
    "several kinds": ("compressed-fp8", {"format": "mixed-precision"}),
    "ModelOpt's AWQ": ("modelopt-fp8", {"quant_algo": "INT4_AWQ"}),
}
# The same with the settings for weights of its only group.
GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "16 bits": ("compressed-w4a16", {"num_bits": 16}),
    "groups of 0": ("compressed-w4a16", {"group_size": 0}),
    "blocks": ("compressed-w4a16", {"strategy": "block"}),
    "an order of activations": ("compressed-w4a16", {"actorder": "group"}),
    "zero points": ("compressed-int8", {"symmetric": False}),
    "a scale for each token": ("compressed-int8", {"strategy": "token"}),
}


def configured(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda model: edit_json(
        model / "config.json", lambda config: change(config["quantization_config"])
    )


@pytest.mark.parametrize("name", [*CONFIGS, *GROUPS])
def test_of_a_quantization(name: str, models: Models, tmp_path: Path, output: Path) -> None:
    layout, change = (CONFIGS | GROUPS)[name]
    model = models.copy(replace(BASE, name=layout, layout=layout), tmp_path)

    def update(config: dict[str, Any]) -> None:
        if name in GROUPS:
            (config,) = (group["weights"] for group in config["config_groups"].values())
        config.update(change)

    configured(update)(model)
    assert "mtp-gguf convert OWNER/NAME" in refuse(model, output)
    (model / "README.md").write_text(CARD)
    message = refuse(model, output)
    assert f"(example/Tiny, by its model card): {ANY}" in message
    other = WAYS.get(
        json.loads((model / "config.json").read_text())["quantization_config"]["quant_method"]
    )
    assert message.rstrip().endswith(other or ANY)


def test_each_scheme_has_its_line() -> None:
    assert {scheme.method for scheme in SCHEMES} - set(WAYS) == {"fp8"}  # all of it is read


def remove_weights(model: Path) -> None:
    for path in model.glob("*.safetensors*"):
        path.unlink()


def only(*names: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        remove_weights(model)
        for name in names:
            (model / name).parent.mkdir(exist_ok=True)
            (model / name).write_bytes(b"")

    return change


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "of MLX": lambda model: edit_header(
        model / "model.safetensors",
        lambda header: header.update({"__metadata__": {"format": "mlx"}}),
    ),
    "of a quantization that is a text": lambda model: edit_json(
        model / "config.json", lambda config: config.update(quantization_config="int4")
    ),
    "with an adapter": lambda model: (model / "adapter_config.json").write_text("{}"),
    "of an adapter": lambda model: (model / "config.json").rename(model / "adapter_config.json"),
    "of an adapter's weights": only("adapter_model.safetensors"),
    "of HQQ": only("qmodel.pt"),
    "of DeepSpeed": only("global_step1/mp_rank_00_model_states.pt"),
    "of PyTorch's shards": only("step1/__0_0.distcp"),
    "of another name": only("model.pt"),
    "of TensorFlow": only("tf_model.h5"),
    "of Flax": only("flax_model.msgpack"),
    "of ONNX": only("model.onnx"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_of_a_folder(name: str, models: Models, tmp_path: Path, output: Path) -> None:
    model = models.copy(TINY, tmp_path)
    FOLDERS[name](model)
    message = refuse(model, output)
    assert COMMAND.search(message), message
