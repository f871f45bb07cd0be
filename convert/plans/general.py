"""The general.* metadata (names, sizes, license), by the rules of the gguf package."""

import logging
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import gguf
import yaml

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.files.format import RawValue, Value, ValueType

from ..checkpoints.config import LARGEST_F32, LARGEST_SIZE, is_whole
from ..checkpoints.json_files import read_json_object, read_text
from .recipe import Target

_log = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
MODEL_CARD = "README.md"
# Names that are the same in generation_config.json and in gguf.Metadata.
_SAMPLING = (
    *("sequence", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold"),
    *("penalty_last_n", "penalty_repeat", "mirostat", "mirostat_tau", "mirostat_eta"),
)


class _CardLoader(yaml.SafeLoader):
    """Loads YAML with every value except null as a string.

    Publishers write `version: 1.2` and `language: no`, and mean strings.
    """


_CardLoader.yaml_implicit_resolvers = {
    start: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
    for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def general_metadata(
    folder: Path, name: str | None, targets: Sequence[Target], file_type: int, kind: str = "model"
) -> dict[str, Value]:
    """The metadata that identify the model, from its card, its config and its folder's name.

    name: the model's name if the folder is named after a commit (a cache of the hub). kind: of the
    file (`general.type`). A card that cannot be used is logged and left out.
    """
    logging.getLogger("gguf.metadata").setLevel(logging.ERROR)
    try:
        keys = _general_keys(folder, name, targets, _model_card(folder))
    except _CardError as error:
        where, fault = folder / MODEL_CARD, " ".join(str(error).split())
        _log.warning("%s: expected a model card, found: %s; its fields are left out", where, fault)
        keys = _general_keys(folder, name, targets, {})
    return {
        "general.type": Value(ValueType.STRING, kind),
        **keys,
        "general.file_type": Value(ValueType.U32, file_type),
        "general.quantization_version": Value(ValueType.U32, gguf.GGML_QUANT_VERSION),
    }


class _CardError(Exception):
    """The model card cannot be used."""


def _general_keys(
    folder: Path, name: str | None, targets: Sequence[Target], card: dict[str, Any]
) -> dict[str, Value]:
    total, shared, expert, experts = _parameters(targets)
    origin = read_json_object(folder / "config.json").get("_name_or_path")
    try:
        metadata = gguf.Metadata.apply_metadata_heuristic(
            gguf.Metadata(),
            card,
            {"_name_or_path": origin} if isinstance(origin, str) else {},
            folder if name is None else Path(name),
            total,
        )
    except Exception as error:  # the heuristics raise many types on unexpected fields
        if not card:
            raise
        raise _CardError(str(error)) from None
    metadata.name = metadata.name or name or folder.resolve().name
    if metadata.size_label is None and total:
        metadata.size_label = gguf.size_label(total, shared, expert, experts)
    for field, value in _sampling(folder).items():
        setattr(metadata, field, value)
    collector = gguf.GGUFWriter(path=None, arch="")
    metadata.set_gguf_meta_model(collector)
    keys = _collected(folder, collector, from_card=bool(card))
    _check_sampling(folder, keys)
    return keys


def _model_card(folder: Path) -> dict[str, Any]:
    """The front matter of README.md; empty if there is none."""
    path = folder / MODEL_CARD
    if not path.is_file():
        return {}
    try:
        first, *lines = read_text(path).split("\n")
        if first != "---":
            return {}
        end = lines.index("---") if "---" in lines else len(lines)
        fields = "\n".join(lines[:end]).replace("\t", "  ")  # YAML forbids tabs
        card = yaml.load(fields, _CardLoader)
    except (CheckpointError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise _CardError(str(error)) from None
    return card if isinstance(card, dict) else {}


def file_stem(metadata: Mapping[str, Value | RawValue], quant: str) -> str:
    """The file's name without suffix, by GGUF's naming convention."""

    def text(key: str) -> str | None:
        value = metadata.get(f"general.{key}")
        return str(value.data) if isinstance(value, Value) else None

    stem = gguf.naming_convention(
        text("name"), text("basename"), text("finetune"), text("version"), text("size_label"), quant
    )
    # A model card may contain anything, including path separators.
    return re.sub(r"[^\w.+-]+", "-", stem).lstrip(".-") or "model"


def _sampling(folder: Path) -> dict[str, Any]:
    """Sampling defaults in generation_config.json, by their names in gguf.Metadata."""
    path = folder / GENERATION_CONFIG
    settings = read_json_object(path) if path.is_file() else {}
    found = {f"sampling_{name}": settings.get(name) for name in _SAMPLING}
    found["sampling_temp"] = settings.get("temperature")
    if found["sampling_penalty_repeat"] is None:
        found["sampling_penalty_repeat"] = settings.get("repetition_penalty")
    return found


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_sampling(folder: Path, keys: dict[str, Value]) -> None:
    """CheckpointError for sampling defaults that are not numbers or are out of the type's range."""
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
    """Numbers of all weights, of those outside experts, of those per expert, and of experts."""
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


def _collected(folder: Path, writer: gguf.GGUFWriter, *, from_card: bool) -> dict[str, Value]:
    """The keys that were set on the gguf package's writer, as our `Value`s.

    from_card: whether there is a model card. _CardError if it has another type in place of a
    string, CheckpointError if another file has.
    """
    keys = {}
    for key, entry in writer.kv_data[0].items():
        if key == "general.architecture":
            continue
        array = entry.type is gguf.GGUFValueType.ARRAY  # all of these arrays contain strings
        if array or entry.type is gguf.GGUFValueType.STRING:
            for text in entry.value if array else [entry.value]:
                if not isinstance(text, str) or not _is_unicode(text):
                    fault = f"{key}: expected text, found {text!r:.60}"
                    if from_card and ".sampling." not in key:
                        raise _CardError(fault)
                    source = GENERATION_CONFIG if ".sampling." in key else "config.json"
                    raise CheckpointError(f"{folder / source}: {fault}")
            keys[key] = Value(ValueType.STRING, entry.value)
        else:
            keys[key] = Value(_VALUE_TYPES[entry.type], entry.value)
    return keys


_VALUE_TYPES = {
    gguf.GGUFValueType.UINT32: ValueType.U32,
    gguf.GGUFValueType.INT32: ValueType.I32,
    gguf.GGUFValueType.FLOAT32: ValueType.F32,
}
