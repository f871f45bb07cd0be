"""Finds the errors with which llama.cpp's loader would reject a file, from its headers.

Follows the loader of the pinned llama.cpp for the supported architectures: required keys and their
types (llama-model-loader.cpp, load_hparams in llama-model.cpp), and the tensors (load_arch_tensors
in qwen35.cpp, qwen35moe.cpp and qwen3next.cpp), which must all exist in the right shape, without
extra ones. Values that crash llama.cpp are found by `loadable`; checks that need llama.cpp's code,
such as the list of pre-tokenizers, are not repeated here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..errors import FormatError
from ..heads.fastmtp import (
    EMBEDDING_TENSOR,
    ID_MAP_TENSOR,
    OUTPUT_TENSOR,
    SHORT_HEAD_SUFFIX,
    DraftLayout,
    StoredDraftVocabulary,
)
from ..heads.head import OUTPUT_NORM_TENSOR, MtpHead, plain_shape
from ..heads.nextn import FUSED_SUFFIXES
from ..machine.text import first_of
from ..vision import TENSOR_PREFIXES
from .format import ArrayRef, ValueType

Shape = tuple[int, ...]
Shapes = dict[str, Shape | None]  # None if the metadata do not determine the shape

_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_DEFAULT_INTERVAL = 4  # default of full_attention_interval (qwen35.cpp)
_LIST_TYPES = (ValueType.U32, ValueType.I32, ValueType.BOOL)
_SECTIONS_KEY = "rope.dimension_sections"
_RECURRENT_KEY = "attention.recurrent_layers"
_INTERVAL_KEY = "full_attention_interval"  # read if there is no list of recurrent layers
_NO_WEIGHTS = ("I8", "I16", "I32", "I64", "F64")  # types that ggml cannot multiply

# Required hyperparameters.
_REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "ssm.group_count",
)
_EXPERT_KEYS = (
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
)
_ALSO_REQUIRED = {
    "qwen35": (_SECTIONS_KEY, "feed_forward_length"),
    "qwen35moe": (_SECTIONS_KEY, *_EXPERT_KEYS),
    "qwen3next": _EXPERT_KEYS,
}
# Keys with one value for all layers, or an array with one entry per block.
_PER_LAYER = (
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    _RECURRENT_KEY,
    "expert_used_count",
    "expert_feed_forward_length",
)
# llama.cpp applies the first layer's value of these to every layer that uses it.
_OF_ATTENTION = ("attention.head_count", "attention.head_count_kv")
_OF_ALL_LAYERS = ("feed_forward_length", "expert_feed_forward_length", "expert_used_count")
# The only type that is accepted for a key, without the prefix of the architecture.
_TYPES: Mapping[str, ValueType] = {
    **dict.fromkeys(
        (
            "context_length",
            "embedding_length",
            "embedding_length_out",
            "pooling_type",
            "classifier.pooling_type",
            "block_count",
            "nextn_predict_layers",
            "expert_count",
            "expert_group_count",
            "expert_group_used_count",
            "expert_shared_feed_forward_length",
            "rope.scaling.original_context_length",
            "rope.dimension_count",
            "rope.dimension_count_swa",
            "attention.key_length",
            "attention.value_length",
            "attention.key_length_swa",
            "attention.value_length_swa",
            "ssm.conv_kernel",
            "ssm.inner_size",
            "ssm.state_size",
            "ssm.time_step_rank",
            "ssm.group_count",
        ),
        ValueType.U32,
    ),
    **dict.fromkeys(
        (
            "attention.layer_norm_rms_epsilon",
            "rope.freq_base",
            "rope.scaling.factor",
            "rope.scaling.attn_factor",
            "rope.scaling.alpha",
        ),
        ValueType.F32,
    ),
    "attention.causal": ValueType.BOOL,
    "rope.scaling.finetuned": ValueType.BOOL,
    "rope.scaling.type": ValueType.STRING,
}
_TOKEN_ROLES = (
    *("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
    *("prefix", "suffix", "middle"),
)
_GENERAL_TYPES: Mapping[str, ValueType] = {
    "general.name": ValueType.STRING,
    "general.file_type": ValueType.U32,
    "tokenizer.ggml.model": ValueType.STRING,
    "tokenizer.ggml.pre": ValueType.STRING,
    "tokenizer.ggml.token_type_count": ValueType.U32,
    "tokenizer.ggml.add_bos_token": ValueType.BOOL,
    "tokenizer.ggml.add_eos_token": ValueType.BOOL,
    "tokenizer.ggml.add_sep_token": ValueType.BOOL,
    **{f"tokenizer.ggml.{role}_token_id": ValueType.U32 for role in _TOKEN_ROLES},
    "split.count": ValueType.U16,
}

_FULL_ATTENTION = (
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "attn_q_norm.weight",
    "attn_k_norm.weight",
)
_BIASED = ("attn_qkv", "attn_q", "attn_k", "attn_v")
_SCALE = re.compile(r"\.(input_)?scale$")


def refusals(head: MtpHead) -> list[str]:
    """Reasons why llama.cpp would reject the model, one sentence each; empty if none are found.

    For models whose head is valid, and for the trunk of a separate head. A draft vocabulary with
    rows of its own is accepted, as in the patched llama.cpp. Tensors of the MTP block that the
    native draft graph does not support are reported, too. Nothing is reported for architectures
    whose rules are not known here.
    """
    if not head.kind.hybrid:
        return []
    try:
        stages = (_key_faults, _layer_faults, _tensor_faults)
        return next((found for stage in stages if (found := list(stage(head)))), [])
    except FormatError as error:
        return [str(error)]


def _key_faults(head: MtpHead) -> Iterator[str]:
    architecture = head.architecture
    keys, types = head.file.keys, head.file.types
    named = {f"{architecture}.{key}": kind for key, kind in _TYPES.items()}
    if f"{architecture}.{_RECURRENT_KEY}" not in keys:
        named[f"{architecture}.{_INTERVAL_KEY}"] = ValueType.U32
    for key, kind in {**named, **_GENERAL_TYPES}.items():
        value = keys.get(key)
        if value is None:
            continue
        if isinstance(value, ArrayRef):
            yield f"{key}: expected {kind.name}, found an array of {value.type.name}"
        elif types[key] is not kind:
            yield f"{key}: expected {kind.name}, found {types[key].name}"
    required = (*_REQUIRED, *_ALSO_REQUIRED[architecture])
    for key in (*(f"{architecture}.{name}" for name in required), "tokenizer.ggml.model"):
        if key not in keys:
            yield f"{key}: expected this key, found none"
    blocks = keys.get(f"{architecture}.block_count")
    for name in (*_PER_LAYER, _SECTIONS_KEY):
        key = f"{architecture}.{name}"
        wanted, scalar = (4, ValueType.I32) if name == _SECTIONS_KEY else (blocks, ValueType.U32)
        value = keys.get(key)
        if isinstance(value, ArrayRef):
            if value.type not in _LIST_TYPES or value.count != wanted:
                yield (
                    f"{key}: expected {wanted} entries of U32, I32 or BOOL, found {value.count} of "
                    f"{value.type.name}"
                )
        elif value is not None and types[key] is not scalar:
            yield f"{key}: expected {scalar.name} or an array, found {types[key].name}"


def _layer_faults(head: MtpHead) -> Iterator[str]:
    """Sizes that differ between layers; llama.cpp uses those of the first layer for all tensors."""
    sizes = _Sizes(head)
    if not head.trunk_layers <= sizes["block_count"] <= _MAX_LAYERS:
        yield (
            f"{head.architecture}.block_count: expected {head.trunk_layers} to {_MAX_LAYERS}, "
            f"found {sizes['block_count']}"
        )
        return
    recurrent = sizes.recurrent()
    for name in (*_OF_ATTENTION, *_OF_ALL_LAYERS):
        entries = sizes.all(name)
        for layer, entry in enumerate(entries):
            if entry != entries[0] and (name in _OF_ALL_LAYERS or layer not in recurrent):
                yield (
                    f"{head.architecture}.{name}: expected the first layer's {entries[0]} in every "
                    f"layer that uses it, found {entry} in layer {layer}"
                )
                break


def _tensor_faults(head: MtpHead) -> Iterator[str]:
    required, optional = _expected_tensors(head)
    known = {**optional, **required}
    tensors = head.tensors
    for name in required:
        if name not in tensors:
            other = name.removesuffix(".bias").removesuffix(".weight")
            found = f"; it has {other}" if other != name and other in tensors else ""
            yield f"{name}: expected this tensor, found none{found}"
    for name, shape in known.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if shape is not None and plain_shape(tensor.shape) != plain_shape(shape):
            yield f"{name}: expected shape {list(shape)}, found {list(tensor.shape)}"
        elif tensor.type.name in _NO_WEIGHTS and name != ID_MAP_TENSOR:
            yield f"{name}: expected a type of floats, found {tensor.type.name}"
    left_over = [name for name in tensors if name not in known]
    if left_over:
        yield _left_over(left_over, head)


def _left_over(names: list[str], head: MtpHead) -> str:
    text = f"{first_of(names)} not part of a {head.architecture} model in llama.cpp"
    if any(name.startswith(TENSOR_PREFIXES) for name in names):
        return f"{text}; a vision tower belongs into a file of its own (mmproj)"
    scales = [name for name in names if name in head.suffixes and _SCALE.search(name)]
    if scales:
        return f"{scales[0]}: the draft graph does not apply the scales of an NVFP4 head"
    return text


def _expected_tensors(head: MtpHead) -> tuple[Shapes, Shapes]:
    """The required and the optional tensors with their shapes."""
    sizes = _Sizes(head)
    width, vocabulary = sizes["embedding_length"], head.vocabulary_size
    rows: Shape | None = (width, vocabulary) if vocabulary else None
    top: Shapes = {EMBEDDING_TENSOR: rows, OUTPUT_NORM_TENSOR: (width,)}
    trunk: Shapes = {}
    optional: Shapes = {OUTPUT_TENSOR: rows}
    output = head.tensors.get(OUTPUT_TENSOR) or head.tensors.get(EMBEDDING_TENSOR)
    if output is not None and output.type.name == "NVFP4":
        optional |= {"output.scale": (1,), "output.input_scale": (1,)}
    feed_forward = [s for s in head.kind.required if s.startswith("ffn_")]
    recurrent, linear = sizes.recurrent(), sizes.linear_attention()
    for layer in range(head.trunk_layers):
        block = f"blk.{layer}."
        common = ["attn_norm.weight", "post_attention_norm.weight", *feed_forward]
        if layer in recurrent:
            trunk |= {block + s: shape for s, shape in _linear(block, linear, head).items()}
        else:
            common += _FULL_ATTENTION
            optional |= _biases(block, _BIASED, head)
        present = _unfused(block, common, head)
        trunk |= {block + s: head.shapes.get(s) for s in present}
        matrices = [s.removesuffix(".weight") for s in (*present, *linear)]
        for kind in ("scale", "input_scale"):
            optional |= {f"{block}{s}.{kind}": None for s in matrices}
    if head.is_alone:
        optional |= trunk
        trunk = {}
    if head.is_shared:
        optional |= top
        top = {}
    if head.suffixes:
        block = f"blk.{head.trunk_layers}."
        suffixes = _unfused(block, head.kind.required, head)
        trunk |= {block + s: head.shapes.get(s) for s in suffixes}
        own = ("nextn.shared_head_norm.weight", "nextn.embed_tokens.weight")
        optional |= {block + s: head.shapes.get(s) for s in own}
        optional |= _biases(block, _BIASED[1:], head)
        optional |= _draft_tensors(head.draft, block + SHORT_HEAD_SUFFIX, rows, width)
    return {**top, **trunk}, optional


def _biases(block: str, names: Sequence[str], head: MtpHead) -> Shapes:
    """The optional biases of attention; the draft graph has none for fused tensors."""
    shapes = {name: head.shapes.get(f"{name}.weight") for name in names}
    return {f"{block}{name}.bias": shape and shape[1:] for name, shape in shapes.items()}


def _linear(block: str, shapes: Shapes, head: MtpHead) -> Shapes:
    """The tensors of a layer of linear attention, which older files of Qwen3-Next fuse."""
    if head.architecture != "qwen3next" or f"{block}ssm_in.weight" not in head.tensors:
        return shapes
    fused = [shapes[s] or (0, 0) for s in ("attn_qkv.weight", "attn_gate.weight")]
    rest = {
        s: shape
        for s, shape in shapes.items()
        if not s.startswith("attn_") or block + s in head.tensors
    }
    return {**rest, "ssm_in.weight": (fused[0][0], sum(shape[1] for shape in fused))}


def _draft_tensors(
    draft: StoredDraftVocabulary | None, short_head: str, rows: Shape | None, width: int
) -> Shapes:
    """The tensors of a draft vocabulary with rows of its own."""
    if draft is None or draft.layout is DraftLayout.IDS:
        return {short_head: rows}
    name = short_head if draft.layout is DraftLayout.TABLE else OUTPUT_TENSOR
    return {ID_MAP_TENSOR: (draft.size,), name: (width, draft.size)}


def _unfused(block: str, suffixes: Iterable[str], head: MtpHead) -> list[str]:
    """The expected suffixes in `block`: a fused tensor replaces its parts if it exists."""
    found = list(suffixes)
    for fused, parts in FUSED_SUFFIXES.items():
        if block + fused in head.tensors and all(part in found for part in parts):
            found = [*(s for s in found if s not in parts), fused]
    return found


class _Sizes:
    """The integers of a model's metadata, as llama.cpp reads them."""

    def __init__(self, head: MtpHead) -> None:
        self._head = head
        self._prefix = f"{head.architecture}."

    def all(self, name: str) -> list[int]:
        """The entries of an array, or a single value as a list; empty if the key is absent."""
        key = self._prefix + name
        value = self._head.file.keys.get(key)
        if isinstance(value, ArrayRef):
            return [int(v) for v in self._head.file.array(key) or []]
        return [value] if isinstance(value, int) else []

    def __getitem__(self, name: str) -> int:
        """The value of a key, or the first entry of an array; 0 if it is absent."""
        return next(iter(self.all(name)), 0)

    def recurrent(self) -> set[int]:
        """The indices of the linear-attention layers."""
        layers = range(self["block_count"])
        flags = self.all(_RECURRENT_KEY)
        if flags:
            return {i for i in layers if flags[i % len(flags)]}
        interval = self[_INTERVAL_KEY] or _DEFAULT_INTERVAL
        trunk = self._head.trunk_layers
        return {i for i in layers if i < trunk and (i + 1) % interval}

    def linear_attention(self) -> Shapes:
        """The tensors of a linear-attention layer with their shapes, by suffix."""
        width, state = self["embedding_length"], self["ssm.state_size"]
        rank = self["ssm.time_step_rank"]
        keys, values = state * self["ssm.group_count"], state * rank
        narrow: Shapes
        if self._head.architecture == "qwen3next":
            narrow = {"ssm_ba.weight": (width, 2 * rank)}
        else:
            narrow = {"ssm_beta.weight": (width, rank), "ssm_alpha.weight": (width, rank)}
        return {
            "attn_qkv.weight": (width, 2 * keys + values),
            "attn_gate.weight": (width, values),
            "ssm_conv1d.weight": (self["ssm.conv_kernel"], 2 * keys + values),
            "ssm_dt.bias": (rank,),
            "ssm_a": (rank,),
            **narrow,
            "ssm_norm.weight": (state,),
            "ssm_out.weight": (values, width),
        }
