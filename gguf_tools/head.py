"""The MTP head in a GGUF file: which tensors make it, and whether a file can draft."""

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from .errors import FormatError
from .fastmtp import (
    EMBEDDING_TENSOR,
    ID_MAP_TENSOR,
    OUTPUT_TENSOR,
    SHORT_HEAD_SUFFIX,
    DraftLayout,
    StoredDraftVocabulary,
    find_draft_vocabulary,
)
from .format import GgufFile, TensorInfo

_BLOCK = re.compile(r"blk\.(\d{1,6})\.")
ARCHITECTURES = ("qwen35", "qwen35moe")
OUTPUT_NORM_TENSOR = "output_norm.weight"
TRUNK_TENSOR = "blk.0.attn_norm.weight"  # llama.cpp takes a file without it for a head alone

_ATTENTION = (
    "nextn.eh_proj.weight",
    "nextn.enorm.weight",
    "nextn.hnorm.weight",
    "attn_norm.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "attn_q_norm.weight",
    "attn_k_norm.weight",
    "post_attention_norm.weight",
)
# What llama.cpp requires of the MTP block (load_arch_tensors in qwen35.cpp and qwen35moe.cpp).
REQUIRED_SUFFIXES: Mapping[str, Sequence[str]] = {
    "qwen35": (*_ATTENTION, "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
    "qwen35moe": (
        *_ATTENTION,
        "ffn_gate_inp.weight",
        "ffn_gate_exps.weight",
        "ffn_up_exps.weight",
        "ffn_down_exps.weight",
        "ffn_gate_inp_shexp.weight",
        "ffn_gate_shexp.weight",
        "ffn_up_shexp.weight",
        "ffn_down_shexp.weight",
    ),
}

# Fused tensors that llama.cpp takes for their parts (create_tensor_qkv, create_tensor_gate_up_exps
# in llama-model.cpp).
_FUSED: Mapping[str, Sequence[str]] = {
    "attn_qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "ffn_gate_up_exps.weight": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
}


@dataclass(frozen=True)
class HeadReport:
    """Whether a file can draft.

    ready: the head is there and whole. reason: one sentence that says so or what is missing.
    block: index of the MTP block, None where the metadata names none. types: tensor types of the
    head's matrices with their number. stock: whether an unpatched llama.cpp loads the file.
    """

    ready: bool
    reason: str
    block: int | None
    types: Mapping[str, int]
    draft: StoredDraftVocabulary | None
    stock: bool


def head_report(file: GgufFile, tensors: Sequence[TensorInfo]) -> HeadReport:
    """Look for the head of a model: `file` has its metadata, `tensors` are those of all shards.

    Metadata of a wrong type is a reason not to be ready, and no error.
    """
    try:
        return _examine(file, tensors)
    except FormatError as error:
        return _not_ready(str(error))


def _examine(file: GgufFile, tensors: Sequence[TensorInfo]) -> HeadReport:
    architecture = file.scalar("general.architecture")
    if architecture not in ARCHITECTURES:
        return _not_ready(f"architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    blocks = file.integer(f"{architecture}.block_count")
    layers = file.integer(f"{architecture}.nextn_predict_layers") or 0
    names = {t.name: t for t in tensors}
    if not layers:
        stray = next((n for n in names if ".nextn." in n), None)
        if stray:
            return _not_ready(
                f"{stray} is there, but {architecture}.nextn_predict_layers is 0 or missing"
            )
        return _not_ready("the file has no MTP head; mtp-gguf graft puts one on")
    if layers != 1:
        return _not_ready(f"{architecture}.nextn_predict_layers is {layers}, and 1 can be run")
    if blocks is None or blocks < 2:
        return _not_ready(
            f"{architecture}.block_count is {blocks}, with an MTP head it is 2 or more"
        )
    block = blocks - 1
    prefix = f"blk.{block}."
    standing = next((n for n in names if _BLOCK.match(n) and ".nextn." in n), prefix)
    if not standing.startswith(prefix):
        return _not_ready(
            f"{architecture}.block_count is {blocks}, which puts the MTP head in block {block}, "
            f"but {standing} is there",
            block,
        )
    missing = _missing_suffixes(str(architecture), prefix, names)
    if missing:
        return _not_ready(
            f"the metadata claims an MTP head in block {block}, but {prefix}{missing[0]}"
            f"{f' and {len(missing) - 1} more are' if len(missing) > 1 else ' is'} missing",
            block,
        )
    for needed in (EMBEDDING_TENSOR, OUTPUT_NORM_TENSOR):
        if needed not in names:
            return _not_ready(f"{needed} is missing, which the head needs", block)
    try:
        draft = find_draft_vocabulary(file, names)
    except FormatError as error:
        return _not_ready(str(error), block)
    types = Counter(
        t.type.name
        for t in tensors
        if t.name.startswith(prefix) and len(t.shape) > 1 and t.name != prefix + SHORT_HEAD_SUFFIX
    )
    stock = draft is None or draft.layout is DraftLayout.IDS
    alone = TRUNK_TENSOR not in names
    reason = f"{'a head alone, ' if alone else ''}MTP head in block {block}"
    return HeadReport(True, reason, block, dict(types), draft, stock)


def _missing_suffixes(architecture: str, prefix: str, names: Container[str]) -> list[str]:
    fused = [s for f, parts in _FUSED.items() if prefix + f in names for s in parts]
    return [
        s for s in REQUIRED_SUFFIXES[architecture] if prefix + s not in names and s not in fused
    ]


def part_of(name: str, head_block: int | None, layout: DraftLayout | None) -> str:
    """The part of a model that a tensor belongs to: base, head or draft vocabulary."""
    short_output = layout is DraftLayout.SIDECAR and name == OUTPUT_TENSOR
    if name == ID_MAP_TENSOR or short_output or name.endswith(SHORT_HEAD_SUFFIX):
        return "draft vocabulary"
    match = _BLOCK.match(name)
    return "head" if match and head_block is not None and int(match[1]) >= head_block else "base"


def _not_ready(reason: str, block: int | None = None) -> HeadReport:
    return HeadReport(False, reason, block, {}, None, stock=False)
