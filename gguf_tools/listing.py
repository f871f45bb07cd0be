"""The tensors of a model on disk: GGUF (split or whole), safetensors, checkpoint folders."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .errors import FormatError
from .format import GgufFile, open_gguf
from .head import HeadReport, head_report, part_of
from .safetensors import SafetensorsFile, open_safetensors
from .shards import SPLIT_COUNT_KEY, SPLIT_INDEX_KEY, safetensors_files, shard_paths

# Names of MTP tensors in a checkpoint: of a text model, and of one with a vision tower.
_SOURCE_HEAD = re.compile(r"(model\.)?(language_model\.)?mtp\.")


@dataclass(frozen=True)
class ListedTensor:
    """One line of a listing: `shape` in the order of its format, `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    offset: int
    part: str
    file: str


@dataclass(frozen=True)
class Listing:
    """The tensors of a model, and what is to be said of its head.

    head: the report for GGUF; None for safetensors, where the tensors' names say it.
    """

    tensors: tuple[ListedTensor, ...]
    head: HeadReport | None


def list_tensors(path: Path) -> Listing:
    """List the model at `path` by its headers alone; any shard stands for the whole model."""
    if path.is_dir():
        return _list_safetensors(safetensors_files(path))
    if not path.exists():
        raise FormatError(f"{path}: expected a file or folder, found none")
    if path.suffix == ".safetensors":
        return _list_safetensors([path])
    return _list_gguf(path)


def _list_gguf(path: Path) -> Listing:
    with ExitStack() as stack:
        return list_gguf([stack.enter_context(open_gguf(p)) for p in shard_paths(path)])


def list_gguf(files: Sequence[GgufFile]) -> Listing:
    """List a model by the headers of its files, wherever they are."""
    _check_shards(files)
    report = head_report(files[0], [t for file in files for t in file.tensors])
    layout = report.draft.layout if report.draft else None
    tensors = tuple(
        ListedTensor(
            t.name,
            t.shape,
            t.type.name,
            t.nbytes,
            t.offset,
            part_of(t.name, report.block, layout),
            Path(file.source.name).name,
        )
        for file in files
        for t in file.tensors
    )
    return Listing(tensors, report)


def _check_shards(files: Sequence[GgufFile]) -> None:
    """Refuse what is no shard of one model: llama.cpp loads it neither."""
    seen: dict[str, str] = {}
    for index, file in enumerate(files):
        for key, expected in ((SPLIT_INDEX_KEY, index), (SPLIT_COUNT_KEY, len(files))):
            found = file.integer(key)
            if found != expected and (len(files) > 1 or (found or 0) > 1):
                raise FormatError(
                    f"{file.source.name}: {key}: expected {expected} by the file's name, "
                    f"found {found}"
                )
        for tensor in file.tensors:
            if tensor.name in seen:
                raise FormatError(
                    f"{file.source.name}: tensor {tensor.name!r} is also in {seen[tensor.name]}"
                )
            seen[tensor.name] = file.source.name


def _list_safetensors(paths: list[Path]) -> Listing:
    files = []
    for path in paths:
        files.append(open_safetensors(path))
        files[-1].source.close()
    return list_safetensors(files)


def list_safetensors(files: Sequence[SafetensorsFile]) -> Listing:
    """List safetensors files by their headers, wherever they are."""
    tensors = tuple(
        ListedTensor(
            t.name,
            t.shape,
            t.dtype,
            t.nbytes,
            t.offset,
            "head" if _SOURCE_HEAD.match(t.name) else "base",
            Path(file.source.name).name,
        )
        for file in files
        for t in file.tensors.values()
    )
    return Listing(tensors, None)
