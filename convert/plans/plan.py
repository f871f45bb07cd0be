"""Plans a conversion before any weights are read: what is written, how, and to which files."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.format import Layout, RawValue, TensorSpec, Value, ValueType, lay_out
from mtp_gguf.gguf_tools.files.rewrite import inserted
from mtp_gguf.gguf_tools.files.tensor_types import F32, I64, NVFP4, Q8_0, TensorType
from mtp_gguf.gguf_tools.heads.acceptance import reserved
from mtp_gguf.gguf_tools.heads.draft_list import BEFORE_TOKENIZER
from mtp_gguf.gguf_tools.heads.fastmtp import ID_MAP_TENSOR, DraftLayout
from mtp_gguf.gguf_tools.heads.head import block_of, part_of
from mtp_gguf.gguf_tools.heads.head_files import PREFIX as HEAD_PREFIX
from mtp_gguf.gguf_tools.heads.nextn import OUR_ARCHITECTURES
from mtp_gguf.gguf_tools.imatrix import Imatrix
from mtp_gguf.gguf_tools.model import shard_path
from mtp_gguf.quantize import ggml

from ..families.target_model import HeadChoice
from ..heads.draft_vocabulary import DraftVocabulary
from ..options import DraftOptions
from .general import file_stem
from .plan_notes import notes
from .precision import FILE_TYPES, NVFP4_FILE_TYPE, UNQUANTIZED, Override, choose_types
from .recipe import Target

FILE_TYPE_KEY = "general.file_type"
RECIPE_KEY = "mtp_gguf.recipe"  # an array of strings, lines of `--recipe`


@dataclass(frozen=True)
class Request:
    """The user's request. `quant` and the entries of `also` are distinct keys of FILE_TYPES.

    head_type: of the head's matrices; None for that of an unquantized base, or else Q8_0.
    also: further precisions, each written to a separate file next to the first.
    mmproj: type of the mmproj file; None without one. sidecar: precision of a file with the head
    alone; None without one. recipe: lines of a recipe, which the overrides carry out and the
    metadata record. measured: reserve the keys of the acceptance in files that can draft.
    beside: the file is a head alone, beside its model.
    """

    quant: str
    head: HeadChoice
    head_type: TensorType | None = None
    also: tuple[str, ...] = ()
    mmproj: TensorType | None = None
    sidecar: str | None = None
    overrides: tuple[Override, ...] = ()
    imatrix: Imatrix | None = None
    recipe: tuple[str, ...] = ()
    draft: DraftOptions | None = None
    tokenizer_pre: str | None = None
    model_name: str | None = None
    split_max_size: int | None = None
    output: Path | None = None
    measured: bool = False
    beside: bool = False

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        output = self.output or Path()
        return output if output.is_dir() else output.parent


@dataclass(frozen=True, eq=False)
class Content:
    """The contents of the model before types are chosen, which are the same in every precision.

    metadata: all keys in file order, with a placeholder for the file type. targets: every tensor
    made from weights. id_map: ids that are written as a tensor. head_blocks: the blocks of the MTP
    head. layout: that of the draft vocabulary, if there is one. draft: the requested draft
    vocabulary. skipped: unused source tensors with the reason. scales: F32 vectors to write in
    addition to the targets, by name. notes: sentences for the user.
    """

    metadata: Mapping[str, Value | RawValue]
    targets: tuple[Target, ...]
    id_map: NDArray[np.int64] | None
    head_blocks: range
    layout: DraftLayout | None
    draft: DraftVocabulary | None
    skipped: dict[str, str]
    scales: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class PlannedTensor:
    """A tensor to write: a target with its type, or bytes that are already known.

    part: the part of the model, as returned by `part_of`.
    """

    spec: TensorSpec
    part: str
    target: Target | None = None
    data: NDArray[np.int64] | NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class Shard:
    """One file to write."""

    path: Path
    tensors: tuple[PlannedTensor, ...]
    layout: Layout


@dataclass(frozen=True, eq=False)
class Plan:
    """A fully decided conversion to one precision.

    skipped: unused source tensors with the reason. notes: sentences for the user. is_measured:
    whether keys are reserved for the acceptance of its head.
    """

    quant: str
    shards: tuple[Shard, ...]
    skipped: dict[str, str]
    notes: tuple[str, ...]
    draft: DraftVocabulary | None
    imatrix: Imatrix | None
    is_measured: bool = False

    @property
    def tensors(self) -> Iterator[PlannedTensor]:
        """All tensors in file order."""
        for shard in self.shards:
            yield from shard.tensors

    @property
    def has_trunk(self) -> bool:
        """Whether this is a file of the model, and not of its head or vision tower alone."""
        return _has_trunk(self.tensors)

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(shard.layout.size for shard in self.shards)


def plans_of(content: Content, request: Request) -> tuple[Plan, ...]:
    """A plan for each requested precision, with the same tensors in the same order."""
    imatrix = (
        request.imatrix.fitted({t.name: t.shape for t in content.targets})
        if request.imatrix
        else None
    )
    return tuple(
        _plan(content, request, quant, imatrix) for quant in (request.quant, *request.also)
    )


def _plan(content: Content, request: Request, quant: str, imatrix: Imatrix | None) -> Plan:
    head_type = request.head_type or UNQUANTIZED.get(quant, Q8_0)
    overrides = (
        *request.overrides,
        *(Override(rf"^blk\.{block}\.", head_type) for block in content.head_blocks),
    )
    file_type = FILE_TYPES[quant]
    if quant in UNQUANTIZED and any(t.fixed is NVFP4 for t in content.targets):
        file_type = NVFP4_FILE_TYPE
    metadata = {**content.metadata, FILE_TYPE_KEY: Value(ValueType.U32, file_type)}
    if request.recipe:
        metadata[RECIPE_KEY] = Value(ValueType.STRING, request.recipe)
    types = choose_types(content.targets, metadata, quant, overrides, imatrix)
    _check_importance(types, imatrix)
    head_block = content.head_blocks.start if content.head_blocks else None

    def part(name: str) -> str:
        return part_of(name, head_block, content.layout)

    tensors = [
        PlannedTensor(TensorSpec(t.name, t.shape, types[t.name]), part(t.name), t)
        for t in content.targets
    ]
    if content.id_map is not None:
        spec = TensorSpec(ID_MAP_TENSOR, (len(content.id_map),), I64)
        tensors.append(PlannedTensor(spec, part(spec.name), data=content.id_map))
    for name, scale in content.scales.items():
        spec = TensorSpec(name, scale.shape, F32)
        tensors.append(PlannedTensor(spec, part(name), data=scale))
    tensors.sort(key=lambda t: file_order(t.spec.name))
    is_measured = request.measured and _can_draft(tensors, metadata, alone=request.beside)
    if is_measured:
        metadata = inserted(metadata, reserved(), BEFORE_TOKENIZER)
    path = output_path(request, metadata, quant)
    specs = [(t.spec, t.target) for t in tensors]
    return Plan(
        quant=quant,
        shards=_shards(tensors, metadata, path, request.split_max_size),
        skipped=content.skipped,
        notes=(
            *content.notes,
            *notes(content.skipped, specs, quant, request.overrides, overrides, imatrix),
            *_draft_notes(content.draft, request),
        ),
        draft=content.draft,
        imatrix=imatrix,
        is_measured=is_measured,
    )


def _has_trunk(tensors: Iterable[PlannedTensor]) -> bool:
    return any(t.part == "base" and block_of(t.spec.name) is not None for t in tensors)


def _can_draft(
    tensors: Sequence[PlannedTensor], metadata: Mapping[str, Value | RawValue], *, alone: bool
) -> bool:
    """Whether a file is of a model and its head, with which our runtime drafts.

    alone: the head alone will do, beside its model.
    """
    architecture = metadata.get("general.architecture")
    ours = isinstance(architecture, Value) and architecture.data in OUR_ARCHITECTURES
    return ours and (alone or _has_trunk(tensors)) and any(t.part == "head" for t in tensors)


def _draft_notes(draft: DraftVocabulary | None, request: Request) -> tuple[str, ...]:
    if draft is not None and draft.warning:
        return (draft.warning,)
    if draft is None or draft.coverage or not request.draft or request.draft.ids_file:
        return ()
    return (
        "the draft vocabulary is ranked by token id; ranking it by a corpus of text like yours "
        "gives a higher acceptance rate: --fastmtp-corpus FILES",
    )


def _check_importance(types: Mapping[str, TensorType], imatrix: Imatrix | None) -> None:
    for name, kind in types.items():
        if ggml.needs_importance(kind) and (imatrix is None or name not in imatrix.weights):
            raise RequestError(
                f"{name}: {kind.name} needs an imatrix with this tensor, found none; pass one with "
                "--imatrix, or choose another type"
            )


def file_order(name: str) -> tuple[int, str]:
    """Sort key for llama-quantize's order: tensors outside blocks, then by block and name."""
    match = re.match(r"blk\.(\d+)\.", name)
    return (int(match[1]) if match else -1, name)


