"""The MTP head in a GGUF file: which tensors make it, and whether a file can draft."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
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
    """Look for the head of a model: `file` has its metadata, `tensors` are those of all shards."""
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
        return _not_ready("the file has no MTP head; convert the model with its head")
    if blocks is None or blocks <= layers:
        return _not_ready(f"{architecture}.block_count is {blocks}, with {layers} MTP layers")
    block = blocks - layers
    prefix = f"blk.{block}."
    missing = [s for s in REQUIRED_SUFFIXES[str(architecture)] if prefix + s not in names]
    if missing:
        return _not_ready(
            f"the metadata claims an MTP head in block {block}, but {prefix}{missing[0]}"
            f"{f' and {len(missing) - 1} more are' if len(missing) > 1 else ' is'} missing",
            block,
        )
    if EMBEDDING_TENSOR not in names:
        return _not_ready(f"{EMBEDDING_TENSOR} is missing, which the head needs", block)
    try:
        draft = find_draft_vocabulary(file, names)
    except FormatError as error:
        return _not_ready(str(error), block)
    types = Counter(t.type.name for t in tensors if t.name.startswith(prefix) and len(t.shape) > 1)
    stock = draft is None or draft.layout is DraftLayout.IDS
    alone = "blk.0.attn_norm.weight" not in names
    reason = f"{'a head alone, ' if alone else ''}MTP head in block {block}"
    return HeadReport(True, reason, block, dict(types), draft, stock)


def part_of(name: str, head_block: int | None, layout: DraftLayout | None) -> str:
    """The part of a model that a tensor belongs to: base, head or draft vocabulary."""
    short_output = layout is DraftLayout.SIDECAR and name == OUTPUT_TENSOR
    if name == ID_MAP_TENSOR or short_output or name.endswith(SHORT_HEAD_SUFFIX):
        return "draft vocabulary"
    match = _BLOCK.match(name)
    return "head" if match and head_block is not None and int(match[1]) >= head_block else "base"


def _not_ready(reason: str, block: int | None = None) -> HeadReport:
    return HeadReport(False, reason, block, {}, None, stock=False)
