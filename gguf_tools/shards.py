"""Models in several files: GGUF shards, as llama.cpp names them, and safetensors folders."""

import json
import re
from pathlib import Path

from .errors import FormatError

_NAME = re.compile(r"(.*[^/])-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
_SAFETENSORS_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.safetensors")

SPLIT_INDEX_KEY = "split.no"
SPLIT_COUNT_KEY = "split.count"
INDEX_NAME = "model.safetensors.index.json"


def shard_path(path: Path, index: int, count: int) -> Path:
    """The name of shard `index` (from 0) of a model that would be called `path` in one piece."""
    return path.with_name(f"{path.stem}-{index + 1:05}-of-{count:05}.gguf")


def whole_name(path: Path) -> str:
    """What the model that `path` belongs to would be called in one piece."""
    match = _NAME.fullmatch(path.name)
    return path.name if match is None else f"{match[1]}.gguf"


def shard_paths(path: Path) -> list[Path]:
    """All shards of the model that `path` is a shard of, or `path` alone.

    FormatError when one of them is missing, or when the name counts what cannot be.
    """
    paths = [Path(name) for name in shard_names(str(path))]
    for shard in paths if _NAME.fullmatch(str(path)) else ():
        if not shard.is_file():
            raise FormatError(f"{path}: expected {len(paths)} shards, {shard.name} is missing")
    return paths


def shard_names(name: str) -> list[str]:
    """All shards of the model that the file `name` is a shard of, or `name` alone.

    name: a path or an address. FormatError when it counts what cannot be.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return [name]
    index, count = int(match[2]), int(match[3])
    if not 1 <= index <= count:
        raise FormatError(f"{name}: expected a shard of 1 to {count} by its name, found {index}")
    return [f"{match[1]}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]


def safetensors_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`: those its index names, or else all of them.

    FormatError when there is none, or when one that the index or the numbering asks for is missing.
    """
    present = {p.name for p in folder.glob("*.safetensors")}
    if not present:
        raise FormatError(f"{folder}: expected safetensors files in the folder, found none")
    named = _indexed(folder / INDEX_NAME) or present
    wanted = set(named)
    for match in filter(None, map(_SAFETENSORS_NAME.fullmatch, named)):
        count = match[3]
        wanted |= {f"{match[1]}-{i:05}-of-{count}.safetensors" for i in range(1, int(count) + 1)}
    if missing := sorted(wanted - present):
        others = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise FormatError(f"{folder}: expected {len(wanted)} files, {missing[0]!r}{others} missing")
    return [folder / name for name in sorted(wanted)]


def _indexed(path: Path) -> set[str] | None:
    """The files that an index names; None when there is no index."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return set(map(str, weight_map.values()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{path}: expected a JSON object whose weight_map has file names, found: {error!r}"
        ) from None
