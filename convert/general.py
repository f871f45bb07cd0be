"""The general.* metadata: names, sizes and licence, by the rules of the gguf package."""

import logging
from collections.abc import Sequence
from math import prod
from pathlib import Path

import gguf

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.format import Value, ValueType

from .checkpoint import read_json_object
from .recipe import Target
from .tokenizer import collected


def general_metadata(
    folder: Path, name: str | None, targets: Sequence[Target], file_type: int
) -> dict[str, Value]:
    """What identifies the model, from its card, its config and its folder's name.

    name: the model's name where the folder's is none (a cache of the hub).
    """
    logging.getLogger("gguf.metadata").setLevel(logging.ERROR)
    total, shared, expert, experts = _parameters(targets)
    try:
        held = gguf.Metadata.load(None, folder, name, total)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder}: its model card cannot be understood: {error}") from None
    held.name = held.name or name or folder.resolve().name
    if held.size_label is None and total:
        held.size_label = gguf.size_label(total, shared, expert, experts)
    penalty = _repetition_penalty(folder)
    if penalty is not None and held.sampling_penalty_repeat is None:
        held.sampling_penalty_repeat = penalty
    collector = gguf.GGUFWriter(path=None, arch="")
    held.set_gguf_meta_model(collector)
    return {
        "general.type": Value(ValueType.STRING, "model"),
        **collected(collector),
        "general.file_type": Value(ValueType.U32, file_type),
        "general.quantization_version": Value(ValueType.U32, gguf.GGML_QUANT_VERSION),
    }


def file_stem(general: dict[str, Value], quant: str) -> str:
    """The file's name without suffix, as the naming convention of GGUF has it."""

    def text(key: str) -> str | None:
        value = general.get(f"general.{key}")
        return str(value.data) if value is not None else None

    return gguf.naming_convention(
        text("name"), text("basename"), text("finetune"), text("version"), text("size_label"), quant
    )


def _repetition_penalty(folder: Path) -> float | None:
    """What generation_config.json says; released versions of the gguf package overlook it."""
    path = folder / "generation_config.json"
    value = read_json_object(path).get("repetition_penalty") if path.is_file() else None
    return float(value) if isinstance(value, int | float) else None


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
