"""Writes a model without an MTP architecture as a carrier: the same model under `glm4moe`.

llama.cpp has no NextN block for `qwen2`, `qwen3` and `llama`, but the trunk of `glm4moe` with dense
layers only computes the same operations, and may have one. So a carrier is the model with other
names: every number is copied. Only the rows of attn_q and attn_k of a `llama` change their places,
because `llama` rotates neighbouring pairs of a head and `glm4moe` its halves (NEOX).

A carrier has no NextN block until `train-head` or `graft` adds one. `restore` gives the original.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import RequestError
from ..files.format import ArrayRef, GgufFile, Value, ValueType, lay_out
from ..files.rewrite import OutputSpec, TensorCopy, copies, inserted
from ..machine.shell import quoted
from ..model import ACCEPTANCE_PREFIX, SPLIT_KEYS, Metadata, Model, header_keys
from .draft_list import BEFORE_TOKENIZER
from .fastmtp import EMBEDDING_TENSOR, OUTPUT_TENSOR
from .head import CARRIED_FROM_KEY, OUTPUT_NORM_TENSOR, block_of, plain_shape
from .nextn import CARRIED
from .transplant import strip

CARRIER = "glm4moe"
_ADDED_KEY = "mtp_gguf.carrier.added_keys"
_OWN_KEYS = "mtp_gguf."
_LOST_KEYS = (_OWN_KEYS, ACCEPTANCE_PREFIX)
_ARCHITECTURE_KEY = "general.architecture"
_SIGMOID = 2  # llama_expert_gating_func_type
_SCALINGS = ("none", "linear", "yarn")

# Hyperparameters that mean the same in a carrier. Others are refused, whatever they are.
_SAME_KEYS = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length"),
    *("rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
    *(f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length")),
    *("rope.scaling.attn_factor", "rope.scaling.finetuned"),
)
_REASONS: Mapping[str, str] = {
    "attention.sliding_window": "attention in a sliding window",
    "expert_count": "a mixture of experts",
    "logit_scale": "scaled logits",
    "attention.scale": "another scale of attention",
    "rope_freqs.weight": "frequency factors of the rotation (as in Llama 3.1)",
    "rope_factors_long.weight": "frequency factors of the rotation (LongRoPE)",
}
_OUTSIDE = (EMBEDDING_TENSOR, OUTPUT_NORM_TENSOR, OUTPUT_TENSOR)
_FFN_NORM, _POST_NORM = "ffn_norm.weight", "post_attention_norm.weight"
_QKV = ("attn_q", "attn_k", "attn_v")
_FUSED = "attn_qkv"
_REQUIRED = (
    *("attn_norm.weight", "attn_output.weight", _FFN_NORM),
    *("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
)
_QK_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a trunk. heads, kv_heads: of `head_dim` values each."""

    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int


