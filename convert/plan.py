"""The whole of a conversion, decided before a tensor is read: what is written, how, and where."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.fastmtp import (
    ID_MAP_TENSOR,
    OUTPUT_TENSOR,
    SHORT_HEAD_SUFFIX,
    DraftLayout,
)
from mtp_gguf.gguf_tools.format import Layout, TensorSpec, Value, ValueType, lay_out
from mtp_gguf.gguf_tools.head import part_of
from mtp_gguf.gguf_tools.shards import shard_path
from mtp_gguf.gguf_tools.tensor_types import I64, TensorType
from mtp_gguf.native import ggml

from . import draft_vocabulary
from .checkpoint import Checkpoint
from .draft_vocabulary import DraftVocabulary
from .family import Blueprint, HeadChoice, find_family
from .general import file_stem, general_metadata
from .imatrix import Imatrix
from .precision import FILE_TYPES, Override, block_length, choose_types
from .recipe import Recipe, Target
from .source_rows import SourceRows
from .tokenizer import load_tokenizer, special_ids, tokenizer_metadata


@dataclass(frozen=True)
class DraftRequest:
    """The FastMTP draft vocabulary asked for: `size` None takes the default.

    Ranked by the ids file where there is one, else by the corpus, else by id.
    """

    layout: DraftLayout
    size: int | None = None
    corpus: tuple[Path, ...] = ()
    ids_file: Path | None = None


@dataclass(frozen=True)
class Request:
    """What the user asked for. `quant` is a key of FILE_TYPES."""

    quant: str
    head: HeadChoice
    head_type: TensorType
    overrides: tuple[Override, ...] = ()
    imatrix: Imatrix | None = None
    draft: DraftRequest | None = None
    tokenizer_pre: str | None = None
    model_name: str | None = None
    split_max_size: int | None = None
    output: Path | None = None


@dataclass(frozen=True, eq=False)
class PlannedTensor:
    """A tensor to write: a target at its type, or bytes that are known already.

    part: as `part_of` names it.
    """

    spec: TensorSpec
    part: str
    target: Target | None = None
    data: NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class Shard:
    """One file to write."""

    path: Path
    tensors: tuple[PlannedTensor, ...]
    layout: Layout


@dataclass(frozen=True, eq=False)
class Plan:
    """A conversion that only needs doing.

    skipped: source tensors that are not used, with the reason. notes: sentences for the user.
    """

    shards: tuple[Shard, ...]
    skipped: dict[str, str]
    notes: tuple[str, ...]
    draft: DraftVocabulary | None
    imatrix: Imatrix | None

    @property
    def tensors(self) -> Iterator[PlannedTensor]:
        """All tensors in file order."""
        for shard in self.shards:
            yield from shard.tensors

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(shard.layout.size for shard in self.shards)


def make_plan(checkpoint: Checkpoint, request: Request) -> Plan:
    """Decide everything about a conversion; errors of any kind come from here, not later."""
    family = find_family(checkpoint.config, checkpoint.folder / "config.json")
    blueprint = family.blueprint(checkpoint, request.head)
    rows = SourceRows(checkpoint)
    for target in blueprint.targets:
        rows.check(target)
    tokenizer = load_tokenizer(checkpoint.folder)
    required = special_ids(checkpoint.folder, tokenizer, blueprint.n_vocab)
    draft = None
    if request.draft:
        if not blueprint.n_mtp:
            raise RequestError("--fastmtp: the draft vocabulary belongs to an MTP head, found none")
        draft = _rank(request.draft, tokenizer, required, blueprint.n_vocab)
    head_blocks = range(blueprint.n_trunk, blueprint.n_trunk + blueprint.n_mtp)
    overrides = (
        *request.overrides,
        *(Override(rf"^blk\.{block}\.", request.head_type) for block in head_blocks),
    )
    layout = request.draft.layout if request.draft else None
    head_block = blueprint.n_trunk if blueprint.n_mtp else None
    targets = _with_draft_rows(blueprint, draft, layout)
    general = general_metadata(
        checkpoint.folder, request.model_name, blueprint.targets, FILE_TYPES[request.quant]
    )
    architecture = {
        "general.architecture": Value(ValueType.STRING, blueprint.architecture),
        **general,
        **blueprint.hparams,
        **_imatrix_metadata(request.imatrix),
        **(draft.metadata(layout is DraftLayout.IDS) if draft else {}),
    }
    metadata = architecture | tokenizer_metadata(
        checkpoint.folder, tokenizer, blueprint.n_vocab, request.tokenizer_pre
    )
    imatrix = request.imatrix.fitted(targets) if request.imatrix else None
    types = choose_types(targets, architecture, request.quant, overrides, imatrix)
    _check_importance(types, imatrix)
    tensors = [
        PlannedTensor(
            TensorSpec(t.name, t.shape, types[t.name]), part_of(t.name, head_block, layout), t
        )
        for t in targets
    ]
    if draft is not None and layout is not DraftLayout.IDS:
        spec = TensorSpec(ID_MAP_TENSOR, (len(draft.ids),), I64)
        tensors.append(PlannedTensor(spec, part_of(spec.name, head_block, layout), data=draft.ids))
    tensors.sort(key=lambda t: _file_order(t.spec.name))
    return Plan(
        shards=_shards(tensors, metadata, request, general),
        skipped=blueprint.skipped,
        notes=tuple(_notes(blueprint, tensors, request, overrides, draft)),
        draft=draft,
        imatrix=imatrix,
    )


def _rank(
    request: DraftRequest, tokenizer: Tokenizer, required: Sequence[int], n_vocab: int
) -> DraftVocabulary:
    size = request.size or draft_vocabulary.default_size(n_vocab, len(required))
    if request.ids_file:
        return draft_vocabulary.rank_by_list(request.ids_file, required, n_vocab, request.size)
    if request.corpus:
        return draft_vocabulary.rank_by_corpus(request.corpus, tokenizer, required, n_vocab, size)
    return draft_vocabulary.rank_by_id(required, n_vocab, size)


def _with_draft_rows(
    blueprint: Blueprint, draft: DraftVocabulary | None, layout: DraftLayout | None
) -> list[Target]:
    """The targets, with the output's rows of the draft vocabulary where the layout stores them."""
    targets = list(blueprint.targets)
    if draft is None or layout is DraftLayout.IDS:
        return targets
    name = OUTPUT_TENSOR
    if layout is DraftLayout.TABLE:
        name = f"blk.{blueprint.n_trunk}.{SHORT_HEAD_SUFFIX}"
    output = blueprint.output
    short = replace(
        output,
        name=name,
        shape=(output.shape[0], len(draft.ids)),
        recipe=Recipe(output.recipe.sources, row_order=draft.ids),
    )
    return [*(t for t in targets if t.name != name), short]


