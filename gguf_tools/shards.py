"""Models split over several GGUF files: `NAME-00001-of-00003.gguf`, as llama.cpp names them."""

import re
from pathlib import Path

from .errors import FormatError

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def shard_path(path: Path, index: int, count: int) -> Path:
    """The name of shard `index` (from 0) of a model that would be called `path` in one piece."""
    return path.with_name(f"{path.stem}-{index + 1:05}-of-{count:05}.gguf")


def shard_paths(path: Path) -> list[Path]:
    """All shards of the model that `path` is a shard of, or `path` alone.

    FormatError when one of them is missing.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    whole = path.with_name(match[1] + ".gguf")
    paths = [shard_path(whole, index, count) for index in range(count)]
    for shard in paths:
        if not shard.is_file():
            raise FormatError(f"{path}: expected {count} shards, {shard.name} is missing")
    return paths
