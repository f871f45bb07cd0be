"""Adds a draft vocabulary to a finished GGUF or removes it: describes the resulting file.

In the `ids` layout only metadata changes. The other two layouts contain a second copy of the
output's rows for the listed tokens, in the output's own type.
"""

from collections.abc import Mapping, Sequence

from ..errors import RequestError
from ..files.format import GgufFile, TensorSpec, Value
from ..files.rewrite import OutputSpec, TensorCopy, inserted
from ..files.tensor_types import I64
from ..model import Model, header_keys
from .draft_list import BEFORE_TOKENIZER, without_draft_keys
from .fastmtp import (
    EMBEDDING_TENSOR,
    ID_MAP_TENSOR,
    IDS_KEY,
    OUTPUT_TENSOR,
    SHORT_HEAD_SUFFIX,
    DraftLayout,
    find_draft_vocabulary,
)
from .head import block_of, part_of
from .transplant import check_takes_a_list, extract


def with_list(model: Model, keys: Mapping[str, Value], layout: DraftLayout) -> OutputSpec:
    """`model` with the draft vocabulary that `keys` describe, replacing any that it has.

    keys: those of the `ids` layout, including the list itself. In the `sidecar` layout the result
    is a head-only file. RequestError if the model has no head, or lacks rows of the output.
    """
    check_head(model)
    check_takes_a_list(model, layout)
    held = keys[IDS_KEY].data
    assert isinstance(held, Sequence)
    ids = [int(i) for i in held]
    if layout is DraftLayout.IDS:
        plain = without_list(model)
        return OutputSpec(inserted(plain.metadata, keys, BEFORE_TOKENIZER), plain.tensors)
    others = {key: value for key, value in keys.items() if key != IDS_KEY}
    id_map = TensorCopy(
        TensorSpec(ID_MAP_TENSOR, (len(ids),), I64),
        data=b"".join(i.to_bytes(8, "little", signed=True) for i in ids),
    )
    if layout is DraftLayout.TABLE:
        plain = without_list(model)
        name = f"blk.{model.head.trunk_layers}.{SHORT_HEAD_SUFFIX}"
        tensors = tuple(t for t in plain.tensors if t.name != name)
    else:
        plain = without_list(model) if model.head.is_alone else extract(model)
        name = OUTPUT_TENSOR
        dropped = (OUTPUT_TENSOR, ID_MAP_TENSOR)
        tensors = tuple(
            t
            for t in plain.tensors
            if t.name not in dropped and not t.name.endswith(SHORT_HEAD_SUFFIX)
        )
    metadata = inserted(without_draft_keys(plain.metadata), others, BEFORE_TOKENIZER)
    return OutputSpec(metadata, _placed(_placed(tensors, id_map), _output_rows(model, name, ids)))


def without_list(model: Model) -> OutputSpec:
    """`model` without its draft vocabulary, if it has one.

    RequestError if its output has only the rows of the list (`sidecar` layout).
    """
    header = find_draft_vocabulary(model.first, model.tensors)
    layout = header.layout if header else None
    if header is not None and layout is DraftLayout.SIDECAR:
        raise RequestError(
            f"{model.path}: its output has the {header.size} rows of its draft vocabulary and no "
            "others; take the head out of the whole model anew: mtp-gguf extract MODEL"
        )
    tensors = tuple(
        TensorCopy.of(model, name)
        for name in model.tensors
        if part_of(name, None, layout) != "draft vocabulary"
    )
    return OutputSpec(without_draft_keys(model.metadata()), tensors)


def rewritten(file: GgufFile, keys: Mapping[str, Value]) -> OutputSpec:
    """One file, or the first of several shards, with the draft vocabulary's keys set to `keys`.

    For lists in the `ids` layout; the tensors stay in their shards.
    """
    metadata = inserted(without_draft_keys(header_keys(file)), keys, BEFORE_TOKENIZER)
    return OutputSpec(metadata, tuple(TensorCopy(t, file.source, t.offset) for t in file.tensors))


def check_head(model: Model) -> None:
    """RequestError if the model has no complete MTP head to use a draft vocabulary."""
    check_takes_a_list(model)
    missing = model.head.missing
    if missing:
        raise RequestError(
            f"{model.path}: a draft vocabulary belongs to an MTP head, and {missing[0]} is "
            "missing; add a head first: mtp-gguf graft"
        )


def _output_rows(model: Model, name: str, ids: Sequence[int]) -> TensorCopy:
    """The rows `ids` of the head's own output, or of the model's, or of its tied embedding."""
    own = f"blk.{model.head.trunk_layers}.{SHORT_HEAD_SUFFIX}"
    header = find_draft_vocabulary(model.first, model.tensors)
    whole = () if header and header.layout is DraftLayout.TABLE else (own,)
    names = (*whole, OUTPUT_TENSOR, EMBEDDING_TENSOR)
    output = next((model.tensors[n] for n in names if n in model.tensors), None)
    if output is None or len(output.shape) != 2 or output.shape[1] <= max(ids):
        found = "none" if output is None else f"shape {list(output.shape)}"
        raise RequestError(
            f"{model.path}: expected an output of more than {max(ids)} rows, found {found}"
        )
    spec = TensorSpec(name, (output.shape[0], len(ids)), output.type)
    return TensorCopy(spec, model.source_of(output.name), output.offset, rows=ids)


def _placed(tensors: tuple[TensorCopy, ...], new: TensorCopy) -> tuple[TensorCopy, ...]:
    """`tensors` with one more, at its place in the converter's order."""
    key = _order(new.name)
    at = next((i for i, other in enumerate(tensors) if _order(other.name) > key), len(tensors))
    return (*tensors[:at], new, *tensors[at:])


def _order(name: str) -> tuple[int, str]:
    block = block_of(name)
    return (-1 if block is None else block, name)
