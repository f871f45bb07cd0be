"""Where a model's trunk ends and its MTP head begins, by tensors first and metadata second.

Files whose metadata claim a head that is not there, or hide one that is, are what surgery is for;
so tensors are believed and metadata only asked where no tensor answers.
"""

import re

from .errors import RequestError
from .fastmtp import ID_MAP_TENSOR
from .head import ARCHITECTURES, TRUNK_TENSOR
from .surgery import Model

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")


def block_of(name: str) -> int | None:
    """The block that a tensor is in; None for those outside."""
    match = _BLOCK.match(name)
    return int(match[1]) if match else None


def check_architecture(model: Model) -> str:
    """The model's architecture; RequestError when it is none whose head is known."""
    architecture = model.architecture
    if architecture not in ARCHITECTURES:
        raise RequestError(
            f"{model.path}: architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}"
        )
    return architecture


def trunk_layers(model: Model) -> int:
    """Number of trunk layers: the index of the MTP block, where there is one.

    RequestError when tensors and metadata do not tell, or the blocks are not what such a file has.
    """
    architecture = check_architecture(model)
    present = {block for name in model.tensors if (block := block_of(name)) is not None}
    head = {b for name in model.tensors if ".nextn." in name and (b := block_of(name)) is not None}
    blocks = model.first.integer(f"{architecture}.block_count")
    claimed = model.first.integer(f"{architecture}.nextn_predict_layers") or 0
    if head:
        first = min(head)
    elif blocks is None or not 0 <= claimed < blocks:
        raise RequestError(
            f"{model.path}: {architecture}.block_count is {blocks}, with {claimed} MTP layers: "
            "where the trunk ends cannot be told"
        )
    else:
        first = blocks - claimed
    trunk = {block for block in present if block < first}
    if first == 0 or len(trunk) not in (0, first):
        raise RequestError(
            f"{model.path}: expected blocks 0 to {first - 1} before the MTP head, "
            f"found {len(trunk)} of them"
        )
    if not head and present - trunk:
        raise RequestError(
            f"{model.path}: expected {first} trunk layers by {architecture}.block_count ({blocks}, "
            f"of these {claimed} MTP layers), found block {max(present)} without nextn tensors"
        )
    return first


def head_layers(model: Model) -> int:
    """Number of MTP layers whose tensors are there; RequestError when blocks are left out."""
    first = trunk_layers(model)
    blocks = {b for name in model.tensors if (b := block_of(name)) is not None and b >= first}
    if blocks and max(blocks) - first + 1 != len(blocks):
        raise RequestError(
            f"{model.path}: expected MTP blocks from {first} without gaps, found {len(blocks)} "
            f"up to {max(blocks)}"
        )
    return len(blocks)


def head_names(model: Model) -> list[str]:
    """The tensors of the MTP block and of a stored draft vocabulary, in file order."""
    first = trunk_layers(model)
    return [
        name
        for name in model.tensors
        if name == ID_MAP_TENSOR or ((block := block_of(name)) is not None and block >= first)
    ]


def head_suffixes(model: Model) -> list[tuple[str, str]]:
    """Name and suffix (what follows `blk.N.`) of each tensor of the MTP block."""
    pairs = []
    for name in head_names(model):
        match = _BLOCK.match(name)
        if match:
            pairs.append((name, match[2]))
    return pairs


def is_head_alone(model: Model) -> bool:
    """Whether the model has no trunk."""
    return TRUNK_TENSOR not in model.tensors