def _check_importance(types: Mapping[str, TensorType], imatrix: Imatrix | None) -> None:
    for name, kind in types.items():
        if ggml.needs_importance(kind) and (imatrix is None or name not in imatrix.weights):
            raise RequestError(
                f"{name}: {kind.name} needs an imatrix that has this tensor, found none; pass one "
                "with --imatrix, or choose another type"
            )


def _file_order(name: str) -> tuple[int, str]:
    """llama-quantize's order of tensors: those of no block first, then by block, by name."""
    match = re.match(r"blk\.(\d+)\.", name)
    return (int(match[1]) if match else -1, name)


def _imatrix_metadata(imatrix: Imatrix | None) -> dict[str, Value]:
    """What llama-quantize notes of the imatrix it used; the file by its name alone."""
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
    metadata: dict[str, Value],
    request: Request,
    general: dict[str, Value],
) -> tuple[Shard, ...]:
    path = _output_path(request, general)
    groups: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        limit = request.split_max_size
        if limit and groups[-1] and size + tensor.spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.spec.nbytes
    shards = []
    for index, group in enumerate(groups):
        keys = metadata if index == 0 else {}
        if len(groups) > 1:
            keys = keys | {
                "split.no": Value(ValueType.U16, index),
                "split.count": Value(ValueType.U16, len(groups)),
                "split.tensors.count": Value(ValueType.I32, len(tensors)),
            }
        target = path if len(groups) == 1 else shard_path(path, index, len(groups))
        shards.append(Shard(target, tuple(group), lay_out(keys, [t.spec for t in group])))
    return tuple(shards)


def _output_path(request: Request, general: dict[str, Value]) -> Path:
    """Where to write: the file asked for, or one named after the model in the folder asked for."""
    output = request.output or Path()
    if not output.is_dir():
        return output
    prefix = "mtp-" if request.head is HeadChoice.ALONE else ""
    return output / f"{prefix}{file_stem(general, request.quant)}.gguf"


def _notes(
    blueprint: Blueprint,
    tensors: Sequence[PlannedTensor],
    request: Request,
    overrides: Sequence[Override],
    draft: DraftVocabulary | None,
) -> Iterator[str]:
    for reason in sorted(set(blueprint.skipped.values())):
        count = sum(r == reason for r in blueprint.skipped.values())
        yield f"{count} source tensors skipped: {reason}"
    for block in (256, 128, 64, 32):
        narrow = [
            t.spec
            for t in tensors
            if t.target is not None
            and not t.target.always_f32
            and block_length(t.spec.name, request.quant, overrides) == block
            and t.spec.shape[0] % block
        ]
        if narrow:
            taken = ", ".join(sorted({spec.type.name for spec in narrow}))
            yield (
                f"{len(narrow)} tensors have rows that blocks of {block} do not divide and fall "
                f"back to {taken} (first: {narrow[0].name}, rows of {narrow[0].shape[0]})"
            )
    for override in request.overrides:
        if not any(override.matches(t.spec.name) for t in tensors):
            yield f"--tensor-type {override.pattern}={override.kind.name}: matches no tensor"
    if draft is not None and not draft.coverage and request.draft and not request.draft.ids_file:
        yield (
            "the draft vocabulary is ranked by token id; counted on text like yours it drafts "
            "better: --fastmtp-corpus FILES"
        )
    if request.imatrix is not None:
        missing = [
            t.spec.name
            for t in tensors
            if t.spec.type.is_quantized and t.spec.name not in request.imatrix.weights
        ]
        if missing:
            yield (
                f"the imatrix has nothing for {len(missing)} quantized tensors (first: "
                f"{missing[0]}); they are quantized without it"
            )