def imatrix_metadata(imatrix: Imatrix | None) -> dict[str, Value]:
    """The keys in which llama-quantize records its imatrix; the file without its folder."""
    if imatrix is None:
        return {}
    keys = {"quantize.imatrix.file": Value(ValueType.STRING, imatrix.path.name)}
    if imatrix.datasets:
        keys["quantize.imatrix.dataset"] = Value(ValueType.STRING, imatrix.datasets[0])
    keys["quantize.imatrix.entries_count"] = Value(ValueType.U32, len(imatrix.weights))
    if imatrix.chunks:
        keys["quantize.imatrix.chunks_count"] = Value(ValueType.U32, imatrix.chunks)
    return keys


def _shards(
    tensors: Sequence[PlannedTensor],
    metadata: Mapping[str, Value | RawValue],
    path: Path,
    limit: int | None,
) -> tuple[Shard, ...]:
    groups: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if limit and groups[-1] and size + tensor.spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.spec.nbytes
    shards = []
    for index, group in enumerate(groups):
        keys = dict(metadata) if index == 0 else {}
        if len(groups) > 1:
            keys |= {
                "split.no": Value(ValueType.U16, index),
                "split.count": Value(ValueType.U16, len(groups)),
                "split.tensors.count": Value(ValueType.I32, len(tensors)),
            }
        target = path if len(groups) == 1 else shard_path(path, index, len(groups))
        shards.append(Shard(target, tuple(group), lay_out(keys, [t.spec for t in group])))
    return tuple(shards)


