"""Plans the conversion of a Hugging Face checkpoint."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.files.tensor_types import NVFP4
from mtp_gguf.gguf_tools.heads.fastmtp import OUTPUT_TENSOR, SHORT_HEAD_SUFFIX, DraftLayout
from mtp_gguf.gguf_tools.heads.head import block_of
from mtp_gguf.gguf_tools.heads.nextn import BLOCKS
from mtp_gguf.gguf_tools.heads.transplant import check_list_for

from ..checkpoints.checkpoint import Checkpoint, is_vision
from ..checkpoints.quantized import wants_16_bit_inputs
from ..checkpoints.source_rows import SourceRows
from ..checkpoints.weights import Nvfp4Weight
from ..families.family import find_family
from ..families.target_model import HeadChoice, TargetModel
from ..heads.draft_vocabulary import DraftVocabulary, rank
from ..resolve import model_name, open_headers
from ..tokenizers.chat_templates import chat_templates
from ..tokenizers.tokenizer import pre_tokenizer, special_ids, tokenizer_metadata
from ..tokenizers.tokenizer_files import load_tokenizer
from .general import general_metadata
from .plan import Content, Plan, Request, imatrix_metadata, output_path, plans_of, sidecar_path
from .plan_mmproj import plan_mmproj
from .precision import FILE_TYPES
from .recipe import Recipe, Target


def make_plans(checkpoint: Checkpoint, request: Request) -> tuple[Plan, ...]:
    """Decide everything about a conversion; all errors of the request are raised here.

    The plan of a file with the head alone comes after those of the model, that of an mmproj file
    last.
    """
    vision = () if request.mmproj is None else (plan_mmproj(checkpoint, request),)
    if request.head is HeadChoice.VISION:
        return vision
    content = make_content(checkpoint, request)
    if vision:
        skipped = {name: why for name, why in content.skipped.items() if not is_vision(name)}
        content = replace(content, skipped=skipped)
    return (*plans_of(content, request), *_sidecar(checkpoint, request, content), *vision)


def _sidecar(checkpoint: Checkpoint, request: Request, whole: Content) -> tuple[Plan, ...]:
    """The plan of the file with the head alone, if one is requested.

    whole: the contents of the model, which have the skipped tensors.
    """
    if request.sidecar is None:
        return ()
    asked = replace(
        request,
        quant=request.sidecar,
        also=(),
        head=HeadChoice.ALONE,
        beside=True,
        output=sidecar_path(request, whole.metadata, request.sidecar),
    )
    content = replace(make_content(checkpoint, asked), skipped={})
    return plans_of(content, asked)


def make_content(checkpoint: Checkpoint, request: Request) -> Content:
    """The contents of the converted model; CheckpointError if the checkpoint is not convertible."""
    family = find_family(checkpoint.config, checkpoint.folder / "config.json")
    target_model = family.target_model(checkpoint, request.head)
    rows = SourceRows(checkpoint)
    for target in target_model.targets:
        rows.check(target)
    tokens, draft, template_notes = _vocabulary(checkpoint, request, target_model)
    layout = request.draft.layout if request.draft else None
    targets = target_model.targets
    id_map = None
    if draft is not None and layout is not None and layout is not DraftLayout.IDS:
        assert target_model.output is not None  # conversions of only a block use the ids layout
        targets, id_map = with_draft_rows(
            targets, target_model.output, target_model.n_trunk, draft, layout
        )
    nvfp4 = {}
    if request.head is not HeadChoice.ALONE:
        nvfp4 = nvfp4_targets(targets, rows, range(target_model.n_trunk))
    targets = tuple(replace(t, fixed=NVFP4) if t.name in nvfp4 else t for t in targets)
    general = general_metadata(
        checkpoint.folder, request.model_name, target_model.targets, FILE_TYPES[request.quant]
    )
    metadata = {
        "general.architecture": Value(ValueType.STRING, target_model.architecture),
        **general,
        **target_model.hparams,
        **nvfp4_metadata(nvfp4),
        **imatrix_metadata(request.imatrix),
        **(draft.metadata(layout is DraftLayout.IDS) if draft else {}),
        **tokens,
    }
    return Content(
        metadata=metadata,
        targets=targets,
        id_map=id_map,
        head_blocks=range(target_model.n_trunk, target_model.n_trunk + target_model.n_mtp),
        layout=layout,
        draft=draft,
        skipped=target_model.skipped,
        scales={**target_model.computed, **nvfp4_scales(nvfp4)},
        notes=template_notes,
    )


def planned_file(model: str, quant: str, mtp_from: str | None) -> tuple[str, bool]:
    """The default name of the file that a conversion writes, and whether it will have a head.

    Only headers are read, also of models on the hub. quant: a key of FILE_TYPES. mtp_from: the
    model to take the head from. CheckpointError if the conversion is not possible.
    """
    request = Request(quant, HeadChoice.WITH_TRUNK, model_name=model_name(model))
    with ExitStack() as opened:
        part = HeadChoice.NONE if mtp_from else HeadChoice.WITH_TRUNK
        checkpoint = opened.enter_context(open_headers(model, part))
        if mtp_from:
            donor = opened.enter_context(open_headers(mtp_from, HeadChoice.BLOCK))
            checkpoint = checkpoint.with_head_of(donor)
        content = make_content(checkpoint, request)
    return output_path(request, content.metadata, quant).name, bool(content.head_blocks)


def _vocabulary(
    checkpoint: Checkpoint, request: Request, target_model: TargetModel
) -> tuple[dict[str, Value], DraftVocabulary | None, tuple[str, ...]]:
    """The tokenizer's keys, the draft vocabulary if one is requested, and notes on chat templates.

    The model that a block is added to has a tokenizer, so the block's checkpoint needs none.
    """
    folder, n_vocab = checkpoint.folder, target_model.n_vocab
    bare = request.head is HeadChoice.BLOCK and request.draft is None
    if bare and not any((folder / name).exists() for name in ("tokenizer.json", "vocab.json")):
        return {}, None, ()
    files = load_tokenizer(folder)
    required = special_ids(files, n_vocab)
    draft = None
    if request.draft:
        if not target_model.n_mtp:
            raise RequestError("--fastmtp: the draft vocabulary belongs to an MTP head, found none")
        if BLOCKS[target_model.architecture].graph:  # a runtime to come may use the others' list
            check_list_for(target_model.architecture, request.draft.layout, "--fastmtp")
        draft = rank(request.draft, required, n_vocab, lambda: nullcontext(files.tokenizer))
    pre = request.tokenizer_pre or pre_tokenizer(files, target_model.splits)
    templates = chat_templates(folder, files.settings)
    tokens = tokenizer_metadata(files, n_vocab, pre, target_model.tokens)
    return {**tokens, **templates.keys}, draft, templates.notes


def nvfp4_targets(
    targets: Sequence[Target], rows: SourceRows, blocks: range
) -> dict[str, list[Nvfp4Weight]]:
    """The targets that keep the checkpoint's NVFP4 blocks, with their sources, by name.

    blocks: those of the trunk. The MTP head is written in its requested type, because no other tool
    supports a head in NVFP4.
    """
    nvfp4 = {}
    for target in targets:
        block = block_of(target.name)
        if block is None or block in blocks:
            sources = rows.nvfp4_sources(target)
            if sources and target.name.endswith(".weight"):
                nvfp4[target.name] = sources
    return nvfp4


def nvfp4_scales(nvfp4: Mapping[str, Sequence[Nvfp4Weight]]) -> dict[str, NDArray[np.float32]]:
    """The `.scale` and `.input_scale` tensors of NVFP4 blocks, with one value per expert.

    Omitted, as in llama.cpp's converter, if all values are 1.
    """
    scales = {}
    for name, sources in nvfp4.items():
        stem = name.removesuffix("weight")
        for suffix, values in (
            ("scale", [source.tensor_scale() for source in sources]),
            ("input_scale", [source.input_scale() for source in sources]),
        ):
            scale = np.array(values, np.float32)
            tolerance = 1e-5 if len(sources) > 1 else 0.0
            if not np.allclose(scale, 1.0, rtol=tolerance, atol=1e-6):
                scales[stem + suffix] = scale
    return scales


def nvfp4_metadata(nvfp4: Mapping[str, Sequence[Nvfp4Weight]]) -> dict[str, Value]:
    """Metadata for NVFP4 tensors that need 16-bit activations (ModelOpt's W4A16_NVFP4)."""
    names = sorted(name for name, sources in nvfp4.items() if wants_16_bit_inputs(sources[0]))
    if not names:
        return {}
    return {
        "general.tensor_extra.name": Value(ValueType.STRING, tuple(names)),
        "general.tensor_extra.prec_a4": Value(ValueType.BOOL, tuple(False for _ in names)),
    }


def with_draft_rows(
    targets: Sequence[Target],
    output: Target,
    n_trunk: int,
    draft: DraftVocabulary,
    layout: DraftLayout,
) -> tuple[tuple[Target, ...], NDArray[np.int64] | None]:
    """The targets and the ids to write as a tensor, according to the layout.

    output: the target whose rows are the vocabulary.
    """
    if layout is DraftLayout.IDS:
        return tuple(targets), None
    table = layout is DraftLayout.TABLE
    name = f"blk.{n_trunk}.{SHORT_HEAD_SUFFIX}" if table else OUTPUT_TENSOR
    short = replace(
        output,
        name=name,
        shape=(output.shape[0], len(draft.ids)),
        recipe=Recipe(output.recipe.sources, row_order=draft.ids),
    )
    return (*(t for t in targets if t.name != name), short), draft.ids
