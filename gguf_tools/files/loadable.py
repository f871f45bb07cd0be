"""Finds values in a model file that crash llama.cpp, before it loads the file.

llama.cpp rejects most malformed files with an error. On some it aborts (`GGML_ASSERT`), divides by
zero, or reads out of bounds. The checks here need only the headers; each names the place in the
pinned llama.cpp that relies on it. `loader_rules` has the checks for files that are rejected.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

from ..errors import FormatError
from ..heads.fastmtp import EMBEDDING_TENSOR, OUTPUT_TENSOR
from ..heads.head import OUTPUT_NORM_TENSOR, TRUNK_TENSOR
from ..heads.nextn import HYBRIDS
from ..model import Model
from .format import ArrayRef, GgufFile, TensorInfo, ValueType, open_gguf
from .tensor_types import F32

# llama-hparams.h: LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
_MOST_LAYERS = 512
_MOST_EXPERTS = 1024
_LARGEST = (1 << 31) - 1
# LLAMA_ROPE_SCALING_TYPES in llama-model.cpp
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Types without a dot product in ggml-cpu: integers, and types for activations.
_NOT_MULTIPLIED = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})
# Fewest tokens with which the default BOS and EOS ids are in range (llama-vocab.cpp).
_LEAST_TOKENS = 12
_MIXED = ("qwen35moe", "qwen3next")  # mixtures of experts, in every layer
# Optional for llama.cpp's loader, although the graph of a linear-attention layer needs them. Older
# files of Qwen3-Next have both in one tensor, ssm_in.
_RECURRENT_SUFFIXES = ("attn_qkv.weight", "attn_gate.weight")


def load_faults(model: Model) -> list[str]:
    """Reasons why llama.cpp would crash on a model, one sentence each; empty if none are found.

    Keys of a type that llama.cpp rejects with an error are not reported.
    """
    return [] if model.architecture is None else list(_faults(model, _Keys(model)))


def vocabulary_faults(path: Path) -> list[str]:
    """Like `load_faults`, but only for the tokenizer, which is in the file `path` itself."""
    with open_gguf(path) as file:
        known = file.scalar("general.architecture") in HYBRIDS
        return [*_tokens(file), *(_vocabulary(file) if known else ())]


def _faults(model: Model, keys: "_Keys") -> Iterator[str]:
    yield from chain(_layers(keys), _experts(keys), _scaling(keys), _tokens(model.first))
    if model.architecture in HYBRIDS:
        yield from chain(_numbers(keys), _sizes(keys), _attention(keys), _rotation(keys))
        yield from chain(_states(keys), _vocabulary(model.first), _tensors(keys, model.tensors))


class _Keys:
    """The hyperparameters of an architecture."""

    def __init__(self, model: Model) -> None:
        self.file = model.first
        self.architecture = model.architecture

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def values(self, key: str) -> list[int]:
        """One integer, or one per layer; empty if the key is absent or has another type."""
        stored = self.file.keys.get(self.name(key))
        if isinstance(stored, ArrayRef):
            if stored.type in (ValueType.STRING, ValueType.F32, ValueType.F64):
                return []
            return [int(value) for value in self.file.array(self.name(key)) or []]
        return [stored] if isinstance(stored, int) and not isinstance(stored, bool) else []

    def one(self, key: str, otherwise: int = 0) -> int:
        """The first of the values."""
        return next(iter(self.values(key)), otherwise)

    def fault(self, key: str, expected: str, found: object) -> str:
        return f"{self.name(key)}: expected {expected}, found {found}"

    def outside(self, key: str, low: int, high: int) -> Iterator[str]:
        """A fault for the first value outside `low` to `high`."""
        for value in self.values(key):
            if not low <= value <= high:
                yield self.fault(key, f"{low} to {high}", value)
                return


def _layers(keys: _Keys) -> Iterator[str]:
    """The arrays of llama_model_base::load_hparams have LLAMA_MAX_LAYERS entries."""
    yield from keys.outside("block_count", 1, _MOST_LAYERS)
    blocks, head = keys.one("block_count", 1), keys.one("nextn_predict_layers")
    if not 0 <= head <= blocks:
        yield keys.fault("nextn_predict_layers", f"0 to {blocks}, the block count", head)
    yield from keys.outside("context_length", 1, _LARGEST)  # llama_cpp counts in signed integers


def _experts(keys: _Keys) -> Iterator[str]:
    """The assertions on experts in llama_model_base::load_hparams, and divisions by a count."""
    experts, groups = keys.one("expert_count"), keys.one("expert_group_count")
    used, used_groups = keys.values("expert_used_count"), keys.one("expert_group_used_count")
    mixed = keys.architecture in _MIXED
    least = 1 if mixed else 0
    if not least <= experts <= _MOST_EXPERTS:
        yield keys.fault("expert_count", f"{least} to {_MOST_EXPERTS}", experts)
        return
    most = max(used, default=0)
    if (experts and not 1 <= most <= experts) or (not experts and most):
        expected = f"1 to {experts}, the expert count" if experts else "0 without experts"
        yield keys.fault("expert_used_count", expected, most)
    if mixed and min(used, default=0) < 1:
        yield keys.fault("expert_used_count", "1 or more in each layer", min(used, default=0))
    if groups > max(experts - 1, 0):
        yield keys.fault("expert_group_count", f"0 to {max(experts - 1, 0)}", groups)
    elif groups > 1 and (experts % groups or not 0 < used_groups < groups):
        found = f"{groups} groups of {experts} experts, {used_groups} of them used"
        yield keys.fault("expert_group_count", "groups of one size, some of them used", found)


def _scaling(keys: _Keys) -> Iterator[str]:
    kind = keys.file.keys.get(keys.name("rope.scaling.type"))
    if isinstance(kind, str) and kind.split("\0")[0] not in _ROPE_SCALINGS:
        yield keys.fault(
            "rope.scaling.type", f"one of {', '.join(_ROPE_SCALINGS)}", repr(kind[:80])
        )


def _numbers(keys: _Keys) -> Iterator[str]:
    """NaN and infinity in hyperparameters make every logit NaN."""
    for name, value in keys.file.keys.items():
        wild = isinstance(value, float) and not math.isfinite(value)
        if wild and name.startswith(keys.name("")):
            yield f"{name}: expected a finite number, found {value}"


def _sizes(keys: _Keys) -> Iterator[str]:
    width = keys.one("embedding_length")
    yield from keys.outside("embedding_length", 1, _LARGEST)
    if keys.values("embedding_length_out") not in ([], [width]):  # llama_context's outputs
        found = keys.one("embedding_length_out")
        yield keys.fault("embedding_length_out", f"{width}, the embedding length", found)
    yield from keys.outside("full_attention_interval", 1, _LARGEST)  # a divisor
    epsilon = keys.file.keys.get(keys.name("attention.layer_norm_rms_epsilon"))
    if isinstance(epsilon, float) and not epsilon >= 0:  # ggml_compute_forward_rms_norm
        yield keys.fault("attention.layer_norm_rms_epsilon", "0 or more", epsilon)


def _attention(keys: _Keys) -> Iterator[str]:
    """ggml_mul_mat broadcasts KV heads; build_layer_attn needs one width for keys and values."""
    heads = _of_attention(keys, keys.values("attention.head_count"))
    pairs = _of_attention(keys, keys.values("attention.head_count_kv")) or heads
    for name, values in (("attention.head_count", heads), ("attention.head_count_kv", pairs)):
        if len(set(values)) != 1 or values[0] < 1:
            yield keys.fault(name, "one number of heads, 1 or more", values[:8] or "none")
            return
    if heads[0] % pairs[0]:
        yield keys.fault("attention.head_count_kv", f"a divisor of {heads[0]} heads", pairs[0])
    key, value = _head_lengths(keys, heads[0])
    if key < 1 or key != value:
        yield keys.fault("attention.value_length", f"the key length, {key}", value)


def _of_attention(keys: _Keys, values: list[int]) -> list[int]:
    """The values of the layers with full attention; llama.cpp does not read the others."""
    if len(values) <= 1:
        return values
    recurrent = set(_recurrent_blocks(keys))
    return [value for layer, value in enumerate(values) if layer not in recurrent]


def _head_lengths(keys: _Keys, heads: int) -> tuple[int, int]:
    share = keys.one("embedding_length") // heads
    lengths = ("attention.key_length", "attention.value_length")
    key, value = (keys.one(name, share) for name in lengths)
    return key, value


def _rotation(keys: _Keys) -> Iterator[str]:
    """ggml_compute_forward_rope rotates an even number of elements, divided into the sections."""
    length, _ = _head_lengths(keys, max(keys.one("attention.head_count"), 1))
    rotated = keys.one("rope.dimension_count", length)
    if rotated % 2 or not 2 <= rotated <= length:
        yield keys.fault("rope.dimension_count", f"an even number of 2 to {length}", rotated)
    sections = keys.values("rope.dimension_sections")
    if len(sections) == 1:  # llama.cpp uses a scalar for all four sections
        sections *= 4
    if sections and (
        min(sections) < 0 or sum(sections) > length or not any(n > 0 for n in sections[:3])
    ):
        expected = f"numbers from 0 that add up to 1 to {length}"
        yield keys.fault("rope.dimension_sections", expected, sections[:8])


def _states(keys: _Keys) -> Iterator[str]:
    """build_layer_attn_linear and llm_build_delta_net_base: square states, broadcast key heads."""
    names = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    for name in names:
        yield from keys.outside(f"ssm.{name}", 1, _LARGEST)
    _, state, groups, ranks, inner = (keys.one(f"ssm.{name}") for name in names)
    if groups > 0 and ranks % groups:
        yield keys.fault("ssm.group_count", f"a divisor of {ranks} value heads", groups)
    if inner != state * ranks:
        yield keys.fault("ssm.inner_size", f"{state} × {ranks}", inner)


def _tokens(file: GgufFile) -> Iterator[str]:
    """llama_vocab::impl::load maps each token's text, up to a zero byte, to its id."""
    key = "tokenizer.ggml.tokens"
    array = file.keys.get(key)
    if not isinstance(array, ArrayRef) or array.type is not ValueType.STRING:
        return
    tokens = [str(token) for token in file.array(key) or []]
    distinct = set(tokens)
    if len(distinct) == len(tokens) and "" not in distinct and "\0" not in "".join(tokens):
        return  # fast path for valid files, which have up to 250,000 tokens
    seen: dict[str, int] = {}
    for index, token in enumerate(tokens):
        text = token.split("\0", 1)[0] or f"[EMPTY_{index}]"
        if text in seen:
            shown = repr(text[:80])
            yield f"{key}: expected each token once, found {shown} at {seen[text]} and at {index}"
            return
        seen[text] = index


