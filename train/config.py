"""Sizes and rope of an MTP block, from the metadata of a GGUF.

The same keys and defaults as native/src/head/head_config.cpp; a test compares the drafts of both.
"""

from dataclasses import dataclass

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.head import MtpHead
from mtp_gguf.gguf_tools.nextn import HYBRIDS

_SCALINGS = ("none", "linear", "yarn")
_DEFAULT_CONTEXT = 1 << 18


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: `count` dimensions of each head rotate, in pairs (i, i + count / 2).

    sections: of interleaved M-RoPE; a pair outside of all sections does not rotate for text. None
    without M-RoPE: all pairs rotate.
    scale: factor of positions. yarn: whether high frequencies are exempt from it (YaRN).
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


@dataclass(frozen=True)
class BlockConfig:
    """What the MTP block's graph needs besides the tensors. experts: 0 for a dense block."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    experts: int
    experts_used: int
    expert_scale: float
    rope: Rope

    @classmethod
    def of(cls, head: MtpHead) -> "BlockConfig":
        """Read the metadata; FormatError names a key that is missing or invalid."""
        if not head.kind.hybrid:
            raise FormatError(
                f"{head.file.source.name}: heads of {head.architecture} cannot be trained here, "
                f"only those of {', '.join(HYBRIDS)}"
            )
        reader = _Reader(head)
        width = reader.whole("embedding_length")
        heads = reader.whole("attention.head_count")
        moe = head.architecture != "qwen35"
        head_dim = reader.whole("attention.key_length", width // max(heads, 1))
        if head_dim < 1:
            reader.refuse("attention.key_length", "1 or more", head_dim)
        kv_heads = reader.whole("attention.head_count_kv")
        if heads % kv_heads:
            reader.refuse("attention.head_count", f"a multiple of {kv_heads} KV heads", heads)
        return cls(
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=reader.number("attention.layer_norm_rms_epsilon", None),
            experts=reader.whole("expert_count") if moe else 0,
            experts_used=reader.whole("expert_used_count") if moe else 0,
            expert_scale=reader.number("expert_weights_scale", 0.0) or 1.0,
            rope=_rope(reader, head_dim),
        )


def _sections(reader: "_Reader") -> tuple[int, ...]:
    sections = reader.head.parameter("rope.dimension_sections")
    if not isinstance(sections, tuple) or len(sections) not in (3, 4):
        reader.refuse("rope.dimension_sections", "3 or 4 values", sections)
    assert isinstance(sections, tuple)
    whole = tuple(int(s) for s in sections if isinstance(s, int))
    if len(whole) != len(sections) or sum(whole) < 1:
        reader.refuse("rope.dimension_sections", "whole numbers with a sum above 0", sections)
    return whole


def _rope(reader: "_Reader", head_dim: int) -> Rope:
    sections = None if reader.head.architecture == "qwen3next" else _sections(reader)
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


@dataclass(frozen=True)
class _Reader:
    head: MtpHead

    def whole(self, key: str, default: int | None = None) -> int:
        found = self.head.parameter(key)
        if found is None and default is not None:
            return default
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            self.refuse(key, "a whole number from 1", found)
        assert isinstance(found, int)
        return found

    def number(self, key: str, default: float | None) -> float:
        found = self.head.parameter(key)
        if found is None and default is not None:
            return default
        if not isinstance(found, int | float) or isinstance(found, bool) or not found >= 0:
            self.refuse(key, "a number from 0", found)
        assert isinstance(found, int | float)
        return float(found)

    def refuse(self, key: str, expected: str, found: object) -> None:
        raise FormatError(
            f"{self.head.file.source.name}: {self.head.architecture}.{key}: expected {expected}, "
            f"found {'no such key' if found is None else repr(found)}"
        )
