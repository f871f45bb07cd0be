"""Adds an MTP head to a model, removes it, or extracts it into a file: describes the result.

Each function returns an `OutputSpec` and writes nothing. The trunk's tensors, and all metadata that
do not depend on the number of layers, are unchanged.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from ..errors import RequestError
from ..files.format import ArrayRef, Scalar, Value, ValueType
from ..files.rewrite import OutputSpec, TensorCopy, inserted, relabelled
from ..model import Metadata, Model
from ..vision import TENSOR_PREFIXES
from .draft_list import (
    BEFORE_TOKENIZER,
    DRAFT_KEYS,
    list_faults,
    read_draft_list,
    required_ids,
    without_draft_keys,
)
from .fastmtp import ID_MAP_TENSOR, IDS_KEY, DraftLayout
from .head import SHARED_KEY, SHARED_TENSORS, block_of, part_of
from .nextn import BLOCKS, OUR_ARCHITECTURES

# Keys that may be arrays with one entry per block (llama.cpp's get_key_or_arr).
_RECURRENT = "attention.recurrent_layers"
_PER_LAYER = (
    *("attention.head_count", "attention.head_count_kv", _RECURRENT),
    *("feed_forward_length", "expert_feed_forward_length", "expert_used_count"),
    *("swiglu_clamp_exp", "swiglu_clamp_shexp"),
    *("attention.sliding_window_pattern", "attention.compress_ratios", "attention.indexer.types"),
)
_TRUNK_ONLY = "attention.indexer.types"  # may have no entries for MTP layers (glm-dsa.cpp)
# llama.cpp's converter puts the keys in front of these: linear attention, then the tokenizer.
_BEFORE_SSM = (".ssm.", ".attention.recurrent_layers")


def graft(base: Model, donor: Model, draft: Mapping[str, Value] | None = None) -> OutputSpec:
    """`base` with the MTP head of `donor`, which is a whole model or a head-only file.

    draft: keys of a draft vocabulary in the `ids` layout; None keeps the donor's in its layout,
    except that a sidecar's becomes `ids`, because the base has the whole output. If there are
    several MTP layers, only those that llama.cpp drafts with are taken.

    RequestError if the head does not fit or is incomplete, or if the base already has a head.
    """
    check_takes_a_head(base)
    donor.head.check_complete()
    donor.head.check_fit(base.head)
    if draft is None:
        draft = _carried(donor, base)
    else:
        check_takes_a_list(base)
    layers = donor.head.usable_layers
    end = donor.head.trunk_layers + layers
    names = [n for n in donor.head.names if (block := block_of(n)) is None or block < end]
    if IDS_KEY in draft:
        layout = donor.head.draft.layout if donor.head.draft else None
        names = [n for n in names if part_of(n, None, layout) != "draft vocabulary"]
    head = [TensorCopy.of(donor, name) for name in names]
    return with_head(base, head, draft, layers, donor)


def with_head(
    base: Model,
    head: Sequence[TensorCopy],
    keys: Mapping[str, Value],
    layers: int = 1,
    donor: Model | None = None,
) -> OutputSpec:
    """`base` with these tensors as its MTP head and draft vocabulary, in place of any it has.

    head: the tensors of `layers` MTP layers, named for this base. keys: of the draft vocabulary,
    and others to add. donor: the file that the head is from, for what its layers say of themselves.
    """
    trunk, taken = base.head.trunk_layers, set(base.head.names)
    metadata = without_draft_keys(_with_layers(base, base.head.architecture, trunk, layers, donor))
    tensors = (
        *(t for t in head if t.name == ID_MAP_TENSOR),
        *(TensorCopy.of(base, name) for name in base.tensors if name not in taken),
        *(t for t in head if t.name != ID_MAP_TENSOR),
    )
    spec = OutputSpec(inserted(metadata, keys, BEFORE_TOKENIZER), tensors)
    return relabelled(base, spec)


def head_alone(spec: OutputSpec, base: Model) -> OutputSpec:
    """The head-only file of a model that `with_head` described for `base`."""
    trunk = base.head.trunk_layers
    wanted = tuple(t for t in spec.tensors if (block := block_of(t.name)) is None or block >= trunk)
    return OutputSpec(spec.metadata, wanted)


def check_takes_a_head(base: Model) -> None:
    """RequestError if a model is of another architecture, has no trunk, or already has a head."""
    _ = base.head.architecture
    if base.head.is_alone:
        found = "is a head alone" if base.tensors else "has no tensors"
        raise RequestError(f"{base.path} {found}; graft needs a trunk to add a head to")
    if base.head.names:
        raise RequestError(
            f"{base.path} has an MTP head in block {base.head.trunk_layers} already; take it off "
            f"first: mtp-gguf strip {base.path}"
        )


def check_takes_a_list(model: Model, layout: DraftLayout = DraftLayout.IDS) -> None:
    """RequestError if no runtime would use a draft vocabulary in this layout in the model."""
    check_list_for(model.head.architecture, layout, str(model.path))


def check_list_for(architecture: str, layout: DraftLayout, where: str) -> None:
    """As `check_takes_a_list`, for an architecture. where: begins the message."""
    kind = BLOCKS.get(architecture)
    if kind is None or not kind.ours:
        raise RequestError(
            f"{where}: draft vocabularies are for {', '.join(OUR_ARCHITECTURES)}, found "
            f"{architecture}, which drafts over the whole vocabulary"
        )
    if layout is not DraftLayout.IDS and not kind.single:
        raise RequestError(
            f"{where}: expected layout ids for {architecture}, whose MTP layers may each have an "
            f"output, found {layout.value}"
        )


def strip(model: Model) -> OutputSpec:
    """`model` without its head and its draft vocabulary; RequestError if it has no head."""
    architecture = model.head.architecture
    if model.head.is_alone:
        found = "is a head alone" if model.tensors else "has no tensors"
        raise RequestError(f"{model.path} {found}; without a head nothing would be left")
    trunk = model.head.trunk_layers
    taken = set(model.head.names)
    claimed = model.first.integer(f"{architecture}.nextn_predict_layers") or 0
    if not taken and not claimed and not any(key in model.first.keys for key in DRAFT_KEYS):
        raise RequestError(f"{model.path} has no MTP head to take off")
    metadata = without_draft_keys(_with_layers(model, architecture, trunk, 0))
    tensors = tuple(TensorCopy.of(model, name) for name in model.tensors if name not in taken)
    return relabelled(model, OutputSpec(metadata, tensors))


class HeadLayout(str, Enum):
    """How publishers ship a head in a file of its own, by who does."""

    GGML_ORG = "ggml-org"  # with embedding, last norm and output: llama.cpp's `mtp-` layout
    UNSLOTH = "unsloth"  # without them: they are the trunk's (llama.cpp #28243)


def extract(model: Model, layout: HeadLayout = HeadLayout.GGML_ORG) -> OutputSpec:
    """The head of `model` as a head-only file.

    It contains the MTP block, the draft vocabulary in the model's layout and, unless the layout
    shares them with the trunk, the tensors outside the blocks: the embedding, the output norm, the
    output if it is not tied to the embedding, but no vision tower. A head-only file can be the
    source of the layout that shares them.
    """
    model.head.check_complete()
    model.head.check_layers()
    shares = layout is HeadLayout.UNSLOTH
    if model.head.is_alone and (model.head.is_shared or not shares):
        trunk = (
            "; its embedding and output are its trunk's: graft it first, then extract it again"
            if model.head.is_shared and not shares
            else ""
        )
        raise RequestError(f"{model.path} is a head alone already{trunk}")
    draft = model.head.draft
    if shares and draft and draft.layout is DraftLayout.SIDECAR:
        raise RequestError(
            f"{model.path}: its output has only the rows of its draft vocabulary (layout sidecar), "
            "which its trunk does not have; extract the whole model instead"
        )
    head = {*model.head.names}
    outside = {
        name
        for name in model.tensors
        if block_of(name) is None and not name.startswith(TENSOR_PREFIXES)
    }
    if shares:
        outside &= {ID_MAP_TENSOR}
    elif model.head.kind.streams:  # not the trunk's mixer, nor a table of n-grams
        outside &= {ID_MAP_TENSOR, *SHARED_TENSORS}
    wanted = (name for name in model.tensors if name in head or name in outside)
    tensors = tuple(TensorCopy.of(model, name) for name in wanted)
    metadata = model.metadata()
    if shares:
        key = f"{model.head.architecture}.{SHARED_KEY}"
        before = tuple(model.head.architecture + part for part in _BEFORE_SSM)
        metadata = inserted(metadata, {key: Value(ValueType.BOOL, True)}, before)
    return relabelled(model, OutputSpec(metadata, tensors))


def _carried(donor: Model, base: Model) -> dict[str, Value]:
    """The keys of the donor's draft vocabulary for the result; RequestError if it is invalid."""
    draft = read_draft_list(donor)
    if draft is None:
        return {}
    faults = list_faults(draft.ids, base.vocabulary_size or 0, required_ids(base))
    if faults:
        raise RequestError(
            f"{donor.path}: the draft vocabulary cannot be taken over: {faults[0]}; make a new "
            "one with --fastmtp"
        )
    return draft.metadata(with_ids=draft.header.layout is not DraftLayout.TABLE)