def output_path(request: Request, metadata: Mapping[str, Value | RawValue], quant: str) -> Path:
    """The output path: the requested file, or a file named after the model in that folder."""
    output = request.output or Path()
    if output.is_dir():
        prefix = HEAD_PREFIX if request.head is HeadChoice.ALONE else ""
        return output / f"{prefix}{file_stem(metadata, quant)}.gguf"
    return output if quant == request.quant else path_of_another(output, request.quant, quant)


def sidecar_path(request: Request, metadata: Mapping[str, Value | RawValue], quant: str) -> Path:
    """The path of a file with the head alone, named after the model's in the same precision."""
    path = output_path(request, metadata, request.quant)
    if quant != request.quant:
        path = path_of_another(path, request.quant, quant)
    return path.with_name(HEAD_PREFIX + path.name)


def path_of_another(output: Path, quant: str, other: str) -> Path:
    """The path for another precision, derived from `output`, a file of precision `quant`.

    Replaces the precision in the file's name, keeping its case, or appends it to the stem:
    `model-Q4_K_M.gguf` and `model.gguf` both become `model-Q8_0.gguf`.
    """
    found = list(re.finditer(rf"(?<![A-Za-z0-9]){quant}(?![A-Za-z0-9_])", output.stem, re.I))
    if not found:
        return output.with_name(f"{output.stem}-{other}{output.suffix}")
    at = found[-1]
    new = other.lower() if at[0].islower() else other
    stem = output.stem[: at.start()] + new + output.stem[at.end() :]
    return output.with_name(stem + output.suffix)
