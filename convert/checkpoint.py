"""A Hugging Face checkpoint folder: its config and the names, shapes and places of its tensors."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.errors import CheckpointError, FormatError
from mtp_gguf.gguf_tools.remote import RemoteSource
from mtp_gguf.gguf_tools.safetensors import SafetensorsFile, StoredTensor, open_safetensors
from mtp_gguf.gguf_tools.sources import FileSource

from .config import ConfigReader
from .json_files import read_json_object

INDEX_NAME = "model.safetensors.index.json"
LAYERS_KEY = "mtp_num_hidden_layers"
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d{1,9})\.")
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of the checkpoint and the open file that holds it."""

    stored: StoredTensor
    source: FileSource | RemoteSource


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds: `config` as it stands there, and its tensors by name.

    folders: those that the checkpoint was put together from, `folder` first. sources: the open
    files; leaving the checkpoint as a context manager closes them.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, PlacedTensor]
    folders: tuple[Path, ...]
    sources: tuple[FileSource | RemoteSource, ...]

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        for source in self.sources:
            source.close()

    def files(self) -> list[Path]:
        """All files of the folders, but for GGUF files: those are made here, not read."""
        return [
            path for folder in self.folders for path in folder.iterdir() if path.suffix != ".gguf"
        ]

    def with_head_of(self, other: "Checkpoint") -> "Checkpoint":
        """This checkpoint with the `mtp.*` tensors of another one in place of its own."""
        own = {name: t for name, t in self.tensors.items() if not is_head(name)}
        head = {name: t for name, t in other.tensors.items() if is_head(name)}
        layers = other.mtp_layers()
        config = {**self.config, LAYERS_KEY: layers}
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = {**config["text_config"], LAYERS_KEY: layers}
        folders = (*self.folders, *other.folders)
        sources = (*self.sources, *other.sources)
        return Checkpoint(self.folder, config, {**own, **head}, folders, sources)

    def mtp_layers(self) -> int:
        """Number of MTP layers: by the config, or where it names none, by the tensors.

        Some publishers leave the number out, and configs on the hub cannot be edited.
        """
        reader = ConfigReader(str(self.folder / "config.json"), self.config)
        if claimed := reader.size(LAYERS_KEY, 0, least=0):
            return claimed
        found = (_MTP_LAYER.match(canonical_name(name)) for name in self.tensors)
        return max((int(match[1]) + 1 for match in found if match), default=0)

    @property
    def head_folder(self) -> Path:
        """The folder that the MTP head is from: that of the donor, where there is one."""
        return self.folders[-1]

    @property
    def text_config(self) -> dict[str, Any]:
        """The config of the language model, which multimodal checkpoints nest."""
        return ConfigReader(str(self.folder / "config.json"), self.config).config


def is_head(name: str) -> bool:
    """Whether a tensor belongs to the MTP head."""
    return canonical_name(name).startswith("mtp.")


def canonical_name(name: str) -> str:
    """A tensor's name as a text model alone has it, without what its holders put around it.

    torch.compile and PEFT prefix the names of the models that they wrap, multimodal models that of
    the language model in them.
    """
    for wrapper in ("_orig_mod.", "base_model.model.", "language_model."):
        name = name.replace(wrapper, "")
    if name.startswith("model.mtp.") or name == "model.lm_head.weight":
        name = name.removeprefix("model.")
    return name


def open_checkpoint(
    folder: Path,
    wanted: Callable[[str], bool] = lambda _: True,
    elsewhere: Callable[[str], SafetensorsFile] | None = None,
) -> Checkpoint:
    """Read the config and the safetensors headers of `folder`; no tensor data is read.

    wanted: says by a tensor's name whether it is needed; shards that hold none may be missing.
    elsewhere: opens a shard that is not in the folder, by its name.
    """
    config = read_config(folder)
    tensors: dict[str, PlacedTensor] = {}
    origin: dict[str, str] = {}
    with ExitStack() as opened:
        sources = []
        for name in shard_names(folder, wanted, whole=elsewhere is None):
            path = folder / name
            away = elsewhere if elsewhere is not None and not path.is_file() else None
            file = away(name) if away is not None else open_safetensors(path)
            assert isinstance(file.source, FileSource | RemoteSource)
            sources.append(file.source)
            opened.callback(file.source.close)
            for tensor in file.tensors.values():
                if tensor.name in tensors:
                    raise CheckpointError(
                        f"{folder}: tensor {tensor.name!r} is in both {origin[tensor.name]} "
                        f"and {name}"
                    )
                tensors[tensor.name] = PlacedTensor(tensor, file.source)
                origin[tensor.name] = name
        _check_against_index(folder, origin)
        opened.pop_all()
    return Checkpoint(folder, config, tensors, (folder,), tuple(sources))


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint folder."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder with config.json, found none")
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder}: expected a whole model, found a LoRA adapter; merge it into its model "
            "first (merge_and_unload of peft) and convert the result"
        )
    return read_json_object(folder / "config.json")


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name to file name, as the index of `folder` has it; None when there is no index.

    A file name that is not a plain name inside the folder is refused.
    """
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map: expected file names by tensor name, found none")
    for tensor, file in weight_map.items():
        plain = isinstance(file, str) and file not in ("", ".", "..") and "\0" not in file
        if not plain or "/" in file or "\\" in file:
            raise CheckpointError(
                f"{path}: weight_map of {tensor!r}: expected a file name inside the folder, "
                f"found {file!r}"
            )
    return weight_map


def shard_names(
    folder: Path, wanted: Callable[[str], bool] = lambda _: True, whole: bool = True
) -> list[str]:
    """The safetensors files of `folder` that hold wanted tensors.

    whole: none may be missing; otherwise a checkpoint without an index is one file.
    """
    weight_map = read_weight_map(folder)
    if weight_map is not None:
        names = sorted({file for tensor, file in weight_map.items() if wanted(tensor)})
        absent = [name for name in names if not (folder / name).is_file()]
        if absent and whole:
            raise CheckpointError(
                f"{folder}: {INDEX_NAME} names {len(absent)} files that "
                f"are missing: {', '.join(absent[:3])}{', …' if len(absent) > 3 else ''}; "
                "finish the download and try again"
            )
        return names
    names = sorted(p.name for p in folder.glob("model*.safetensors"))
    if not names and not whole:
        return ["model.safetensors"]
    if not names:
        others = sorted(p.name for p in folder.glob("*.bin"))
        found = f"only {others[0]}, which is a pickle" if others else "none"
        raise CheckpointError(
            f"{folder}: expected model.safetensors or {INDEX_NAME} with its shards, found {found}"
        )
    for name in names:
        if match := _SHARD.fullmatch(name):
            total = int(match[2])
            missing = [
                shard
                for i in range(1, total + 1)
                if (shard := f"model-{i:05}-of-{total:05}.safetensors") not in names
            ]
            if missing:
                raise CheckpointError(f"{folder}: expected {total} shards, {missing[0]} is missing")
    return names


def _check_against_index(folder: Path, origin: dict[str, str]) -> None:
    weight_map = read_weight_map(folder)
    if weight_map is None:
        return
    read = set(origin.values())
    for name, file in weight_map.items():
        if file in read and origin.get(name) != file:
            raise FormatError(
                f"{folder / INDEX_NAME}: tensor {name!r}: expected in {file}, "
                f"found {'in ' + origin[name] if name in origin else 'nowhere'}"
            )
    for name, file in origin.items():
        if name not in weight_map:
            raise FormatError(
                f"{folder / file}: tensor {name!r} is not in {INDEX_NAME}, which should name "
                "every tensor"
            )
