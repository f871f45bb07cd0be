"""The general.* metadata: names, sizes and licence, by the rules of the gguf package."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any, cast

import gguf

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.format import RawValue, Value, ValueType

from .config import LARGEST_F32, LARGEST_SIZE, is_whole
from .json_files import read_json_object
from .recipe import Target

GENERATION_CONFIG = "generation_config.json"


def general_metadata(
    folder: Path, name: str | None, targets: Sequence[Target], file_type: int
) -> dict[str, Value]:
    """What identifies the model, from its card, its config and its folder's name.

    name: the model's name where the folder's is that of a commit (a cache of the hub).
    """
    logging.getLogger("gguf.metadata").setLevel(logging.ERROR)
    total, shared, expert, experts = _parameters(targets)
    penalty = _repetition_penalty(folder)
    try:
        held = _load(folder, name, total)
    except Exception as error:  # the YAML reader has exceptions of its own
        raise CheckpointError(
            f"{folder / 'README.md'}: this model card cannot be understood: "
            f"{' '.join(str(error).split())}; correct or remove it"
        ) from None
    held.name = held.name or name or folder.resolve().name
    if held.size_label is None and total:
        held.size_label = gguf.size_label(total, shared, expert, experts)
    if penalty is not None and held.sampling_penalty_repeat is None:
        held.sampling_penalty_repeat = penalty
    collector = gguf.GGUFWriter(path=None, arch="")
    held.set_gguf_meta_model(collector)
    keys = _collected(collector)
    _check_sampling(folder, keys)
    return {
        "general.type": Value(ValueType.STRING, "model"),
        **keys,
        "general.file_type": Value(ValueType.U32, file_type),
        "general.quantization_version": Value(ValueType.U32, gguf.GGML_QUANT_VERSION),
    }


def _load(folder: Path, name: str | None, total: int) -> gguf.Metadata:
    held = gguf.Metadata.load(None, folder, None, total)
    if name is not None:
        card, config = (
            gguf.Metadata.load_model_card(folder),
            gguf.Metadata.load_hf_parameters(folder),
        )
        named = gguf.Metadata.apply_metadata_heuristic(
            gguf.Metadata(), card, config, Path(name), total
        )
        for field in fields(named):  # defaults of the sampler do not depend on a name
            if not field.name.startswith("sampling_"):
                setattr(held, field.name, getattr(named, field.name))
    return held


def file_stem(metadata: Mapping[str, Value | RawValue], quant: str) -> str:
    """The file's name without suffix, as the naming convention of GGUF has it."""

    def text(key: str) -> str | None:
        value = metadata.get(f"general.{key}")
        return str(value.data) if isinstance(value, Value) else None

    stem = gguf.naming_convention(
        text("name"), text("basename"), text("finetune"), text("version"), text("size_label"), quant
    )
    # A model card may say anything, also what leads out of the folder.
    return re.sub(r"[^\w.+-]+", "-", stem).lstrip(".-") or "model"


def _repetition_penalty(folder: Path) -> Any:
    """What generation_config.json says; released versions of the gguf package overlook it."""
    path = folder / GENERATION_CONFIG
    return read_json_object(path).get("repetition_penalty") if path.is_file() else None


def _check_sampling(folder: Path, keys: dict[str, Value]) -> None:
    """Refuse defaults of the sampler that are no numbers, or that the types do not hold."""
    for key, value in keys.items():
        if not key.startswith("general.sampling.") or value.type is ValueType.STRING:
            continue
        data = value.data
        if value.type is ValueType.F32:
            number = is_whole(data) or isinstance(data, float)
            fits = number and -LARGEST_F32 <= cast(float, data) <= LARGEST_F32
        else:
            fits = is_whole(data) and -LARGEST_SIZE <= data <= LARGEST_SIZE
        if not fits:
            raise CheckpointError(
                f"{folder / GENERATION_CONFIG}: {key.removeprefix('general.sampling.')}: "
                f"expected {'a number' if value.type is ValueType.F32 else 'a whole number'}, "
                f"found {data!r:.60}"
            )


def _parameters(targets: Sequence[Target]) -> tuple[int, int, int, int]:
    """All weights, those outside experts, those of one expert each, experts per layer."""
    shared = expert = 0
    experts = 0
    for target in targets:
        size = prod(target.shape)
        if "_exps." in target.name:
            experts = target.shape[2]
            expert += size // experts
        else:
            shared += size
    total = sum(prod(t.shape) for t in targets)
    return total, shared, expert, experts


def _collected(writer: gguf.GGUFWriter) -> dict[str, Value]:
    """The keys that the gguf package's writer was given, as values of our own."""
    keys = {}
    for key, held in writer.kv_data[0].items():
        if key == "general.architecture":
            continue
        kind = held.type if held.type is not gguf.GGUFValueType.ARRAY else held.sub_type
        if kind is None:  # an array whose element type follows from its first element
            kind = gguf.GGUFValueType.get_type(held.value[0])
        keys[key] = Value(ValueType[_VALUE_TYPES.get(kind.name, kind.name)], held.value)
    return keys


_VALUE_TYPES = {
    "UINT8": "U8",
    "INT8": "I8",
    "UINT16": "U16",
    "INT16": "I16",
    "UINT32": "U32",
    "INT32": "I32",
    "UINT64": "U64",
    "INT64": "I64",
    "FLOAT32": "F32",
    "FLOAT64": "F64",
}
