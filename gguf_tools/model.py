"""A GGUF model with all its shards, of which only the headers are read, and tensor listings.

Everything that works on a GGUF opens it as a `Model`. Listings also cover safetensors files.
"""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .errors import FormatError
from .files.format import ArrayRef, GgufFile, RawValue, TensorInfo, Value, open_gguf
from .files.loader_rules import refusals
from .files.safetensors import SafetensorsFile, checkpoint_files
from .files.torch_file import SUFFIXES as WEIGHT_SUFFIXES
from .files.torch_file import open_weights
from .heads.drafters import Drafter, read_drafter
from .heads.head import HeadReport, MtpHead, block_of, part_of
from .hub.sources import Source
from .vision import PART, VisionTower, read_tower

Metadata = dict[str, Value | RawValue]

SPLIT_INDEX_KEY = "split.no"
SPLIT_COUNT_KEY = "split.count"
SPLIT_KEYS = (SPLIT_INDEX_KEY, SPLIT_COUNT_KEY, "split.tensors.count")

# What was measured with exactly this file (`acceptance.py`).
ACCEPTANCE_PREFIX = "mtp.acceptance."

_SHARD_NAME = re.compile(r"(.*[^/])-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
# Names of MTP tensors in a checkpoint: of a text model, and of one with a vision tower.
_SOURCE_HEAD = re.compile(r"(model\.)?(language_model\.)?mtp\.")


class Model:
    """A GGUF model open for reading: `first` has the metadata, `tensors` those of all shards.

    path: names the model in messages; a URL if it is not a local file. Use it as a context manager
    to close the files. FormatError for shards of different models, which llama.cpp cannot load
    either.
    """

    def __init__(self, path: Path | str, files: tuple[GgufFile, ...]) -> None:
        self.path = path
        self.files = files
        self.first = files[0]
        self.tensors: dict[str, TensorInfo] = {}
        self._source: dict[str, Source] = {}
        for index, file in enumerate(files):
            self._check_split(index, file)
        for file in files:
            for tensor in file.tensors:
                if tensor.name in self.tensors:
                    raise FormatError(
                        f"{file.source.name}: tensor {tensor.name!r} is also in "
                        f"{self._source[tensor.name].name}"
                    )
                self.tensors[tensor.name] = tensor
                self._source[tensor.name] = file.source
        for file in files:
            self._check_tensor_count(file)

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.source.close()

    def _check_split(self, index: int, file: GgufFile) -> None:
        for key, expected in ((SPLIT_INDEX_KEY, index), (SPLIT_COUNT_KEY, len(self.files))):
            found = file.integer(key)
            if found != expected and (len(self.files) > 1 or (found or 0) > 1):
                raise FormatError(
                    f"{file.source.name}: {key}: expected {expected} by the file's name, "
                    f"found {found}"
                )

    def _check_tensor_count(self, file: GgufFile) -> None:
        total = file.integer("split.tensors.count")
        if total not in (None, len(self.tensors)):
            raise FormatError(
                f"{file.source.name}: split.tensors.count: expected {len(self.tensors)}, the "
                f"number of tensors in all shards, found {total}"
            )

    @property
    def paths(self) -> list[Path]:
        """The files, to check that an output does not overwrite one of them."""
        return [Path(file.source.name) for file in self.files]

    @property
    def architecture(self) -> str | None:
        """`general.architecture`; None if it is missing or not a string."""
        found = self.first.scalar("general.architecture")
        return found if isinstance(found, str) else None

    @cached_property
    def head(self) -> MtpHead:
        """The MTP head, which may be incomplete or absent."""
        return MtpHead(self.path, self.first, self.tensors)

    @cached_property
    def tower(self) -> VisionTower | None:
        """The vision tower, if this is an mmproj file."""
        return read_tower(self.first, self.tensors)

    @cached_property
    def drafter(self) -> Drafter | None:
        """The drafter that is no MTP head, if this is the file of one."""
        return read_drafter(self.first, self.tensors)

    @cached_property
    def report(self) -> HeadReport:
        """Whether the model can draft: its head is valid and llama.cpp can load the file."""
        if self.tower:
            return self.head.refusal(f"{self.tower.text}; it is no language model")
        if self.drafter:
            return self.head.refusal(f"{self.drafter.text}; it is no MTP head")
        report = self.head.report
        faults = refusals(self.head) if report.ready else []
        return self.head.refusal(faults[0]) if faults else report

    @property
    def attends_only(self) -> bool:
        """Whether all blocks have attention and no recurrent state, as far as their names tell."""
        blocks = {block_of(name) for name in self.tensors} - {None}
        attending = {block_of(n) for n in self.tensors if ".attn_output" in n}
        return bool(blocks) and blocks <= attending and not any(".ssm_" in n for n in self.tensors)

    @property
    def vocabulary_size(self) -> int | None:
        """Rows of the embedding, or else tokens of the tokenizer; None if it has neither."""
        return self.head.vocabulary_size

    def metadata(self) -> Metadata:
        """All keys, with arrays unread, except those of the split and of the measured acceptance.

        Both describe this file, and not another one that is made from it.
        """
        return {
            key: value
            for key, value in header_keys(self.first).items()
            if key not in SPLIT_KEYS and not key.startswith(ACCEPTANCE_PREFIX)
        }

    def source_of(self, name: str) -> Source:
        """The file that has the tensor `name`."""
        return self._source[name]

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes `start` to `start + length` of the tensor `name`; all from `start` by default."""
        tensor = self.tensors[name]
        length = tensor.nbytes - start if length is None else length
        return self._source[name].read(tensor.offset + start, length)


def open_model(path: Path) -> Model:
    """Open the GGUF at `path` with all its shards; FormatError if they do not fit together."""
    with ExitStack() as stack:
        files = tuple(stack.enter_context(open_gguf(shard)) for shard in shard_paths(path))
        model = Model(path, files)
        stack.pop_all()
        return model


def header_keys(file: GgufFile) -> Metadata:
    """All keys of one file, ready to be written to another, with arrays unread."""
    return {
        key: file.raw(key) if isinstance(found, ArrayRef) else file.value(key)
        for key, found in file.keys.items()
    }


# ------------------------------------------------------------------------------- shards


def shard_path(path: Path, index: int, count: int) -> Path:
    """The name of shard `index` (from 0) of a model whose unsplit file would be `path`."""
    return path.with_name(f"{path.stem}-{index + 1:05}-of-{count:05}.gguf")


def whole_name(path: Path) -> str:
    """The name that the model of the shard `path` would have as a single file."""
    match = _SHARD_NAME.fullmatch(path.name)
    return path.name if match is None else f"{match[1]}.gguf"


def shard_paths(path: Path) -> list[Path]:
    """All shards of the model that `path` is a shard of, or `path` alone.

    FormatError if one of them is missing, or if the numbers in the name are impossible.
    """
    paths = [Path(name) for name in shard_names(str(path))]
    for shard in paths if _SHARD_NAME.fullmatch(str(path)) else ():
        if not shard.is_file():
            raise FormatError(f"{path}: expected {len(paths)} shards, {shard.name} is missing")
    return paths


def shard_names(name: str) -> list[str]:
    """All shards of the model that the file `name` is a shard of, or `name` alone.

    name: a path or a URL. FormatError if the numbers in it are impossible.
    """
    match = _SHARD_NAME.fullmatch(name)
    if match is None:
        return [name]
    index, count = int(match[2]), int(match[3])
    if not 1 <= index <= count:
        raise FormatError(f"{name}: expected a shard of 1 to {count} by its name, found {index}")
    return [f"{match[1]}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]


# ------------------------------------------------------------------------------ listing


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
    """The tensors of a model, and the report on its head.

    head: for GGUF; None for safetensors, where the tensors' names say whether there is one.
    tower: the vision tower, if it is an mmproj file. drafter: what the file is, if it is a drafter
    and no MTP head.
    """

    tensors: tuple[ListedTensor, ...]
    head: HeadReport | None
    tower: VisionTower | None = None
    drafter: Drafter | None = None


def list_tensors(path: Path) -> Listing:
    """List the tensors of the model at `path` from its headers; any shard will do."""
    if path.is_dir():
        return _list_local_weights(checkpoint_files(path))
    if not path.exists():
        raise FormatError(f"{path}: expected a file or folder, found none")
    if path.suffix in WEIGHT_SUFFIXES:
        return _list_local_weights([path])
    with open_model(path) as model:
        return list_model(model)


def list_model(model: Model) -> Listing:
    """List the tensors of an open GGUF, local or remote."""
    report = model.report
    layout = report.draft.layout if report.draft else None
    tensors = tuple(
        ListedTensor(
            t.name,
            t.shape,
            t.type.name,
            t.nbytes,
            t.offset,
            PART if model.tower else part_of(t.name, report.block, layout),
            Path(model.source_of(t.name).name).name,
        )
        for t in model.tensors.values()
    )
    return Listing(tensors, report, model.tower, model.drafter)


def _list_local_weights(paths: list[Path]) -> Listing:
    files = []
    for path in paths:
        files.append(open_weights(path))
        files[-1].source.close()
    return list_safetensors(files)


def list_safetensors(files: Sequence[SafetensorsFile]) -> Listing:
    """List the tensors of open safetensors files, local or remote."""
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
