"""What Qwen3.5 and Qwen3-Next share: sizes, tensors, transforms and metadata of their checkpoints.

Both are hybrids of linear and full attention whose MTP block is one more layer of full attention.
Hugging Face stores their norm weights minus one (the norms of transformers multiply by
`1 + weight`), except for the gated norm of linear attention, and the decay as `A_log`, while
llama.cpp's graph needs `-exp(A_log)`. How linear attention is stored is told by each family's file.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Any

import numpy as np

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.files.tensor_types import F32

from ..checkpoints.checkpoint import LAYERS_KEY, Checkpoint
from ..checkpoints.config import LARGEST_SIZE, ConfigReader, is_whole
from ..checkpoints.quantized import check_schemes
from ..checkpoints.source_tensors import Shape, SourceTensors, ggml_shape
from ..plans.recipe import Arithmetic, Order, Recipe, Target
from .parts import wants
from .target_model import MAX_LAYERS, HeadChoice, TargetModel, typed

# Default of transformers (RotaryEmbeddingConfigMixin).
DEFAULT_ROPE_THETA = 10_000.0
# llama.cpp drafts with one MTP layer (build_graph_mtp in src/models/qwen35.cpp and its relatives),
# and rejects a file with another: the layers share one mtp.fc, which is in the first block only.
_MTP_LAYER = "mtp.layers.0."
_LATER_LAYERS = "MTP layers after the first; llama.cpp drafts with one"


@dataclass(frozen=True)
class Dims:
    """The sizes in config.json; `recurrent[i]` is true if trunk layer i is linear attention."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    vocab: int
    experts: int
    expert_ffn: int
    shared_ffn: int
    recurrent: tuple[bool, ...]
    n_mtp: int
    tied: bool

    @property
    def moe(self) -> bool:
        """Whether the feed-forward networks are mixtures of experts."""
        return self.experts > 0

    @property
    def q_width(self) -> int:
        """Width of all attention heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key/value heads of an attention layer together."""
        return self.kv_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads of linear attention together."""
        return self.k_heads * self.k_dim

    @property
    def values(self) -> int:
        """Width of all value heads of linear attention together."""
        return self.v_heads * self.v_dim

    def v_order(self, head_dim: int, before: int = 0) -> Order | None:
        """Row order that converts grouped value heads of `head_dim` rows into tiled ones.

        The first `before` rows stay in place. None if every key head has one value head.
        """
        if self.v_heads == self.k_heads:
            return None
        return _tiled_heads(self.k_heads, self.v_heads, head_dim, before)

    def ungrouped_rows(self, *, gates: bool) -> Order:
        """Rows of queries, keys and values, or of the gates of the values, out of fused groups.

        Each key head's group has the rows of its query, its key, its values and their gates.
        """
        return _ungrouped(self.k_heads, self.k_dim, self.values // self.k_heads, gates)


# Orders have an entry for each row of a tensor, so they are cached and shared by all layers.
@cache
def _tiled_heads(k_heads: int, v_heads: int, head_dim: int, before: int) -> Order:
    rows = np.arange(v_heads * head_dim).reshape(k_heads, -1, head_dim)
    tiled = rows.transpose(1, 0, 2).reshape(-1) + before
    return np.concatenate([np.arange(before), tiled])


@cache
def _ungrouped(groups: int, key: int, values: int, gates: bool) -> Order:
    rows = np.arange(groups * 2 * (key + values)).reshape(groups, -1)
    parts = np.split(rows, [key, 2 * key, 2 * key + values], axis=1)
    return np.concatenate([part.reshape(-1) for part in (parts[3:] if gates else parts[:3])])


@cache
def _half_of_experts(experts: int, rows: int, half: int) -> Order:
    """Rows of all gate (half 0) or all up (half 1) projections in a fused stack of both."""
    return np.arange(experts * 2 * rows).reshape(experts, 2, rows)[:, half].reshape(-1)


class Transform(Enum):
    """What the converter does to a tensor; the text appears in docs/tensors.md."""

    PLAIN = "as it is"
    NORM = "1 + w"
    V_ROWS = "value-head rows tiled"
    QKV_ROWS = "value-head rows tiled, those of queries and keys kept"
    HEAD_ROWS = "rows tiled, one per value head"
    V_COLUMNS = "value-head columns tiled"
    PER_HEAD = "tiled, one per value head"
    DECAY = "-exp(w), tiled, one per value head"
    CONV = "squeezed, value channels tiled, those of queries and keys kept"
    SQUEEZED = "squeezed"
    NEGATED_EXP = "-exp(w)"
    QKV_OF_GROUPS = "all queries, keys and values, out of their groups"
    GATES_OF_GROUPS = "all gates, out of their groups"

    def recipe(self, source: str, d: Dims) -> Recipe:
        """The recipe that makes the target from `source`."""
        rows = columns = None
        if self is Transform.HEAD_ROWS:
            rows = d.v_order(1)
        elif self is Transform.V_ROWS:
            rows = d.v_order(d.v_dim)
        elif self in (Transform.QKV_ROWS, Transform.CONV):
            rows = d.v_order(d.v_dim, before=2 * d.keys)
        elif self in (Transform.QKV_OF_GROUPS, Transform.GATES_OF_GROUPS):
            rows = d.ungrouped_rows(gates=self is Transform.GATES_OF_GROUPS)
        elif self in (Transform.DECAY, Transform.PER_HEAD):
            columns = d.v_order(1)
        elif self is Transform.V_COLUMNS:
            columns = d.v_order(d.v_dim)
        arithmetic = {
            Transform.NORM: Arithmetic.ADD_ONE,
            Transform.DECAY: Arithmetic.NEGATED_EXP,
            Transform.NEGATED_EXP: Arithmetic.NEGATED_EXP,
        }.get(self, Arithmetic.NONE)
        return Recipe((source,), rows, columns, arithmetic)


@dataclass(frozen=True)
class Entry:
    """One tensor: its names relative to the source's and target's block, and its source shape."""

    source: str
    target: str
    shape: Callable[[Dims], Shape]
    transform: Transform = Transform.PLAIN
    always_f32: bool = False


def norm(source: str, target: str, shape: Callable[[Dims], Shape]) -> Entry:
    """The entry of a norm, which Hugging Face stores minus one."""
    return Entry(source, target, shape, Transform.NORM, always_f32=True)


NORMS = (
    norm("input_layernorm.weight", "attn_norm.weight", lambda d: (d.hidden,)),
    norm("post_attention_layernorm.weight", "post_attention_norm.weight", lambda d: (d.hidden,)),
)
FULL_ATTENTION = (
    Entry("self_attn.q_proj.weight", "attn_q.weight", lambda d: (2 * d.q_width, d.hidden)),
    Entry("self_attn.k_proj.weight", "attn_k.weight", lambda d: (d.kv_width, d.hidden)),
    Entry("self_attn.v_proj.weight", "attn_v.weight", lambda d: (d.kv_width, d.hidden)),
    Entry("self_attn.o_proj.weight", "attn_output.weight", lambda d: (d.hidden, d.q_width)),
    norm("self_attn.q_norm.weight", "attn_q_norm.weight", lambda d: (d.head_dim,)),
    norm("self_attn.k_norm.weight", "attn_k_norm.weight", lambda d: (d.head_dim,)),
)


def _gated(prefix: str, suffix: str, inner: Callable[[Dims], int]) -> tuple[Entry, ...]:
    """A gated feed-forward network of this inner width."""
    return tuple(
        Entry(f"{prefix}{part}_proj.weight", f"ffn_{part}{suffix}.weight", shape)
        for part, shape in (
            ("gate", lambda d: (inner(d), d.hidden)),
            ("up", lambda d: (inner(d), d.hidden)),
            ("down", lambda d: (d.hidden, inner(d))),
        )
    )


DENSE_FFN = _gated("mlp.", "", lambda d: d.ffn)
SHARED_EXPERT = (
    Entry(
        "mlp.gate.weight", "ffn_gate_inp.weight", lambda d: (d.experts, d.hidden), always_f32=True
    ),
    Entry(
        "mlp.shared_expert_gate.weight",
        "ffn_gate_inp_shexp.weight",
        lambda d: (1, d.hidden),
        always_f32=True,
    ),
    *_gated("mlp.shared_expert.", "_shexp", lambda d: d.shared_ffn),
)
# Checkpoints have experts as one tensor per projection (gate and up fused, gate first) or as one
# tensor per expert.
EXPERT_GATE_UP = Entry(
    "mlp.experts.gate_up_proj",
    "ffn_gate_exps.weight, ffn_up_exps.weight",
    lambda d: (d.experts, 2 * d.expert_ffn, d.hidden),
)
EXPERT_PROJECTIONS = (
    Entry("gate_proj", "ffn_gate_exps.weight", lambda d: (d.expert_ffn, d.hidden)),
    Entry("up_proj", "ffn_up_exps.weight", lambda d: (d.expert_ffn, d.hidden)),
    Entry("down_proj", "ffn_down_exps.weight", lambda d: (d.hidden, d.expert_ffn)),
)
MTP = (
    Entry("fc.weight", "nextn.eh_proj.weight", lambda d: (d.hidden, 2 * d.hidden)),
    norm("pre_fc_norm_embedding.weight", "nextn.enorm.weight", lambda d: (d.hidden,)),
    norm("pre_fc_norm_hidden.weight", "nextn.hnorm.weight", lambda d: (d.hidden,)),
    norm("norm.weight", "nextn.shared_head_norm.weight", lambda d: (d.hidden,)),
)
# Present only if the head does not share the trunk's embedding (mtp_use_dedicated_embeddings).
MTP_EMBEDDING = Entry(
    "embed_tokens.weight", "nextn.embed_tokens.weight", lambda d: (d.vocab, d.hidden)
)
EMBEDDING = Entry("model.embed_tokens.weight", "token_embd.weight", lambda d: (d.vocab, d.hidden))
OUTPUT_NORM = norm("model.norm.weight", "output_norm.weight", lambda d: (d.hidden,))
OUTPUT = Entry("lm_head.weight", "output.weight", lambda d: (d.vocab, d.hidden))


@dataclass(frozen=True)
class QwenModel:
    """What a family's file reads from a config, or says itself.

    architecture: llama.cpp's name. linear_attention: the tensors of those layers. sections: of
    M-RoPE, None for a family without it. norms, full_attention: tensors of every block, and of one
    with full attention. last: those after the trunk's last layer; last_in_head: whether a head-only
    file has them. mtp: those of the head outside its block. more: makes the other targets of a
    block from the source tensors and the prefixes of its names. constants: the ends of the names of
    tensors that are whole numbers, not weights. keys: further metadata, as `typed` takes them.
    """

    config: ConfigReader
    dims: Dims
    architecture: str
    linear_attention: tuple[Entry, ...]
    sections: tuple[int, ...] | None = None
    norms: tuple[Entry, ...] = NORMS
    full_attention: tuple[Entry, ...] = FULL_ATTENTION
    last: tuple[Entry, ...] = (OUTPUT_NORM,)
    last_in_head: bool = True
    mtp: tuple[Entry, ...] = MTP
    joined: tuple[tuple[str, ...], str] | None = None
    more: Callable[[SourceTensors, str, str], Iterator[Target]] = lambda *_: iter(())
    constants: tuple[str, ...] = ()
    keys: Mapping[str, object] = field(default_factory=dict)


def target_model(checkpoint: Checkpoint, head: HeadChoice, model: QwenModel) -> TargetModel:
    """Name and shape of every target of a checkpoint.

    CheckpointError if config and tensors contradict each other, if a tensor is missing or has a
    different shape than in the config, or if the checkpoint has unknown tensors.
    """
    dims = model.dims
    check_schemes(
        tensor
        for name, tensor in checkpoint.tensors.items()
        if wants(name, head, checkpoint.config) and not name.endswith(model.constants)
    )
    sources = SourceTensors(checkpoint)
    _check_head_is_there(checkpoint, dims, sources, head)

    alone = head in (HeadChoice.ALONE, HeadChoice.BLOCK)
    trunk = [] if alone else list(_trunk_targets(sources, model))
    shared = [] if head is HeadChoice.BLOCK else _shared_targets(sources, model, head)
    with_head = dims.n_mtp and head is not HeadChoice.NONE
    mtp = list(_mtp_targets(sources, model)) if with_head else []
    n_mtp = 1 if mtp else 0
    return TargetModel(
        architecture=model.architecture,
        hparams=typed(model.architecture, _hparams(model, n_mtp)),
        targets=(*shared, *trunk, *mtp),
        skipped=sources.skipped(_unwanted(sources, head, model)),
        n_trunk=dims.layers,
        n_mtp=n_mtp,
        n_vocab=dims.vocab,
        output=shared[-1] if shared else None,
    )


def _shared_targets(sources: SourceTensors, model: QwenModel, head: HeadChoice) -> list[Target]:
    """The targets that trunk and head share; the rows of the last are the output vocabulary."""
    embedding = EMBEDDING
    if model.dims.tied and not sources.has(EMBEDDING.source) and sources.has(OUTPUT.source):
        embedding = replace(EMBEDDING, source=OUTPUT.source)  # some tools keep this name of the two
    last = model.last if model.last_in_head or head is not HeadChoice.ALONE else ()
    shared = [take(sources, model.dims, "", "", entry) for entry in (*last, embedding)]
    if embedding is EMBEDDING and sources.has(OUTPUT.source):
        shared.append(take(sources, model.dims, "", "", OUTPUT))
    elif not model.dims.tied:
        raise CheckpointError(
            f"{model.config.where}: tie_word_embeddings is false, but the checkpoint has no "
            f"{OUTPUT.source}"
        )
    return shared


def _unwanted(sources: SourceTensors, head: HeadChoice, model: QwenModel) -> dict[str, str]:
    """Why source tensors are not converted, by prefix."""
    if head is HeadChoice.NONE:
        return {"mtp.": "MTP head (--no-mtp)"}
    last = () if model.last_in_head else (entry.source for entry in model.last)
    outside = {
        HeadChoice.ALONE: dict.fromkeys(("model.layers.", *last), "trunk (--head-only)"),
        HeadChoice.BLOCK: dict.fromkeys(("model.", "lm_head."), "outside the MTP head"),
    }.get(head, {})
    later = (n for n in sources.names_under("mtp.layers.") if not n.startswith(_MTP_LAYER))
    return {**outside, **dict.fromkeys(later, _LATER_LAYERS)}


def _check_head_is_there(
    checkpoint: Checkpoint, dims: Dims, sources: SourceTensors, head: HeadChoice
) -> None:
    found = sources.names_under("mtp.")
    config = checkpoint.folder / "config.json"
    if head in (HeadChoice.ALONE, HeadChoice.BLOCK) and not found:
        option = "--head-only: " if head is HeadChoice.ALONE else ""
        raise CheckpointError(
            f"{checkpoint.folder}: {option}expected mtp.* tensors, found none; "
            "use the publisher's original checkpoint, or --from to take them from another one"
        )
    if head is HeadChoice.NONE or bool(found) == bool(dims.n_mtp):
        return
    if dims.n_mtp:
        raise CheckpointError(
            f"{config}: {LAYERS_KEY} is {dims.n_mtp}, but the checkpoint has no mtp.* "
            "tensor (first missing: mtp.fc.weight); either convert without the head (--no-mtp), "
            "or take it from the original model (--from ORIGINAL), or download a checkpoint "
            "that still has it"
        )
    raise CheckpointError(
        f"{checkpoint.head_folder}: the MTP head is incomplete: expected mtp.layers.* tensors, "
        f"found {len(found)} others (first: {found[0]}); convert without the head (--no-mtp), or "
        "take it from the original model (--from ORIGINAL)"
    )


def take(
    sources: SourceTensors, dims: Dims, source_prefix: str, target_prefix: str, entry: Entry
) -> Target:
    """Mark the source of an entry as used and return its target."""
    shape = entry.shape(dims)
    source = sources.use(source_prefix + entry.source, shape)
    recipe = entry.transform.recipe(source, dims)
    rows = shape[0] if recipe.row_order is None else len(recipe.row_order)
    return Target(
        name=target_prefix + entry.target,
        shape=ggml_shape((rows, *shape[1:])),
        recipe=recipe,
        fixed=F32 if entry.always_f32 else None,
    )


def _trunk_targets(sources: SourceTensors, model: QwenModel) -> Iterator[Target]:
    for index, recurrent in enumerate(model.dims.recurrent):
        attention = model.linear_attention if recurrent else model.full_attention
        yield from _block(sources, model, f"model.layers.{index}.", f"blk.{index}.", attention)


def _mtp_targets(sources: SourceTensors, model: QwenModel) -> Iterator[Target]:
    target_prefix = f"blk.{model.dims.layers}."
    for entry in model.mtp:
        yield take(sources, model.dims, "mtp.", target_prefix, entry)
    if model.joined is not None:
        names, target = model.joined
        width = model.dims.hidden
        parts = tuple(sources.use("mtp." + name, (width, width)) for name in names)
        shape = (len(names) * width, width)
        yield Target(target_prefix + target, shape, Recipe(parts, joined=True))
    if sources.has("mtp." + MTP_EMBEDDING.source):
        yield take(sources, model.dims, "mtp.", target_prefix, MTP_EMBEDDING)
    yield from _block(sources, model, _MTP_LAYER, target_prefix, model.full_attention)


def _block(
    sources: SourceTensors, model: QwenModel, source: str, target: str, attention: tuple[Entry, ...]
) -> Iterator[Target]:
    dims = model.dims
    for entry in (*model.norms, *attention, *(SHARED_EXPERT if dims.moe else DENSE_FFN)):
        yield take(sources, dims, source, target, entry)
    if dims.moe:
        yield from _experts(sources, dims, source + "mlp.experts.", target)
    yield from model.more(sources, source, target)


def _experts(sources: SourceTensors, dims: Dims, source: str, target: str) -> Iterator[Target]:
    fused = next((s for s in ("", ".weight") if sources.has(f"{source}gate_up_proj{s}")), None)
    for entry in EXPERT_PROJECTIONS:
        rows, columns = entry.shape(dims)
        shape = (columns, rows, dims.experts)
        if fused is None:
            experts = tuple(
                sources.use(f"{source}{i}.{entry.source}.weight", (rows, columns))
                for i in range(dims.experts)
            )
            recipe = Recipe(experts)
        elif entry.source == "down_proj":
            name = sources.use(f"{source}down_proj{fused}", (dims.experts, rows, columns))
            recipe = Recipe((name,))
        else:
            name = sources.use(f"{source}gate_up_proj{fused}", EXPERT_GATE_UP.shape(dims))
            half = 0 if entry.source == "gate_proj" else 1
            recipe = Recipe((name,), row_order=_half_of_experts(dims.experts, rows, half))
        yield Target(target + entry.target, shape, recipe)


def read_dims(c: ConfigReader, n_mtp: int, moe: bool) -> Dims:
    """The sizes of the config, with the defaults of transformers.

    n_mtp: number of MTP layers, which a config may omit. moe: whether the feed-forward networks are
    mixtures of experts.
    """
    layers = c.size("num_hidden_layers")
    if layers + min(n_mtp, 1) > MAX_LAYERS:
        raise c.fault("num_hidden_layers", f"at most {MAX_LAYERS} with the MTP layer", layers)
    dims = Dims(
        hidden=c.size("hidden_size"),
        ffn=c.size("intermediate_size", 0 if moe else None, least=0 if moe else 1),
        layers=layers,
        heads=c.size("num_attention_heads"),
        kv_heads=c.size("num_key_value_heads"),
        head_dim=c.size("head_dim", 256),
        k_heads=c.size("linear_num_key_heads", 16),
        v_heads=c.size("linear_num_value_heads", 32),
        k_dim=c.size("linear_key_head_dim", 128),
        v_dim=c.size("linear_value_head_dim", 128),
        conv=c.size("linear_conv_kernel_dim", 4),
        vocab=c.size("vocab_size"),
        experts=c.size("num_experts") if moe else 0,
        expert_ffn=c.size("moe_intermediate_size") if moe else 0,
        shared_ffn=c.size("shared_expert_intermediate_size") if moe else 0,
        recurrent=_recurrent_layers(c, layers),
        n_mtp=n_mtp,
        tied=c.flag("tie_word_embeddings"),
    )
    for key, value, divisor_key, divisor in (
        ("linear_num_value_heads", dims.v_heads, "linear_num_key_heads", dims.k_heads),
        ("num_attention_heads", dims.heads, "num_key_value_heads", dims.kv_heads),
    ):
        if value % divisor:
            raise c.fault(key, f"a multiple of {divisor_key} ({divisor})", value)
    return dims


def _recurrent_layers(c: ConfigReader, layers: int) -> tuple[bool, ...]:
    if "layer_types" not in c.config:
        interval = c.size("full_attention_interval", 4)
        return tuple((i + 1) % interval != 0 for i in range(layers))
    known = ("linear_attention", "full_attention")
    kinds = c.each_layer("layer_types", layers)
    if any(kind not in known for kind in kinds):
        raise c.fault("layer_types", " or ".join(known), next(k for k in kinds if k not in known))
    return tuple(kind == "linear_attention" for kind in kinds)


def _hparams(model: QwenModel, n_mtp: int) -> dict[str, object]:
    """The architecture's metadata, with keys as in llama.cpp's converter."""
    c, d = model.config, model.dims
    rope = c.rope()
    partial = c.number(rope, "partial_rotary_factor", 0.25, least=0, most=1)
    context = c.size("max_position_embeddings", 32768)
    return {
        "block_count": d.layers + n_mtp,
        "context_length": context,
        "embedding_length": d.hidden,
        "feed_forward_length": d.ffn or None,
        "attention.head_count": d.heads,
        "attention.head_count_kv": d.kv_heads,
        **_rope_scaling(c, rope, context),
        "rope.dimension_sections": model.sections,
        "rope.freq_base": c.number(rope, "rope_theta", DEFAULT_ROPE_THETA, least=0),
        "attention.layer_norm_rms_epsilon": c.number(c.config, "rms_norm_eps", 1e-6, least=0),
        "expert_count": d.experts or None,
        "expert_used_count": c.size("num_experts_per_tok", most=d.experts) if d.moe else None,
        "attention.key_length": d.head_dim,
        "attention.value_length": d.head_dim,
        "expert_feed_forward_length": d.expert_ffn or None,
        "expert_shared_feed_forward_length": d.shared_ffn or None,
        "nextn_predict_layers": n_mtp or None,
        "ssm.conv_kernel": d.conv,
        "ssm.state_size": d.k_dim,
        "ssm.group_count": d.k_heads,
        "ssm.time_step_rank": d.v_heads,
        "ssm.inner_size": d.values,
        "attention.recurrent_layers": (*d.recurrent, *[False] * n_mtp),
        "full_attention_interval": c.size("full_attention_interval", 4),
        "rope.dimension_count": int(d.head_dim * partial),
        **model.keys,
    }


def _rope_scaling(c: ConfigReader, rope: dict[str, Any], context: int) -> dict[str, object]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" or "factor" not in rope:
        return {}
    if kind not in ("linear", "yarn"):
        raise c.fault("rope_type", "default, linear or yarn", kind)
    keys: dict[str, object] = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": c.number(rope, "factor", 1.0, least=0),
    }
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings", context)
        if not is_whole(original) or not 0 < original <= LARGEST_SIZE:
            raise c.fault("original_max_position_embeddings", "a whole number for yarn", original)
        keys["rope.scaling.original_context_length"] = original
        factor = "attention_factor" if "attention_factor" in rope else "attn_factor"
        for ours, theirs in (
            ("yarn_ext_factor", "extrapolation_factor"),
            ("yarn_attn_factor", factor),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            if theirs in rope:
                keys[f"rope.scaling.{ours}"] = c.number(rope, theirs, 0.0)
    return keys
