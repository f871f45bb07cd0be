"""Diagnoses checkpoints, and compares the head of a GGUF with the checkpoint it was made from."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from huggingface_hub import ModelCard, hf_hub_download
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.compare import (
    Decoder,
    GgufSide,
    Outcome,
    TensorDifference,
    compare_tensors,
)
from mtp_gguf.gguf_tools.doctor import (
    UNKNOWN_ORIGINAL,
    Diagnosis,
    Finding,
    Severity,
    findings_of,
    regraft,
    runnable,
)
from mtp_gguf.gguf_tools.errors import CheckpointError, FormatError
from mtp_gguf.gguf_tools.files.format import Value
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.files.safetensors import SafetensorsFile
from mtp_gguf.gguf_tools.files.tensor_types import F16
from mtp_gguf.gguf_tools.heads.head import block_of
from mtp_gguf.gguf_tools.heads.head_values import HeadValues, inspect_values
from mtp_gguf.gguf_tools.heads.nextn import OUR_ARCHITECTURES
from mtp_gguf.gguf_tools.hub.remote import HubModel, hub_model
from mtp_gguf.gguf_tools.machine.shell import quoted
from mtp_gguf.gguf_tools.model import Model

from ..families.family import wanted
from ..families.target_model import HeadChoice
from ..plans.plan import Request
from ..plans.plan_checkpoint import make_content
from .checkpoint import (
    APPENDED_KEY,
    LAYERS_KEY,
    Checkpoint,
    is_head,
    open_checkpoint,
    read_config,
    read_weight_map,
)
from .checkpoint_side import CheckpointSide
from .config import is_whole
from .hub import download
from .hub_checkpoint import shards_on_hub
from .quantized import weights_of
from .source_tensors import SourceTensors
from .weights import row_count

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_Side: TypeAlias = CheckpointSide | GgufSide
_SLICE_ROWS = 1024  # rows of a matrix that are compared at a time, in F32
# Values that are read of each weight of the head, and then at a time of one that begins with zeros.
_FIRST_VALUES, _SLICE_VALUES = 1 << 14, 1 << 20


@dataclass(frozen=True)
class _Examined:
    """A checkpoint under examination: its folder, and its name as commands accept it.

    on_hub: the folder is in the hub's cache; it has only the small files and must not be changed.
    """

    folder: Path
    name: str
    on_hub: bool

    @property
    def quoted(self) -> str:
        """The name, quoted for a shell."""
        return quoted(self.name)

    @property
    def original(self) -> str:
        """The model on the hub that this one was made from, or the placeholder ORIGINAL."""
        named = (_config_origin(self.folder), _card_origin(self.folder))
        own = self.name.partition("@")[0]
        return next((origin for origin in named if origin and origin != own), UNKNOWN_ORIGINAL)

    @property
    def refetch(self) -> str:
        """A command that downloads the model again, into a new folder; "" for models on the hub.

        It must not overwrite the folder, because the config of a fine-tune names its base model.
        """
        if self.on_hub:
            return ""
        origin = _config_origin(self.folder) or UNKNOWN_ORIGINAL
        return f"hf download {origin} --local-dir {quoted(f'{self.folder}-again')}"


def diagnose_hub_checkpoint(hub_id: str, revision: str | None) -> Diagnosis:
    """Examine a checkpoint on the hub by its small files and the headers of its weights."""
    folder = download(hub_id, revision, ())
    examined = _Examined(folder, str(HubModel(hub_id, revision)), on_hub=True)
    return _diagnosed(examined, shards_on_hub(hub_id, folder))


def diagnose_checkpoint(folder: Path) -> Diagnosis:
    """Examine a checkpoint folder with the checks of a conversion that read no weights."""
    return _diagnosed(_Examined(folder, str(folder), on_hub=False), None)


def _diagnosed(
    examined: _Examined, elsewhere: Callable[[str], SafetensorsFile] | None
) -> Diagnosis:
    folder = examined.folder
    findings: list[Finding] = []
    count, appended = 0, False
    convert = f"mtp-gguf convert {examined.quoted} --mtp-f16"
    try:
        config = read_config(folder)
        needed = wanted(config, folder / "config.json", (HeadChoice.WITH_TRUNK,))
        with open_checkpoint(folder, needed, elsewhere) as checkpoint:
            SourceTensors(checkpoint)  # CheckpointError for names that belong to no model
            findings = list(_head(examined, checkpoint))
            count = sum(map(checkpoint.in_head, checkpoint.tensors))
            appended = not any(map(is_head, checkpoint.tensors))
            if not findings:
                content = make_content(checkpoint, Request("F16", HeadChoice.WITH_TRUNK, F16))
                architecture = content.metadata["general.architecture"]
                if isinstance(architecture, Value) and str(architecture.data) in OUR_ARCHITECTURES:
                    convert += " --fastmtp"
                if elsewhere is None:  # on the hub only headers are read
                    values = _head_values(checkpoint)
                    findings = list(findings_of(values, examined.refetch))
    except (CheckpointError, FormatError) as error:
        text = str(error)
        if examined.on_hub:  # the path of the cache means nothing to the user
            text = text.replace(str(folder), examined.name)
        damaged = isinstance(error, FormatError) or _lacks_files(folder)
        fix = examined.refetch if damaged else ""
        findings.append(Finding("checkpoint", Severity.FAULT, text, fix))
    sound = not any(f.severity is Severity.FAULT for f in findings)
    return Diagnosis(
        path=examined.name,
        head=f"{count} {'tensors of MTP layers' if appended else 'mtp.* tensors'}"
        if sound
        else None,
        draft=None,
        runs_with=(convert,) if sound else (),
        memory=None,
        findings=tuple(findings),
    )


def _head_values(checkpoint: Checkpoint) -> HeadValues:
    """What is wrong with the values of the head's weights."""
    found = weights_of(checkpoint.tensors).by_name
    weights = {name: weight for name, weight in found.items() if checkpoint.in_head(name)}

    def chunks(name: str) -> Iterator[NDArray[np.float32]]:
        weight = weights[name]
        start, values = 0, _FIRST_VALUES
        while start < row_count(weight):
            stop = min(start + max(values // weight.shape[-1], 1), row_count(weight))
            yield weight.rows(start, stop).astype(np.float32)
            start, values = stop, _SLICE_VALUES

    return inspect_values({name: weight.shape for name, weight in weights.items()}, chunks)


def original_of_checkpoint(model: str) -> str | None:
    """The model on the hub that a checkpoint names as its origin; None if it names none."""
    hub = hub_model(model)
    folder = Path(model) if hub is None else download(*hub, ())
    origin = _Examined(folder, str(hub or model), on_hub=hub is not None).original
    return None if origin == UNKNOWN_ORIGINAL else origin


def original_by_card(model: HubModel) -> str | None:
    """The `base_model` in the card of a repository of GGUFs; None if it names none."""
    try:
        card = hf_hub_download(model.hub_id, "README.md", revision=model.revision)
    except Exception:  # the repository has no card, or cannot be reached any more
        return None
    named = _card_origin(Path(card).parent)
    return None if named == model.hub_id else named


def measure_head(model: Model, side: _Side, name: str, decode: Decoder) -> Iterator[Finding]:
    """Compare the head of a GGUF with the model that it should have been made from.

    side: that model. name: its name as the user gave it, for the fix. decode: dequantizes blocks
    (ggml's own decoder).
    """
    fix = runnable(regraft(model, name), model)
    ours = GgufSide(model, decode)
    trunk = model.head.trunk_layers
    for found in compare_tensors(_Head(side, trunk), _Head(ours, trunk)):
        if found.outcome in (Outcome.SAME, Outcome.ROUNDED):
            continue
        code, text = _explained(found, side, ours)
        yield Finding(code, Severity.FAULT, text, fix)


def _explained(found: TensorDifference, source: _Side, ours: GgufSide) -> tuple[str, str]:
    """Code and text of the finding for a tensor that differs from what the source makes."""
    if found.error is None:
        return "head-values", f"{found.name}: {found.outcome.value} {found.note}".rstrip()
    rows = min(64, int(np.prod(source.tensors()[found.name][0][1:])))
    wanted = source.values(found.name, 0, rows).astype(np.float64)
    given = ours.values(found.name, 0, rows).astype(np.float64)
    half = wanted.shape[1] // 2
    guesses = []
    if "norm" in found.name:
        guesses = [
            ("norm-not-raised", wanted - 1, "was never raised by 1"),
            ("norm-raised-twice", wanted + 1, "was raised by 1 twice"),
        ]
    if found.name.endswith("nextn.eh_proj.weight"):
        swapped = np.concatenate([wanted[:, half:], wanted[:, :half]], axis=1)
        transposed = _transposed(source, found.name, rows)
        guesses = [
            ("eh-proj-swapped", swapped, "has its halves swapped (embedding, hidden state)"),
            ("eh-proj-transposed", transposed, "was written column by column"),
        ]
    scale = np.square(wanted).sum() or 1.0
    for code, guess, text in guesses:
        error = float(np.sqrt(np.square(given - guess).sum() / scale))
        if error < found.error / 4:
            return (
                code,
                f"{found.name} {text}: error {found.error:.3g} as it is, {error:.2g} corrected",
            )
    return "head-values", (
        f"{found.name} is not the source's: relative error {found.error:.3g}, more than "
        f"{found.types[1]} explains (another fine-tune, or a wrong transform)"
    )


def _transposed(source: _Side, name: str, rows: int) -> NDArray[np.float64]:
    """The first rows of a matrix [height, width] whose transpose is misread as [height, width]."""
    shape, _ = source.tensors()[name]
    width, height = shape[0], math.prod(shape[1:])
    columns = -(-rows * width // height)  # rows of the transpose that contain them
    parts = [
        source.values(name, at, min(at + _SLICE_ROWS, height))[:, :columns]
        for at in range(0, height, _SLICE_ROWS)
    ]
    transposed = np.concatenate(parts).T.astype(np.float64)
    first: NDArray[np.float64] = transposed.reshape(-1)[: rows * width]
    return first.reshape(rows, width)


class _Head:
    """A side of a comparison, restricted to the blocks after the trunk's."""

    def __init__(self, side: _Side, trunk_layers: int) -> None:
        self.name, self.exact = side.name, side.exact
        self.raw, self.values = side.raw, side.values
        self._held = {
            name: tensor
            for name, tensor in side.tensors().items()
            if (block := block_of(name)) is not None and block >= trunk_layers
        }

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return self._held


def _head(examined: _Examined, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings for a head that is missing, not in the config, or incomplete."""
    claimed = {
        LAYERS_KEY: (checkpoint.mtp_layers(), "mtp.* tensor"),
        APPENDED_KEY: (checkpoint.text_config.get(APPENDED_KEY), "MTP layer"),
    }
    names = list(filter(checkpoint.in_head, checkpoint.tensors))
    if not names:
        text = "the checkpoint has no mtp.* tensors"
        code = "no-head"
        for key, (layers, part) in claimed.items():
            if layers:
                code = "claimed-head"
                text = f"{key} is {layers}, but the checkpoint has no {part}"
        fix = f"mtp-gguf convert {examined.quoted} --from {examined.original} --mtp-f16"
        yield Finding(code, Severity.FAULT, text, fix)
    expected = checkpoint.text_config.get("num_experts")
    found = {
        int(number)
        for name in names
        if (number := name.partition(".mlp.experts.")[2].partition(".")[0]).isdecimal()
    }
    if not found or not is_whole(expected):
        return
    absent = next((number for number in range(expected) if number not in found), None)
    if absent is not None:
        yield Finding(
            "incomplete-head",
            Severity.FAULT,
            f"the head's experts are half present: {len(found)} of {expected}, expert {absent} is "
            "missing",
            examined.refetch,
        )


def _lacks_files(folder: Path) -> bool:
    """Whether weight files that the index names, or all weight files, are missing."""
    try:
        named = set((read_weight_map(folder) or {}).values())
    except (CheckpointError, FormatError):
        return False
    return not all((folder / name).is_file() for name in named) or not any(
        folder.glob("*.safetensors")
    )


def _config_origin(folder: Path) -> str | None:
    """The hub id that the config gives for the model."""
    try:
        named: Any = parse_json((folder / "config.json").read_text(encoding="utf-8"))
        return _hub_id(named.get("_name_or_path"))
    except (OSError, ValueError, AttributeError):
        return None


def _card_origin(folder: Path) -> str | None:
    """The hub id of `base_model` of the model card; the first one if there are several."""
    try:
        base: Any = ModelCard.load(folder / "README.md").data.base_model
    except Exception:  # the card is not under our control and may contain any YAML
        return None
    return _hub_id(base[0] if isinstance(base, list) and base else base)


def _hub_id(named: Any) -> str | None:
    return named if isinstance(named, str) and _HUB_ID.fullmatch(named) else None