def carry(model: Model) -> OutputSpec:
    """`model` as a carrier; RequestError, with the reason, if it cannot be carried exactly."""
    architecture = model.architecture or ""
    if model.head.carried_from:
        raise RequestError(
            f"{model.path}: expected a model, found a carrier; train its head: mtp-gguf train-head "
            f"{quoted(model.path)} --text FILES"
        )
    if architecture not in CARRIED:
        known = ", ".join(CARRIED)
        raise RequestError(
            f"{model.path}: expected architecture {known}, found {architecture or 'none'}, which "
            "has no carrier"
        )
    sizes = _sizes(model, architecture)
    _check_tensors(model, architecture, sizes.layers)
    prefix = f"{architecture}."
    own = {
        f"{CARRIER}.leading_dense_block_count": Value(ValueType.U32, sizes.layers),
        f"{CARRIER}.expert_count": Value(ValueType.U32, 1),
        f"{CARRIER}.expert_used_count": Value(ValueType.U32, 1),
        f"{CARRIER}.expert_shared_count": Value(ValueType.U32, 1),
        # Of the block to come: an expert and a shared one, together as wide as a trunk's network.
        f"{CARRIER}.expert_feed_forward_length": Value(ValueType.U32, max(1, sizes.ffn // 2)),
        f"{CARRIER}.expert_weights_norm": Value(ValueType.BOOL, True),
        f"{CARRIER}.expert_weights_scale": Value(ValueType.F32, 1.0),
        f"{CARRIER}.expert_gating_func": Value(ValueType.U32, _SIGMOID),
        f"{CARRIER}.attention.key_length": Value(ValueType.U32, sizes.head_dim),
        f"{CARRIER}.attention.value_length": Value(ValueType.U32, sizes.head_dim),
        f"{CARRIER}.rope.dimension_count": Value(ValueType.U32, sizes.head_dim),
    }
    renamed = {
        CARRIER + key[len(architecture) :] if key.startswith(prefix) else key: value
        for key, value in model.metadata().items()
    }
    added = {key: value for key, value in own.items() if key not in renamed}
    added[CARRIED_FROM_KEY] = Value(ValueType.STRING, architecture)
    added[_ADDED_KEY] = Value(ValueType.STRING, tuple(key for key in own if key not in renamed))
    renamed[_ARCHITECTURE_KEY] = Value(ValueType.STRING, CARRIER)
    to_halves = True if architecture == "llama" else None
    tensors = (
        _placed(model, copy, _renamed(copy.name, _FFN_NORM, _POST_NORM), sizes, to_halves)
        for copy in copies(model)
    )
    return OutputSpec(inserted(renamed, added, BEFORE_TOKENIZER), tuple(tensors))


def restore(model: Model) -> OutputSpec:
    """The model that `carry` made a carrier of; its NextN block, if it has one, is left out.

    RequestError if `model` is no carrier.
    """
    architecture = model.head.carried_from
    if architecture not in CARRIED:
        raise RequestError(
            f"{model.path}: expected a carrier, which mtp-gguf carry writes, found architecture "
            f"{model.architecture} without the key {CARRIED_FROM_KEY}"
        )
    has_head = model.head.names or model.head.claimed_layers
    headless = strip(model) if has_head else OutputSpec(model.metadata(), copies(model))
    sizes = _sizes(model, CARRIER)
    array = model.first.keys.get(_ADDED_KEY)
    added = set(model.first.array(_ADDED_KEY) or ()) if isinstance(array, ArrayRef) else set()
    metadata: Metadata = {
        architecture + key[len(CARRIER) :] if key.startswith(f"{CARRIER}.") else key: value
        for key, value in headless.metadata.items()
        if key not in added and not key.startswith(_OWN_KEYS)
    }
    metadata[_ARCHITECTURE_KEY] = Value(ValueType.STRING, architecture)
    to_halves = False if architecture == "llama" else None
    tensors = (
        _placed(model, copy, _renamed(copy.name, _POST_NORM, _FFN_NORM), sizes, to_halves)
        for copy in headless.tensors
    )
    return OutputSpec(metadata, tuple(tensors))


def restores_to_the_byte(model: Model) -> bool:
    """Whether `restore` of the carrier of `model` is the same file, or only the same model.

    It is for a file of one shard that is laid out as llama.cpp and the gguf package do it.
    """
    file = model.first
    lost = any(key in SPLIT_KEYS or key.startswith(_LOST_KEYS) for key in file.keys)
    if lost or len(model.files) > 1:
        return False
    layout = lay_out(header_keys(file), file.tensors)
    return (
        layout.size == file.source.size
        and [*layout.offsets] == [t.offset for t in file.tensors]
        and layout.header == file.source.read(0, len(layout.header))
        and not any(any(gap) for gap in _gaps(file, layout.size))
    )


def _gaps(file: GgufFile, end: int) -> Iterator[bytes]:
    """The bytes between tensors."""
    ends = [*(t.offset for t in file.tensors[1:]), end]
    for tensor, following in zip(file.tensors, ends, strict=True):
        start = tensor.offset + tensor.nbytes
        yield file.source.read(start, following - start)


def _sizes(model: Model, architecture: str) -> _Sizes:
    """The sizes by the metadata; RequestError for what a carrier does not have."""
    file, prefix = model.first, f"{architecture}."

    def whole(key: str, default: int | None = None) -> int:
        found = file.keys.get(prefix + key, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise RequestError(
                f"{model.path}: {prefix}{key}: expected a whole number from 1, found "
                f"{_shown(found)}; it cannot be carried"
            )
        return found

    for key in file.keys if architecture != CARRIER else ():
        suffix = key.removeprefix(prefix)
        own = key.startswith(prefix) and suffix not in _SAME_KEYS
        if own or key.startswith(f"{CARRIER}."):
            raise _refusal(model, _REASONS.get(suffix, f"the key {key}"))
    width, heads = whole("embedding_length"), whole("attention.head_count")
    head_dim = whole("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := whole(key, head_dim)) != head_dim:
            raise _refusal(model, f"{prefix}{key} {found} and heads of {head_dim} values")
    scaling = file.keys.get(f"{prefix}rope.scaling.type", "none")
    if scaling not in _SCALINGS:
        raise _refusal(model, f"rope scaling {_shown(scaling)}")
    if head_dim % 2:
        raise _refusal(model, f"heads of {head_dim} values, an odd number")
    kv_heads = whole("attention.head_count_kv", heads)
    layers = model.head.trunk_layers if architecture == CARRIER else whole("block_count")
    return _Sizes(layers, whole("feed_forward_length"), heads, kv_heads, head_dim)


def _check_tensors(model: Model, architecture: str, layers: int) -> None:
    """RequestError for tensors that a carrier does not have, or that are missing."""
    norms = _QK_NORMS if architecture == "qwen3" else ()
    attention = [f"{name}.{kind}" for name in (*_QKV, _FUSED) for kind in ("weight", "bias")]
    known = {*_REQUIRED, *norms, *attention}
    blocks = {block for name in model.tensors if (block := block_of(name)) is not None}
    if blocks != {*range(min(layers, len(blocks) + 1))}:
        raise RequestError(
            f"{model.path}: expected {layers} blocks by {architecture}.block_count, found "
            f"{len(blocks)} up to {max(blocks, default=0)}; the file is incomplete: convert or "
            "download it again"
        )
    present: dict[int | None, set[str]] = {layer: set() for layer in blocks}
    for name in model.tensors:
        block = block_of(name)
        suffix = name if block is None else name.split(".", 2)[2]
        if block is None and name in _OUTSIDE:
            continue
        if block not in present or suffix not in known:
            raise _refusal(model, _REASONS.get(suffix, f"the tensor {name}"))
        present[block].add(suffix)
    for layer, suffixes in present.items():
        own = (_FUSED,) if f"{_FUSED}.weight" in suffixes else _QKV
        for suffix in (*_REQUIRED, *norms, *(f"{name}.weight" for name in own)):
            if suffix not in suffixes:
                raise RequestError(
                    f"{model.path}: expected the tensor blk.{layer}.{suffix}, found none; the file "
                    "is incomplete: convert or download it again"
                )


@lru_cache(maxsize=8)
def _rows(sizes: _Sizes, part: str, to_halves: bool) -> tuple[int, ...]:
    """Where each row of a part of attention comes from, of one that is rotated.

    to_halves: from pairs (2i, 2i + 1) of a head to pairs (i, i + head_dim / 2); else back.
    """
    half = sizes.head_dim // 2
    if to_halves:
        head = [2 * i + j for j in range(2) for i in range(half)]
    else:
        head = [j * half + i for i in range(half) for j in range(2)]
    turned = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads, _FUSED: sizes.heads + sizes.kv_heads}
    rows = [sizes.head_dim * h + row for h in range(turned[part]) for row in head]
    return (*rows, *range(len(rows), _row_count(sizes, part)))


def _row_count(sizes: _Sizes, part: str) -> int:
    """Rows of a part of attention; 0 for what is not rotated."""
    heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}
    heads[_FUSED] = sizes.heads + 2 * sizes.kv_heads
    return sizes.head_dim * heads.get(part, 0)


def _placed(
    model: Model, copy: TensorCopy, name: str, sizes: _Sizes, to_halves: bool | None
) -> TensorCopy:
    """The tensor under its new name, with its rows, or values of a bias, in their new places.

    to_halves: as for `_rows`; None leaves all rows where they are.
    """
    spec = replace(copy.spec, name=name)
    part = name.split(".")[2] if block_of(name) is not None else ""
    count = _row_count(sizes, part)
    if to_halves is None or not count:
        return replace(copy, spec=spec)
    shape = plain_shape(spec.shape)
    if shape[-1] != count or len(shape) != (1 if name.endswith(".bias") else 2):
        raise RequestError(
            f"{model.path}: {copy.name}: expected {count} rows by the metadata, found shape "
            f"{list(spec.shape)}; the file is damaged: convert or download it again"
        )
    rows = _rows(sizes, part, to_halves)
    if len(shape) == 2:
        return replace(copy, spec=spec, rows=rows)
    data = bytes(model.read(copy.name))
    size = len(data) // count
    return TensorCopy(spec, data=b"".join(data[r * size : (r + 1) * size] for r in rows))


def _renamed(name: str, old: str, new: str) -> str:
    return name.removesuffix(old) + new if name.endswith(f".{old}") else name


def _shown(found: object) -> str:
    if found is None:
        return "no such key"
    return "an array" if isinstance(found, ArrayRef) else repr(found)


def _refusal(model: Model, found: str) -> RequestError:
    return RequestError(
        f"{model.path}: expected what {CARRIER} computes exactly, found {found}; it cannot be "
        "carried, but generate, chat and serve draft from its text"
    )
