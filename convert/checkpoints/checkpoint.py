"""A Hugging Face checkpoint folder: its config, and the names, shapes and files of its tensors."""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.errors import CheckpointError, FormatError
from mtp_gguf.gguf_tools.files.safetensors import (
    INDEX_NAME,
    MERGE_ADAPTER,
    TORCH_INDEX_NAME,
    SafetensorsFile,
    StoredTensor,
    is_weight_file,
    no_weights,
    unmerged,
    weight_files,
)
from mtp_gguf.gguf_tools.files.torch_file import open_weights
from mtp_gguf.gguf_tools.hub.remote import RemoteSource
from mtp_gguf.gguf_tools.hub.sources import FileSource, WeightSource, ggufs_in

from .config import ConfigReader, is_whole
from .json_files import read_json_object
from .ways_out import original

_OPENED_AT_ONCE = 8  # files of weights elsewhere
LAYERS_KEY = "mtp_num_hidden_layers"
APPENDED_KEY = "num_nextn_predict_layers"  # of models whose head follows the trunk's layers
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d{1,9})\.")
_SHARD = re.compile(r"((?:pytorch_)?model)-(\d{5})-of-(\d{5})\.(safetensors|bin)")
_MODELOPT_NAME = "hf_quant_config.json"
_QUANTO_NAME = "quanto_qmap.json"  # the only sign of Optimum Quanto
_MODELOPT_KEYS = ("quant_algo", "quant_method", "format", "config_groups", "quantized_layers")


@dataclass(frozen=True, eq=False)
class Quantization:
    """How a checkpoint says that its weights are quantized.

    where: the file that says so, for messages. config: its `quantization_config`, unmodified.
    """

    where: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of the checkpoint and the open file that contains it.

    quantization: that of the checkpoint that the tensor comes from.
    """

    stored: StoredTensor
    source: WeightSource
    quantization: Quantization | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its `config`, unmodified, and its tensors by name.

    folders: the folders that it was combined from, `folder` first. sources: the open files, which
    are closed when the checkpoint is left as a context manager.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, PlacedTensor]
    folders: tuple[Path, ...]
    sources: tuple[WeightSource, ...]

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        for source in self.sources:
            source.close()

    def files(self) -> list[Path]:
        """All files of the folders except GGUF files, which are outputs and not read."""
        return [
            path for folder in self.folders for path in folder.iterdir() if path.suffix != ".gguf"
        ]

    def with_head_of(self, other: "Checkpoint") -> "Checkpoint":
        """This checkpoint with its MTP head replaced by that of another."""
        own = {name: t for name, t in self.tensors.items() if not self.in_head(name)}
        head = {name: t for name, t in other.tensors.items() if other.in_head(name)}
        counts = {LAYERS_KEY: other.mtp_layers()}
        if layers := other.text_config.get(APPENDED_KEY):
            counts[APPENDED_KEY] = layers
        config = {**self.config, **counts}
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = {**config["text_config"], **counts}
        folders = (*self.folders, *other.folders)
        sources = (*self.sources, *other.sources)
        return Checkpoint(self.folder, config, {**own, **head}, folders, sources)

    def mtp_layers(self) -> int:
        """Number of MTP layers from the config, or from the tensors if the config lacks it.

        Some publishers omit the number, and users cannot edit configs on the hub.
        """
        if claimed := self.reader.size(LAYERS_KEY, 0, least=0):
            return claimed
        return self.head_layers()

    def head_layers(self) -> int:
        """Number of MTP layers that the tensors belong to."""
        names = [canonical_name(name) for name in self.tensors if self.in_head(name)]
        if found := [int(match[1]) for match in map(_MTP_LAYER.match, names) if match]:
            return max(found) + 1
        found = [int(match[1]) for match in map(_LAYER.match, names) if match]
        return max(found) + 1 - self.text_config["num_hidden_layers"] if found else 0

    @cached_property
    def in_head(self) -> Callable[[str], bool]:
        """Whether a tensor of this name belongs to the MTP head."""
        return head_test(self.config)

    @property
    def head_folder(self) -> Path:
        """The folder of the MTP head, which may be that of a donor."""
        return self.folders[-1]

    @property
    def text_config(self) -> dict[str, Any]:
        """The config of the language model, which is nested in multimodal checkpoints."""
        return self.reader.config

    @property
    def reader(self) -> ConfigReader:
        """Typed access to the config."""
        return ConfigReader(str(self.folder / "config.json"), self.config)


def is_head(name: str) -> bool:
    """Whether a tensor belongs to the MTP head."""
    return canonical_name(name).startswith("mtp.")


def head_test(config: dict[str, Any]) -> Callable[[str], bool]:
    """A function that knows the tensors of the MTP head of a model with this config.

    Most are named `mtp.*`; GLM's and Step's are layers after the trunk's.
    """
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    layers, appended = (config.get(key) for key in ("num_hidden_layers", APPENDED_KEY))
    if not (is_whole(layers) and is_whole(appended) and appended > 0):
        return is_head

    def test(name: str) -> bool:
        match = _LAYER.match(canonical_name(name))
        return is_head(name) or (match is not None and int(match[1]) >= layers)

    return test


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision tower."""
    return canonical_name(name).startswith(("model.visual.", "visual."))