def _vocabulary(file: GgufFile) -> Iterator[str]:
    """The tokenizer's kind and minimum size; llama.cpp asserts that BOS and EOS exist."""
    kind = file.keys.get("tokenizer.ggml.model")
    if kind is not None and kind != "gpt2":
        found = (
            repr(kind[:80]) if isinstance(kind, str) else file.types["tokenizer.ggml.model"].name
        )
        yield f"tokenizer.ggml.model: expected 'gpt2', as Qwen models have it, found {found}"
    tokens = file.keys.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArrayRef) and tokens.count < _LEAST_TOKENS:
        yield (
            f"tokenizer.ggml.tokens: expected {_LEAST_TOKENS} tokens or more, found {tokens.count}"
        )


def _tensors(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Tensors that only the graph requires, and shapes and types that ggml cannot multiply."""
    if TRUNK_TENSOR in tensors:
        for block in _recurrent_blocks(keys):
            older = keys.architecture == "qwen3next" and f"blk.{block}.ssm_in.weight" in tensors
            for suffix in () if older else _RECURRENT_SUFFIXES:
                if f"blk.{block}.{suffix}" not in tensors:
                    yield f"blk.{block}.{suffix}: expected this tensor, found none"
    for tensor in tensors.values():
        if 0 in tensor.shape:  # ggml treats a matrix without rows as transposed
            yield f"{tensor.name}: expected dimensions from 1, found {list(tensor.shape)}"
        elif _is_vector(tensor):
            if tensor.type is not F32:
                yield f"{tensor.name}: expected F32, found {tensor.type.name}"
        elif _is_matrix(tensor) and tensor.type.name in _NOT_MULTIPLIED:
            yield f"{tensor.name}: expected a type of weights, found {tensor.type.name}"


def _is_vector(tensor: TensorInfo) -> bool:
    """Whether the tensor is used in element-wise operations or as a convolution kernel."""
    name = tensor.name
    if name.endswith("ssm_conv1d.weight"):
        return True
    inside = name.startswith("blk.") or name == OUTPUT_NORM_TENSOR
    is_gate = name.endswith("ffn_gate_inp_shexp.weight")  # a matrix of one row
    return inside and not is_gate and all(n == 1 for n in tensor.shape[1:])


def _is_matrix(tensor: TensorInfo) -> bool:
    return tensor.name.startswith("blk.") or tensor.name in (EMBEDDING_TENSOR, OUTPUT_TENSOR)


def _recurrent_blocks(keys: _Keys) -> list[int]:
    """The trunk's layers of linear attention (load_arch_hparams of qwen35)."""
    count = keys.one("block_count") - keys.one("nextn_predict_layers")
    blocks = range(min(max(count, 0), _MOST_LAYERS))
    key = keys.name("attention.recurrent_layers")
    recurrent = keys.file.keys.get(key)
    if isinstance(recurrent, bool):
        return list(blocks) if recurrent else []
    if isinstance(recurrent, ArrayRef):
        try:
            entries = keys.file.array(key) or []
        except FormatError:
            return []
        return [block for block in blocks if block < len(entries) and entries[block]]
    interval = keys.one("full_attention_interval", 4)
    return [block for block in blocks if interval < 1 or (block + 1) % interval]
