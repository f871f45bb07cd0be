"""Draws random mutations of a GGUF file.

They change types and values of keys, lengths of arrays, shapes and types of tensors. Some change
several sizes consistently, so that they pass llama.cpp's own checks and reach the code behind them.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from typing import Any

from mtp_gguf.gguf_tools.files.format import ValueType
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from support.gguf_mutations import (
    AddTensor,
    Architecture,
    Content,
    Cut,
    CutArray,
    DropKey,
    DropTensor,
    Entry,
    Fill,
    FitTensors,
    Mutation,
    Patch,
    Rename,
    Reshape,
    Retype,
    RetypeArray,
    SetArray,
    SetElement,
    SetKey,
)

# Keys that llama.cpp reads for any architecture (`LLM_KV_NAMES` in llama-arch.cpp), absent in
# sound files of Qwen3.5; {} is the architecture.
_OTHER_KEYS = """
{}.vocab_size {}.features_length {}.embedding_length_out {}.embedding_length_per_layer_input
{}.leading_dense_block_count {}.feed_forward_length {}.expert_count {}.expert_used_count
{}.expert_shared_count {}.expert_group_count {}.expert_group_used_count {}.expert_weights_scale
{}.expert_weights_norm {}.expert_gating_func {}.expert_feed_forward_length
{}.expert_shared_feed_forward_length {}.interleave_moe_layer_step {}.n_deepstack_layers
{}.deepstack_mapping {}.pooling_type {}.classifier.pooling_type {}.classifier.output_labels
{}.logit_scale {}.residual_scale {}.embedding_scale {}.attn_logit_softcapping
{}.final_logit_softcapping {}.tensor_data_layout {}.use_parallel_residual
{}.decoder_start_token_id {}.decoder_block_count {}.attention.max_alibi_bias
{}.attention.clamp_kqv {}.attention.causal {}.attention.scale {}.attention.layer_norm_epsilon
{}.attention.sliding_window {}.attention.sliding_window_pattern {}.attention.key_length_swa
{}.attention.value_length_swa {}.attention.temperature_scale {}.attention.temperature_length
{}.attention.shared_kv_layers {}.rope.dimension_count_swa {}.rope.freq_base_swa
{}.rope.scaling.type {}.rope.scaling.factor {}.rope.scale_linear {}.rope.scaling.attn_factor
{}.rope.scaling.alpha {}.rope.scaling.original_context_length {}.rope.scaling.finetuned
{}.rope.scaling.yarn_log_multiplier {}.rope.scaling.yarn_ext_factor
{}.rope.scaling.yarn_attn_factor {}.rope.scaling.yarn_beta_fast {}.rope.scaling.yarn_beta_slow
{}.ssm.dt_b_c_rms {}.swiglu_clamp_exp general.alignment general.sampling.sequence
general.sampling.min_p general.sampling.xtc_probability general.sampling.penalty_last_n
general.sampling.mirostat tokenizer.ggml.token_type_count tokenizer.ggml.scores
tokenizer.ggml.bos_token_id tokenizer.ggml.eot_token_id tokenizer.ggml.eom_token_id
tokenizer.ggml.unknown_token_id tokenizer.ggml.seperator_token_id tokenizer.ggml.cls_token_id
tokenizer.ggml.mask_token_id tokenizer.ggml.add_sep_token tokenizer.ggml.add_space_prefix
tokenizer.ggml.remove_extra_whitespaces tokenizer.ggml.precompiled_charsmap
tokenizer.ggml.suppress_tokens tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_rep_token_id
tokenizer.ggml.prefix_token_id tokenizer.chat_templates split.no split.count split.tensors.count
mtp_gguf.fastmtp.token_ids mtp_gguf.fastmtp.source mtp_gguf.fastmtp.coverage general.quantized_by
general.base_model.0.repo_url
"""
OTHER_KEYS = tuple(_OTHER_KEYS.split())
TEXTS: dict[str, Sequence[str]] = {
    "rope.scaling.type": ("none", "linear", "yarn", "longrope", "dynamic", ""),
    "tokenizer.ggml.model": (
        *("no_vocab", "none", "llama", "bert", "gpt2", "t5", "rwkv", "plamo2", "gemma4", "test"),
        "",
    ),
    "tokenizer.ggml.pre": ("default", "llama-bpe", "qwen2", "gpt-2", "deepseek-llm", "x", ""),
    "general.architecture": (
        *("qwen35", "qwen35moe", "qwen3next", "llama", "bert", "mamba", "clip", "t5", "rwkv6"),
        *("gemma4-assistant", "deepseek2", "qwen3", "qwen2vl", "none", ""),
    ),
    "tokenizer.chat_template": (
        *("{%", "{{ 1/0 }}", "{{ x.y.z }}", "{% for i in range(9) %}{{ messages }}{% endfor %}"),
        *("{{ raise_exception('x') }}", "", "\0", "{{ ''.__class__ }}"),
    ),
    "general.type": ("model", "adapter", "vocab", "mmproj"),
}
STRINGS = ("", "a", "\0", "\udcff", "qwen35", "x" * 5000, "-1", "yarn", "<|im_end|>", " ")
FLOATS = (0.0, -0.0, -1.0, 1.0, 0.5, math.nan, math.inf, -math.inf, 1e30, 1e-45, 3.5e38, 1e9)
COUNTS = (
    *(0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 255),
    *(256, 257, 512, 513, 1000, 1023, 1024, 1025, 4096, 65535, 65536, 262144, 2**24, 2**31 - 1),
    *(2**31, 2**32 - 2, 2**32 - 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2),
)
SIZES = (0, 1, 2, 3, 4, 8, 16, 31, 32, 33, 64, 96, 128, 256, 512, 1023, 1024, 1025, 2048)
PATTERNS = (b"\xff", b"\0", b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\xff\xff\x7f\x7f")
TOKENS = (
    *("", " ", "a", "aa", "\n", "<|im_end|>", "\udcff", "\0", "Ġ", "Ċ", "<0x0A>", "é", "x" * 300),
)
SWAPS = ((".weight", ".bias"), (".weight", ".scale"), ("blk.0", "blk.1"), ("blk.1", "blk.3"))
SCALARS = tuple(kind for kind in ValueType if kind is not ValueType.ARRAY)


def random_mutations(content: Content, source: random.Random) -> list[Mutation]:
    """One to three mutations of `content`; every second time the tensors are made to agree."""
    count = source.choice((1, 1, 1, 2, 2, 3))
    mutations = [_draw(content, source) for _ in range(count)]
    if source.random() < 0.4:
        mutations.append(FitTensors())
    return mutations


def _draw(content: Content, source: random.Random) -> Mutation:
    draw = source.choices(
        (_key, _hyperparameter, _array, _tensor, _tokenizer, _draft, _bytes, _architecture),
        (20, 30, 15, 25, 10, 8, 4, 1),
    )[0]
    return draw(content, source)


def _value(kind: ValueType, key: str, old: Any, source: random.Random) -> Any:
    if kind is ValueType.STRING:
        known = next((texts for end, texts in TEXTS.items() if key.endswith(end)), ())
        return source.choice((*known, *known, *STRINGS))
    if kind in (ValueType.F32, ValueType.F64):
        return source.choice((*FLOATS, source.uniform(-2, 2)))
    if kind is ValueType.BOOL:
        return source.choice((0, 1, 1, 2, 255))
    near: tuple[int, ...] = ()
    if isinstance(old, int) and not isinstance(old, bool):
        near = (old + 1, old - 1, 2 * old, old // 2, 3 * old, -old)
    return source.choice((*COUNTS, *near, *near))


def _set(key: str, entry: Entry | None, source: random.Random) -> Mutation:
    kinds = source.random()
    kind: ValueType
    if entry is None or kinds < 0.15:
        kind = source.choice(SCALARS)
    elif entry.element is not None:
        kind = entry.element if kinds < 0.6 else source.choice(SCALARS)
    else:
        kind = entry.type
    old = entry.data if entry is not None and not isinstance(entry.data, list) else None
    if source.random() < 0.1:
        count = source.choice((0, 1, 2, 3, 4, 5, 8, 100))
        values = tuple(_value(kind, key, old, source) for _ in range(count))
        return SetArray(key, kind, values)
    return SetKey(key, kind, _value(kind, key, old, source))


def _key(content: Content, source: random.Random) -> Mutation:
    others = [key.format(content.architecture) for key in OTHER_KEYS]
    key = source.choice([*content.keys, *others])
    if source.random() < 0.15:
        return DropKey(key)
    return _set(key, content.keys.get(key), source)


def _hyperparameter(content: Content, source: random.Random) -> Mutation:
    prefix = content.architecture + "."
    keys = [k for k in content.keys if k.startswith(prefix)]
    key = source.choice(keys)
    entry = content.keys[key]
    if source.random() < 0.05:
        return DropKey(key)
    if source.random() < 0.5 and entry.type is ValueType.U32:
        return SetKey(key, ValueType.U32, source.choice(SIZES))
    if source.random() < 0.1 and entry.type is ValueType.U32:  # as an array, one for each block
        count = source.choice((1, 2, 3, 4, 512))
        values = tuple(source.choice((*SIZES, entry.data)) for _ in range(count))
        return SetArray(key, ValueType.U32, values)
    return _set(key, entry, source)


def _array(content: Content, source: random.Random) -> Mutation:
    key = source.choice([k for k, e in content.keys.items() if e.element is not None])
    entry = content.keys[key]
    assert entry.element is not None
    kind = source.random()
    count = len(entry.data)
    if kind < 0.3:
        return CutArray(
            key, source.choice((0, 1, 2, 3, count - 1, count + 1, 2 * count, count // 2))
        )
    if kind < 0.8:
        index = source.randrange(max(count, 1))
        return SetElement(key, index, _value(entry.element, key, None, source))
    return RetypeArray(key, source.choice(SCALARS))


def _tensor(content: Content, source: random.Random) -> Mutation:
    tensor = source.choice(content.tensors)
    kind = source.random()
    if kind < 0.3:
        shape = list(tensor.shape)
        at = source.randrange(len(shape))
        n = shape[at]
        shape[at] = source.choice((*SIZES, n - 1, n + 1, 2 * n, n // 2, 2**31, 2**40, 2**63))
        if source.random() < 0.2:
            shape = shape[::-1]
        if source.random() < 0.1:
            shape.append(source.choice((0, 1, 2)))
        return Reshape(tensor.name, tuple(n % 2**64 for n in shape))
    if kind < 0.6:
        return Retype(tensor.name, source.choice(tuple(BY_NAME)))
    if kind < 0.7:
        return DropTensor(tensor.name)
    if kind < 0.8:
        return Fill(tensor.name, source.choice(PATTERNS))
    other = source.choice(content.tensors)
    if kind < 0.9:
        similar = (tensor.name.replace(*swap) for swap in SWAPS)
        new = source.choice((other.name, tensor.name + "x", "output.weight", "d2t", *similar))
        return Rename(tensor.name, new)
    names = (
        *("output.weight", "d2t", "rope_freqs.weight", "output.bias", "token_embd_norm.weight"),
        *("blk.2.nextn.shared_head_head.weight", "blk.2.nextn.embed_tokens.weight"),
        *("blk.1.attn_qkv.weight", "blk.0.attn_qkv.bias", "blk.1.attn_q.bias", "cls.weight"),
        *("blk.0.ffn_gate_up_exps.weight", "blk.2.ffn_gate_up_exps.weight"),
        *("blk.2.attn_qkv.weight", "blk.3.attn_norm.weight", "blk.0.attn_gate.scale"),
        *("blk.0.ffn_up.input_scale", "blk.0.exp_probs_b.bias", "v.patch_embd.weight"),
    )
    new_shape = tuple(source.choice(SIZES[:-4]) for _ in range(source.choice((1, 2, 2, 3))))
    if source.random() < 0.5:
        new_shape = tuple(other.shape)
    return AddTensor(
        source.choice(names), new_shape, source.choice(("F32", "F16", "I64", "Q8_0", "I32"))
    )


def _tokenizer(content: Content, source: random.Random) -> Mutation:
    arrays = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
    ids = [k for k in (*content.keys, *OTHER_KEYS) if k.endswith("_token_id") and "{" not in k]
    tokens = len(content.keys[arrays[0]].data) if arrays[0] in content.keys else 0
    kind = source.random()
    if kind < 0.4:
        near = (0, 1, tokens - 1, tokens, tokens + 1, 2 * tokens, 2**31 - 1, 2**31, 2**32 - 1, -1)
        return SetKey(source.choice(ids), ValueType.U32, source.choice(near))
    key = source.choice(arrays)
    entry = content.keys.get(key)
    if entry is None or entry.element is None or not entry.data:
        return DropKey(key)
    if kind < 0.6:
        return CutArray(key, source.choice((0, 1, 10, 255, 256, 257, tokens - 1, tokens + 1)))
    index = source.randrange(len(entry.data))
    if entry.element is ValueType.STRING:
        text: Any = source.choice((*TOKENS, *entry.data[:40]))
        if key.endswith("merges"):
            text = source.choice(("", "a", "a b", "ab cd", " ", "a b c", "\udcff x", " a", "a "))
        return SetElement(key, index, text)
    return SetElement(key, index, source.choice((-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 255, 2**31 - 1)))


def _draft(content: Content, source: random.Random) -> Mutation:
    key = "mtp_gguf.fastmtp.token_ids"
    tokens = 1024
    id_choices = (*range(8), tokens - 1, tokens, 2**31 - 1, 2**31, 2**32 - 1, -1)
    kind = source.random()
    if kind < 0.4:
        count = source.choice((0, 1, 2, 3, 16, 64, tokens, tokens + 1))
        values = tuple(source.choice(id_choices) for _ in range(count))
        if source.random() < 0.5:
            values = tuple(range(count))
        return SetArray(key, source.choice((ValueType.U32,) * 4 + SCALARS), values)
    d2t = next((t for t in content.tensors if t.name == "d2t"), None)
    if d2t is not None and kind < 0.8:
        value = source.choice((*id_choices, 2**62, -(2**63)))
        return Fill("d2t", struct.pack("<q", max(min(value, 2**63 - 1), -(2**63))))
    rows = source.choice((0, 1, 2, 3, 32, 1024, 1025))
    if kind < 0.9:
        return AddTensor("d2t", (rows,), source.choice(("I64", "I64", "I32", "F32")))
    width = 32
    return AddTensor("blk.2.nextn.shared_head_head.weight", (width, rows), "F32")


def _bytes(content: Content, source: random.Random) -> Mutation:
    if source.random() < 0.2:
        return Cut(source.choice((0, 3, 8, 24, 100, 1000, 30000, 40000, 100000)))
    number = source.choice(COUNTS) % 2**64
    byte = bytes([source.randrange(256)])
    words = number.to_bytes(8, "little"), (number % 2**32).to_bytes(4, "little")
    data = source.choice((byte, *words))
    ends = source.randrange(24), source.randrange(1 << 16), -source.randrange(1, 4000)
    return Patch(source.choice(ends), data)


def _architecture(_content: Content, source: random.Random) -> Mutation:
    return Architecture(source.choice(TEXTS["general.architecture"]))