# What wraps a model, or a layer of it, adds one of these to its names: torch.compile, FSDP,
# activation checkpointing, DeepSpeed or Lightning, PEFT, multimodal models.
_WRAPPERS = (
    *("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module."),
    *("base_model.model.", "language_model."),
)


def canonical_name(name: str) -> str:
    """A tensor's name as in a plain text model, without the prefixes of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    name = name.removeprefix("module.")  # of DistributedDataParallel
    if name.startswith("model.model."):  # a module that holds the model as its attribute `model`
        name = name.removeprefix("model.")
    if name.startswith("model.mtp.") or name == "model.lm_head.weight":
        name = name.removeprefix("model.")
    return name


def open_checkpoint(
    folder: Path,
    wanted: Callable[[str], bool] = lambda _: True,
    elsewhere: Callable[[str], SafetensorsFile] | None = None,
    listed: Sequence[str] = (),
) -> Checkpoint:
    """Read the config and the safetensors headers of `folder`; no tensor data is read.

    wanted: whether a tensor of this name is needed; shards without any of these may be missing.
    elsewhere: opens a shard by its name if it is not in the folder; called from several threads.
    listed: names of the files elsewhere, of which a checkpoint without an index consists.
    """
    config = read_config(folder)
    quantization = read_quantization(folder, config)
    tensors: dict[str, PlacedTensor] = {}
    origin: dict[str, str] = {}
    with ExitStack() as opened:
        sources = []
        names = shard_names(folder, wanted, whole=elsewhere is None, listed=listed)
        for name, file in zip(names, _open_shards(folder, names, elsewhere, opened), strict=True):
            assert isinstance(file.source, FileSource | RemoteSource)
            sources.append(file.source)
            if file.metadata.get("format") == "mlx":
                raise CheckpointError(
                    f"{folder / name}: expected weights as transformers stores them, found those "
                    f"of MLX, which changes norms and convolutions; {original(folder)}"
                )
            for tensor in file.tensors.values():
                if tensor.name in tensors:
                    raise CheckpointError(
                        f"{folder}: tensor {tensor.name!r} is in both {origin[tensor.name]} "
                        f"and {name}"
                    )
                tensors[tensor.name] = PlacedTensor(tensor, file.source, quantization)
                origin[tensor.name] = name
        _check_against_index(folder, origin)
        opened.pop_all()
    return Checkpoint(folder, config, tensors, (folder,), tuple(sources))


def _open_shards(
    folder: Path,
    names: Sequence[str],
    elsewhere: Callable[[str], SafetensorsFile] | None,
    opened: ExitStack,
) -> list[SafetensorsFile]:
    """Open all shards, several of those elsewhere at once; `opened` closes them."""

    def open_one(name: str) -> SafetensorsFile:
        if elsewhere is None or (folder / name).is_file():
            return open_weights(folder / name)
        return elsewhere(name)

    with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
        jobs = [pool.submit(open_one, name) for name in names]
    for job in jobs:
        if job.exception() is None:
            opened.callback(job.result().source.close)
    return [job.result() for job in jobs]


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint folder."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a folder with config.json, found none")
    if (folder / "adapter_config.json").exists():
        found = "found a LoRA adapter"
        if (folder / "config.json").exists():
            found += " beside the model, which transformers would apply"
        raise CheckpointError(
            f"{folder}: expected a whole model, {found}; merge it into its model first and convert "
            f"the result: {MERGE_ADAPTER}"
        )
    path = folder / "config.json"
    if not path.exists() and (found := unmerged(folder) or ggufs_in(folder).removeprefix("; ")):
        raise CheckpointError(f"{path}: expected this file, found {found}")
    return read_json_object(path)


def read_quantization(folder: Path, config: dict[str, Any]) -> Quantization | None:
    """The quantization according to `config` and NVIDIA ModelOpt's own file; None if there is none.

    The two are combined as in llama.cpp's converter.
    """
    where = folder / "config.json"
    quantization = ConfigReader(str(where), config).config.get("quantization_config")
    quantization = {} if quantization is None else quantization
    if not isinstance(quantization, dict):
        raise CheckpointError(
            f"{where}: quantization_config: expected an object, found {quantization!r:.80}; "
            f"{original(folder)}"
        )
    if not quantization and (folder / _QUANTO_NAME).exists():
        quantization = {"quant_method": "quanto"}
    modelopt_path = folder / _MODELOPT_NAME
    if modelopt_path.exists() and not (
        quantization.get("quant_algo") and quantization.get("quantized_layers")
    ):
        modelopt = read_json_object(modelopt_path)
        producer, given = (modelopt.get(key) or {} for key in ("producer", "quantization"))
        if not isinstance(producer, dict) or not isinstance(given, dict):
            raise CheckpointError(f"{modelopt_path}: expected objects in producer and quantization")
        method = quantization.get("quant_method") or str(producer.get("name") or "").lower() or None
        fields = {key: given[key] for key in _MODELOPT_KEYS if given.get(key) is not None}
        if fields:
            where, quantization = modelopt_path, {**quantization, "quant_method": method, **fields}
    return Quantization(str(where), quantization) if quantization else None


def read_weight_map(folder: Path, index_name: str = INDEX_NAME) -> dict[str, str] | None:
    """Maps tensor names to file names, from the index of `folder`; None if there is no index.

    CheckpointError for a file name that leads out of the folder.
    """
    path = folder / index_name
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
    folder: Path,
    wanted: Callable[[str], bool] = lambda _: True,
    whole: bool = True,
    listed: Sequence[str] = (),
) -> list[str]:
    """The files of `folder` that contain wanted tensors.

    whole: no file may be missing; otherwise a checkpoint without an index consists of the weight
    files among `listed`, or is a single file.
    """
    index_name, weight_map = _index(folder)
    if weight_map is not None:
        names = sorted({file for tensor, file in weight_map.items() if wanted(tensor)})
        absent = [name for name in names if not (folder / name).is_file()]
        if absent and whole:
            raise CheckpointError(
                f"{folder}: {index_name} names files that are missing: {', '.join(absent[:3])}"
                f"{', …' if len(absent) > 3 else ''}; finish the download and try again"
            )
        return names
    names = weight_files(folder)
    if not names and not whole:
        return sorted(filter(is_weight_file, listed)) or ["model.safetensors"]
    if not names:
        raise CheckpointError(no_weights(folder))
    for name in names:
        if match := _SHARD.fullmatch(name):
            total = int(match[3])
            missing = [
                shard
                for i in range(1, total + 1)
                if (shard := f"{match[1]}-{i:05}-of-{total:05}.{match[4]}") not in names
            ]
            if missing:
                raise CheckpointError(f"{folder}: expected {total} shards, {missing[0]} is missing")
    return names


def _index(folder: Path) -> tuple[str, dict[str, str] | None]:
    """Name and contents of the index of `folder`; that of `.bin` files if it is the only one."""
    weight_map = read_weight_map(folder)
    if weight_map is None and all(name.endswith(".bin") for name in weight_files(folder)):
        return TORCH_INDEX_NAME, read_weight_map(folder, TORCH_INDEX_NAME)
    return INDEX_NAME, weight_map


def _check_against_index(folder: Path, origin: dict[str, str]) -> None:
    index_name, weight_map = _index(folder)
    if weight_map is None:
        return
    read = set(origin.values())
    for name, file in weight_map.items():
        if file in read and origin.get(name) != file:
            raise FormatError(
                f"{folder / index_name}: tensor {name!r}: expected in {file}, "
                f"found {'in ' + origin[name] if name in origin else 'nowhere'}"
            )
    for name, file in origin.items():
        if name not in weight_map:
            raise FormatError(
                f"{folder / file}: tensor {name!r} is not in {index_name}, which should name "
                "every tensor"
            )