def _with_layers(
    model: Model, architecture: str, trunk: int, layers: int, donor: Model | None = None
) -> Metadata:
    """The model's metadata for `trunk` trunk layers followed by `layers` MTP layers of `donor`."""
    metadata = model.metadata()
    blocks = {f"{architecture}.block_count": Value(ValueType.U32, trunk + layers)}
    key = f"{architecture}.nextn_predict_layers"
    metadata = inserted(metadata, blocks, (f"{architecture}.",))
    if layers:
        before = tuple(architecture + part for part in _BEFORE_SSM)
        metadata = inserted(metadata, {key: Value(ValueType.U32, layers)}, before)
    else:
        metadata.pop(key, None)
    for suffix in _PER_LAYER:
        array_key = f"{architecture}.{suffix}"
        array = model.first.keys.get(array_key)
        if isinstance(array, ArrayRef):
            own = None if donor is None else _of_head(donor, array_key, trunk, layers)
            metadata[array_key] = Value(array.type, _resized(model, array_key, trunk, layers, own))
    return metadata


def _of_head(donor: Model, key: str, trunk: int, layers: int) -> list[Scalar] | None:
    """The donor's entries of a per-layer array for the MTP layers; None if it has none."""
    if not isinstance(donor.first.keys.get(key), ArrayRef):
        return None
    entries = donor.first.array(key) or []
    if len(entries) == trunk and key.endswith(_TRUNK_ONLY):
        return []
    end = trunk + layers
    return entries[trunk:end] if len(entries) >= end else None


def _resized(
    model: Model, key: str, trunk: int, layers: int, own: list[Scalar] | None
) -> list[Scalar]:
    """A per-layer array of the trunk's entries and those of the MTP layers.

    own: those of the MTP layers, none if they need none. None repeats the trunk's last, except that
    an MTP layer is not recurrent.
    """
    entries = model.first.array(key) or []
    if len(entries) < trunk:
        raise RequestError(
            f"{model.path}: {key}: expected an entry for each of {trunk} layers, "
            f"found {len(entries)}"
        )
    trunk_entries = entries[:trunk]
    if own is None:
        own = [False if key.endswith(_RECURRENT) else trunk_entries[-1]] * layers
    return [*trunk_entries, *own]
