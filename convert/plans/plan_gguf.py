"""Plans the requantization of a GGUF in 16 or 32 bits, with the same bytes as llama-quantize.

Tensors are read like those of a checkpoint (`weights`) and written at other types. The head can be
dropped, extracted or replaced beforehand (gguf_tools/heads/transplant.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import gguf
import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.files.rewrite import OutputSpec, TensorCopy, copies, inserted
from mtp_gguf.gguf_tools.files.safetensors import StoredTensor
from mtp_gguf.gguf_tools.files.tensor_types import BF16, BY_NAME, F16, F32, I64
from mtp_gguf.gguf_tools.heads.draft_list import BEFORE_TOKENIZER, without_draft_keys
from mtp_gguf.gguf_tools.heads.draft_rewrite import without_list
from mtp_gguf.gguf_tools.heads.fastmtp import (
    EMBEDDING_TENSOR,
    ID_MAP_TENSOR,
    IDS_KEY,
    OUTPUT_TENSOR,
    SHORT_HEAD_SUFFIX,
    DraftLayout,
)
from mtp_gguf.gguf_tools.heads.head import block_of, part_of, plain_shape
from mtp_gguf.gguf_tools.heads.transplant import check_takes_a_list, extract, graft, strip
from mtp_gguf.gguf_tools.hub.remote import RemoteSource
from mtp_gguf.gguf_tools.hub.sources import FileSource
from mtp_gguf.gguf_tools.model import Metadata, Model

from ..checkpoints.checkpoint import Checkpoint, PlacedTensor
from ..families.target_model import HeadChoice
from ..heads.draft_vocabulary import DraftVocabulary
from .plan import FILE_TYPE_KEY, Content, Plan, Request, imatrix_metadata, plans_of
from .plan_checkpoint import with_draft_rows
from .precision import fixed_type_tensors
from .recipe import Recipe, Target

_READABLE = (F32, F16, BF16)
_QUANTIZATION_VERSION_KEY = "general.quantization_version"


@dataclass(frozen=True, eq=False)
class Donor:
    """A head from another model: `model` has its tensors' names and shapes.

    targets: how to make them from the weights of `checkpoint`; None if `model` contains them.
    """

    model: Model
    targets: Mapping[str, Target] | None = None
    checkpoint: Checkpoint | None = None


def make_gguf_plans(
    model: Model, request: Request, draft: DraftVocabulary | None, donor: Donor | None
) -> tuple[tuple[Plan, ...], Checkpoint]:
    """The plans to requantize `model`, and the weights that they read.

    draft: the requested list, ranked. All errors of the request are raised here: RequestError if
    the model is already quantized, or if the requested head or draft vocabulary is impossible.
    """
    output = _parts(model, request.head, donor, draft)
    trunk = model.head.trunk_layers
    layout = _layout(output)
    if draft is not None:
        assert request.draft is not None
        layout = request.draft.layout
        check_takes_a_list(model, layout)
        output = _without_list(model, output)
        keys = draft.metadata(layout is DraftLayout.IDS)
        output = OutputSpec(inserted(output.metadata, keys, BEFORE_TOKENIZER), output.tensors)
    metadata = _quantized_metadata(output.metadata, request)
    targets, weights, id_map = _weights(model, output, donor)
    if not targets:
        raise RequestError(
            f"{model.path}: expected tensors to quantize, found a vocabulary alone; convert the "
            "checkpoint, or a GGUF that was not made with --vocab-only"
        )
    kept = fixed_type_tensors(str(model.path), targets, metadata)
    targets = tuple(
        replace(t, fixed=BY_NAME[weights.tensors[t.recipe.sources[0]].stored.dtype])
        if t.name in kept and not t.fixed
        else t
        for t in targets
    )
    if draft is not None and layout is not None:
        targets, id_map = with_draft_rows(targets, _output(model, targets), trunk, draft, layout)
    blocks = [b for t in targets if (b := block_of(t.name)) is not None and b >= trunk]
    content = Content(
        metadata=metadata,
        targets=targets,
        id_map=id_map,
        head_blocks=range(trunk, max(blocks) + 1 if blocks else trunk),
        layout=layout,
        draft=draft,
        skipped={},
    )
    return plans_of(content, request), weights


def _parts(
    model: Model, head: HeadChoice, donor: Donor | None, draft: DraftVocabulary | None
) -> OutputSpec:
    """The requested part of the model with the requested head."""
    if donor is not None:
        if head is HeadChoice.ALONE:
            raise RequestError(
                f"--from: --head-only takes the head from the model itself; run mtp-gguf convert "
                f"{donor.model.path} --head-only"
            )
        return graft(model, donor.model, draft.metadata(with_ids=True) if draft else None)
    claimed = model.first.integer(f"{model.architecture}.nextn_predict_layers")
    if head is HeadChoice.NONE and (model.head.names or claimed):
        return strip(model)
    if head is HeadChoice.ALONE and not model.head.is_alone:
        return extract(model)
    model.head.check_layers()
    if draft is not None and not model.head.names:
        raise RequestError("--fastmtp: the draft vocabulary belongs to an MTP head, found none")
    return OutputSpec(model.metadata(), copies(model))


def _layout(output: OutputSpec) -> DraftLayout | None:
    """The layout of the existing draft vocabulary."""
    names = [tensor.name for tensor in output.tensors]
    if ID_MAP_TENSOR not in names:
        return DraftLayout.IDS if IDS_KEY in output.metadata else None
    short = any(name.endswith(SHORT_HEAD_SUFFIX) for name in names)
    return DraftLayout.TABLE if short else DraftLayout.SIDECAR


def _without_list(model: Model, output: OutputSpec) -> OutputSpec:
    without_list(model)  # raises if the list's rows are the only output
    layout = _layout(output)
    tensors = tuple(
        t for t in output.tensors if part_of(t.name, None, layout) != "draft vocabulary"
    )
    return OutputSpec(without_draft_keys(output.metadata), tensors)


def _quantized_metadata(metadata: Metadata, request: Request) -> Metadata:
    """The keys as llama-quantize writes them: it moves those that it sets to the end."""
    new = {
        _QUANTIZATION_VERSION_KEY: Value(ValueType.U32, gguf.GGML_QUANT_VERSION),
        FILE_TYPE_KEY: Value(ValueType.U32, 0),
        **imatrix_metadata(request.imatrix),
    }
    return {**{k: v for k, v in metadata.items() if k not in new}, **new}


def _weights(
    model: Model, output: OutputSpec, donor: Donor | None
) -> tuple[tuple[Target, ...], Checkpoint, NDArray[np.int64] | None]:
    """The targets, the location of their weights, and a stored list of ids."""
    lent = donor.targets if donor and donor.targets else {}
    tensors: dict[str, PlacedTensor] = {}
    targets = []
    id_map = None
    for copy in output.tensors:
        if copy.name == ID_MAP_TENSOR:
            assert copy.source is not None
            if copy.spec.type is not I64 or 0 in copy.spec.shape:
                raise RequestError(
                    f"{copy.source.name}: {copy.name}: expected ids as I64, "
                    f"found {list(copy.spec.shape)} {copy.spec.type.name}"
                )
            id_map = np.frombuffer(copy.source.read(copy.offset, copy.spec.nbytes), "<i8")
        elif copy.name in lent:
            targets.append(lent[copy.name])
        else:
            tensors[copy.name] = _placed(copy, model.head.trunk_layers)
            shape = plain_shape(copy.spec.shape)
            targets.append(Target(copy.name, shape, Recipe((copy.name,))))
    config = donor.checkpoint.config if donor and donor.checkpoint else {}
    others = donor.checkpoint.tensors if donor and donor.checkpoint else {}
    folder = model.paths[0]
    return tuple(targets), Checkpoint(folder, config, {**others, **tensors}, (), ()), id_map


def _placed(copy: TensorCopy, trunk_layers: int) -> PlacedTensor:
    """The location of a tensor's weights; RequestError if they cannot be quantized."""
    spec, source = copy.spec, copy.source
    assert isinstance(source, FileSource | RemoteSource)
    if spec.type not in _READABLE:
        block = block_of(copy.name)
        step = (
            "make the 16-bit GGUF again without --mtp-type, or leave out the head with --no-mtp"
            if block is not None and block >= trunk_layers
            else "convert from the 16-bit GGUF or the checkpoint, or use mtp-gguf graft, which "
            "copies tensors"
        )
        raise RequestError(
            f"{source.name}: {spec.name}: expected F32, F16 or BF16, found {spec.type.name}; "
            f"quantizing quantized weights again loses precision: {step}"
        )
    if not all(spec.shape):
        raise RequestError(
            f"{source.name}: {spec.name}: expected dimensions from 1, found {list(spec.shape)}"
        )
    shape = tuple(reversed(plain_shape(spec.shape)))
    stored = StoredTensor(spec.name, spec.type.name, shape, copy.offset, spec.nbytes)
    return PlacedTensor(stored, source)


def _output(model: Model, targets: tuple[Target, ...]) -> Target:
    """The target whose rows the head drafts over: its own output, the model's, or the embedding."""
    tensors = {t.name: t for t in targets}
    own = f"blk.{model.head.trunk_layers}.{SHORT_HEAD_SUFFIX}"
    names = (own, OUTPUT_TENSOR, EMBEDDING_TENSOR)
    output = next((tensors[n] for n in names if n in tensors), None)
    n_vocab = model.vocabulary_size
    if output is None or output.shape[1:] != (n_vocab,):
        found = "none" if output is None else f"shape {list(output.shape)}"
        raise RequestError(
            f"{model.path}: expected an output of {n_vocab} rows for a draft vocabulary, "
            f"found {found}"
        )
    return output
