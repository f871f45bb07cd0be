"""A draft vocabulary put into a finished model, or taken out: what the result shall hold.

In the `ids` layout only metadata changes. The other two hold the list's rows of the output once
more; they are copied as they are, at the output's own type.
"""

from collections.abc import Mapping, Sequence

from .draft_list import BEFORE_TOKENIZER, without_draft_keys
from .errors import RequestError
from .fastmtp import (
    EMBEDDING_TENSOR,
    ID_MAP_TENSOR,
    IDS_KEY,
    OUTPUT_TENSOR,
    SHORT_HEAD_SUFFIX,
    DraftLayout,
    find_draft_vocabulary,
)
from .fit import missing_suffixes
from .format import GgufFile, TensorSpec, Value
from .surgery import Assembly, Model, Piece, header_keys, inserted
from .tensor_types import I64
from .transplant import extract
from .trunk import block_of, check_architecture, is_head_alone, trunk_layers


def with_list(model: Model, keys: Mapping[str, Value], layout: DraftLayout) -> Assembly:
    """`model` with the draft vocabulary that `keys` describe, in place of one that it has.

    keys: those of the `ids` layout, the list itself among them. In the `sidecar` layout the result
    is a head alone. RequestError when the model has no head, or has not all rows of the output.
    """
    check_head(model)
    held = keys[IDS_KEY].data
    assert isinstance(held, Sequence)
    ids = [int(i) for i in held]
    if layout is DraftLayout.IDS:
        plain = without_list(model)
        return Assembly(inserted(plain.metadata, keys, BEFORE_TOKENIZER), plain.pieces)
    others = {key: value for key, value in keys.items() if key != IDS_KEY}
    id_map = Piece(
        TensorSpec(ID_MAP_TENSOR, (len(ids),), I64),
        data=b"".join(i.to_bytes(8, "little", signed=True) for i in ids),
    )
    if layout is DraftLayout.TABLE:
        plain = without_list(model)
        name = f"blk.{trunk_layers(model)}.{SHORT_HEAD_SUFFIX}"
        pieces = plain.pieces
    else:
        plain = without_list(model) if is_head_alone(model) else extract(model)
        name = OUTPUT_TENSOR
        dropped = (OUTPUT_TENSOR, ID_MAP_TENSOR)
        pieces = tuple(
            p
            for p in plain.pieces
            if p.name not in dropped and not p.name.endswith(SHORT_HEAD_SUFFIX)
        )
    metadata = inserted(without_draft_keys(plain.metadata), others, BEFORE_TOKENIZER)
    return Assembly(metadata, _placed(_placed(pieces, id_map), _output_rows(model, name, ids)))


def without_list(model: Model) -> Assembly:
    """`model` without its draft vocabulary, if it has one.

    RequestError when its only output is the one whose rows are the list's (`sidecar`).
    """
    about = find_draft_vocabulary(model.first, model.tensors)
    if about is not None and about.layout is DraftLayout.SIDECAR:
        raise RequestError(
            f"{model.path}: its output has the {about.size} rows of its draft vocabulary and no "
            "others; take the head out of the whole model anew: mtp-gguf extract MODEL"
        )
    pieces = tuple(
        model.piece(name)
        for name in model.tensors
        if name != ID_MAP_TENSOR and not name.endswith(SHORT_HEAD_SUFFIX)
    )
    return Assembly(without_draft_keys(model.metadata()), pieces)


def rewritten(file: GgufFile, keys: Mapping[str, Value]) -> Assembly:
    """One file, or the first of several shards, with `keys` for its draft vocabulary's.

    For lists in the `ids` layout: the tensors stay, whichever shard they are in.
    """
    metadata = inserted(without_draft_keys(header_keys(file)), keys, BEFORE_TOKENIZER)
    specs = (TensorSpec(t.name, t.shape, t.type) for t in file.tensors)
    pieces = zip(specs, file.tensors, strict=True)
    return Assembly(metadata, tuple(Piece(s, file.source, t.offset) for s, t in pieces))


def check_head(model: Model) -> None:
    """RequestError when the model has no whole MTP head that a draft vocabulary could serve."""
    check_architecture(model)
    missing = missing_suffixes(model)
    if missing:
        raise RequestError(
            f"{model.path}: a draft vocabulary belongs to an MTP head, and {missing[0]} is "
            "missing; put a head on first: mtp-gguf graft"
        )


def _output_rows(model: Model, name: str, ids: Sequence[int]) -> Piece:
    """The rows `ids` of the output, or of the embedding where the model is tied."""
    output = model.tensors.get(OUTPUT_TENSOR) or model.tensors.get(EMBEDDING_TENSOR)
    if output is None or len(output.shape) != 2 or output.shape[1] <= max(ids):
        found = "none" if output is None else f"shape {list(output.shape)}"
        raise RequestError(
            f"{model.path}: expected an output of more than {max(ids)} rows, found {found}"
        )
    spec = TensorSpec(name, (output.shape[0], len(ids)), output.type)
    return Piece(spec, model.source_of(output.name), output.offset, rows=ids)


def _placed(pieces: tuple[Piece, ...], piece: Piece) -> tuple[Piece, ...]:
    """`pieces` with one more, where the converter's order has it."""
    key = _order(piece.name)
    at = next((i for i, other in enumerate(pieces) if _order(other.name) > key), len(pieces))
    return (*pieces[:at], piece, *pieces[at:])


def _order(name: str) -> tuple[int, str]:
    block = block_of(name)
    return (-1 if block is None else block, name)
