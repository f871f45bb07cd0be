"""Sizes and rope of the MTP blocks of a head, from the metadata of a GGUF.

The same keys and defaults as native/src/head/head_config.cpp; a test compares the drafts of both.
"""

from dataclasses import dataclass, replace
from typing import NoReturn

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.heads.head import MtpHead

_SCALINGS = ("none", "linear", "yarn")
_DEFAULT_CONTEXT = 1 << 18
_NO_GATING, _SIGMOID = 0, 2  # llama_expert_gating_func_type; none is a sigmoid in GLM


@dataclass(frozen=True)
class Form:
    """What differs between the blocks of the architectures that can be trained.

    gated: attn_q also has a gate of the attention's output. sections: rotation by sections
    (M-RoPE). moe: a mixture of experts; None if a block has one where it has a router. sigmoid: its
    router is a sigmoid with a bias for the choice, and the metadata say whether shares are normed;
    else a softmax with normed shares. chained: there is a block for each draft, which takes the
    state of the one before it before its last norm, and a block's attention may have a window and a
    rotation of its own. ffn_norm: the norm before the feed-forward network. optional: tensors
    beyond the required ones that a new block gets, too.
    """

    gated: bool = True
    sections: bool = True
    moe: bool | None = True
    sigmoid: bool = False
    chained: bool = False
    ffn_norm: str = "post_attention_norm.weight"
    optional: tuple[str, ...] = ()


FORMS = {
    "qwen35": Form(moe=False),
    "qwen35moe": Form(),
    "qwen3next": Form(sections=False),
    "glm4moe": Form(
        gated=False,
        sections=False,
        sigmoid=True,
        optional=("attn_q_norm.weight", "attn_k_norm.weight"),
    ),
    "step35": Form(
        gated=False,
        sections=False,
        moe=None,
        sigmoid=True,
        chained=True,
        ffn_norm="ffn_norm.weight",
    ),
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: `count` dimensions of each head rotate, in pairs (i, i + count / 2).

    sections: of interleaved M-RoPE; a pair outside of all sections does not rotate for text. None
    without M-RoPE: all pairs rotate.
    scale: factor of positions. yarn: whether high frequencies are exempt from it (YaRN). divided:
    whether the tensor rope_freqs.weight divides frequencies, if there is one.
    """

    count: int
    sections: tuple[int, ...] | None
    base: float
    scale: float
    yarn: bool
    magnitude: float
    beta_fast: float
    beta_slow: float
    trained_context: int
    divided: bool = False


@dataclass(frozen=True)
class BlockConfig:
    """What the MTP block's graph needs besides the tensors.

    experts: 0 for a dense block. normed_shares: whether those of the chosen experts sum to 1.
    window: how many positions attention sees, its own included; 0 for all. expert_limit, ffn_limit:
    of the activations of chosen experts, and of the shared or dense network; 0 for none.
    """

    form: Form
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    experts: int
    experts_used: int
    expert_scale: float
    normed_shares: bool
    rope: Rope
    window: int = 0
    expert_limit: float = 0.0
    ffn_limit: float = 0.0

    @classmethod
    def all_of(cls, head: MtpHead) -> tuple["BlockConfig", ...]:
        """Read those of all blocks that draft, as `of`."""
        first = cls.of(head)
        return (first, *(cls.of(head, layer) for layer in range(1, head.usable_layers)))

    @classmethod
    def of(cls, head: MtpHead, layer: int = 0) -> "BlockConfig":
        """Read the metadata; FormatError names a key that is missing or invalid."""
        form = FORMS.get(head.architecture)
        if form is None:
            raise FormatError(
                f"{head.file.source.name}: heads of {head.architecture} cannot be trained here, "
                f"only those of {', '.join(FORMS)}"
            )
        reader = _Reader(head, layer)
        width = reader.whole("embedding_length")
        heads = reader.whole("attention.head_count")
        head_dim = reader.whole("attention.key_length", width // max(heads, 1))
        if head_dim < 1:
            reader.refuse("attention.key_length", "1 or more", head_dim)
        kv_heads = reader.whole("attention.head_count_kv")
        if heads % kv_heads:
            reader.refuse("attention.head_count", f"a multiple of {kv_heads} KV heads", heads)
        if form.sigmoid:
            _check_router(reader)
        router = f"blk.{head.trunk_layers + layer}.ffn_gate_inp.weight"
        moe = router in head.tensors if form.moe is None else form.moe
        windowed = bool(form.chained and reader.value("attention.sliding_window_pattern"))
        rope = _rope(reader, head_dim, form)
        if form.chained:
            rope = _rope_of_chain(reader, rope, windowed=windowed)
        return cls(
            form=form,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=reader.number("attention.layer_norm_rms_epsilon", None),
            experts=reader.whole("expert_count") if moe else 0,
            experts_used=reader.whole("expert_used_count") if moe else 0,
            expert_scale=reader.number("expert_weights_scale", 0.0) or 1.0,
            normed_shares=not form.sigmoid or head.parameter("expert_weights_norm") is True,
            rope=rope,
            window=reader.whole("attention.sliding_window") if windowed else 0,
            expert_limit=reader.number("swiglu_clamp_exp", 0.0) if form.chained else 0.0,
            ffn_limit=reader.number("swiglu_clamp_shexp", 0.0) if form.chained else 0.0,
        )


def _check_router(reader: "_Reader") -> None:
    """FormatError unless experts are of one group and chosen by a sigmoid."""
    gating = reader.head.parameter("expert_gating_func") or _NO_GATING
    if gating not in (_NO_GATING, _SIGMOID):
        reader.refuse("expert_gating_func", f"{_SIGMOID}, a sigmoid", gating)
    groups = reader.head.parameter("expert_group_count") or 1
    if groups != 1:
        reader.refuse("expert_group_count", "one group", groups)
    sections = reader.head.parameter("rope.dimension_sections") or ()
    if not isinstance(sections, tuple) or any(sections):
        reader.refuse("rope.dimension_sections", "none, as llama.cpp's draft graph", sections)


def _sections(reader: "_Reader") -> tuple[int, ...]:
    sections = reader.head.parameter("rope.dimension_sections")
    if not isinstance(sections, tuple) or len(sections) not in (3, 4):
        reader.refuse("rope.dimension_sections", "3 or 4 values", sections)
    whole = tuple(int(s) for s in sections if isinstance(s, int))
    if len(whole) != len(sections) or sum(whole) < 1:
        reader.refuse("rope.dimension_sections", "whole numbers with a sum above 0", sections)
    return whole


def _rope(reader: "_Reader", head_dim: int, form: Form) -> Rope:
    sections = _sections(reader) if form.sections else None
    count = reader.whole("rope.dimension_count", head_dim)
    if count % 2 or count > head_dim:
        reader.refuse("rope.dimension_count", f"an even number up to {head_dim}", count)
    kind = reader.head.parameter("rope.scaling.type") or "linear"
    if kind not in _SCALINGS:
        reader.refuse("rope.scaling.type", " or ".join(_SCALINGS), kind)
    factor = reader.number("rope.scaling.factor", 0.0)
    context = reader.whole("context_length", _DEFAULT_CONTEXT)
    return Rope(
        count=count,
        sections=sections,
        base=reader.number("rope.freq_base", 10_000.0),
        scale=1.0 if kind == "none" or factor == 0 else 1 / factor,
        yarn=kind == "yarn",
        magnitude=reader.number("rope.scaling.attn_factor", 1.0),
        beta_fast=reader.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=reader.number("rope.scaling.yarn_beta_slow", 1.0),
        trained_context=reader.whole("rope.scaling.original_context_length", context),
    )


def _rope_of_chain(reader: "_Reader", rope: Rope, *, windowed: bool) -> Rope:
    """The rotation of a block with a window, or that of half as many dimensions."""
    if rope.yarn:
        reader.refuse("rope.scaling.type", "none or linear", "yarn")
    if windowed:
        count = reader.whole("rope.dimension_count_swa", rope.count)
        if count % 2:
            reader.refuse("rope.dimension_count_swa", "an even number", count)
        return replace(
            rope, count=count, base=reader.number("rope.freq_base_swa", 10_000.0), scale=1.0
        )
    if rope.count % 4:
        reader.refuse("rope.dimension_count", "a multiple of 4", rope.count)
    return replace(rope, count=rope.count // 2, divided=True)


@dataclass(frozen=True)
class _Reader:
    head: MtpHead
    layer: int

    def value(self, key: str) -> object:
        return self.head.parameter(key, self.layer if self.head.layers > 1 else None)

    def whole(self, key: str, default: int | None = None) -> int:
        found = self.value(key)
        if found is None and default is not None:
            return default
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            self.refuse(key, "a whole number from 1", found)
        return found

    def number(self, key: str, default: float | None) -> float:
        found = self.value(key)
        if found is None and default is not None:
            return default
        if not isinstance(found, int | float) or isinstance(found, bool) or not found >= 0:
            self.refuse(key, "a number from 0", found)
        return float(found)

    def refuse(self, key: str, expected: str, found: object) -> NoReturn:
        raise FormatError(
            f"{self.head.file.source.name}: {self.head.architecture}.{key}: expected {expected}, "
            f"found {'no such key' if found is None else repr(found)}"
        )
