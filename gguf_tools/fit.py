"""Does this head belong to that trunk? Sizes, layers, tensor shapes and tokenizers compared.

Both sides are GGUF models; every refusal names both.
"""

from collections.abc import Iterator

from .draft_list import vocabulary_size
from .errors import RequestError
from .format import ArrayRef, GgufFile, Scalar
from .head import REQUIRED_SUFFIXES
from .surgery import Model
from .trunk import head_suffixes, trunk_layers

# Of these keys the head has a copy of its own, which must be that of the trunk.
_DENSE = (
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.dimension_sections",
)
SHARED_KEYS = {
    "qwen35": (*_DENSE, "feed_forward_length"),
    "qwen35moe": (
        *_DENSE,
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
    ),
}
# Publishers name the unused ids of one vocabulary differently; more is another tokenizer.
_SAME_TOKENIZER = 0.01


def check_fit(base: Model, donor: Model) -> None:
    """RequestError, naming both sides, when the head of `donor` is not one for `base`."""
    theirs, ours = donor.architecture, base.architecture
    if theirs != ours:
        kinds = {"qwen35": "dense", "qwen35moe": "mixture of experts"}
        raise RequestError(
            f"{donor.path} is {theirs} ({kinds.get(str(theirs), 'unknown here')}), but {base.path} "
            f"is {ours} ({kinds.get(str(ours), 'unknown here')}): its head does not fit"
        )
    for key in SHARED_KEYS[str(ours)]:
        given = _last(donor.first, f"{ours}.{key}")
        wanted = _last(base.first, f"{ours}.{key}")
        if given != wanted and None not in (given, wanted):
            raise RequestError(
                f"{donor.path} has {key} {given}, but {base.path} has {wanted}: "
                "its head does not fit"
            )
    given_layers, wanted_layers = trunk_layers(donor), trunk_layers(base)
    if given_layers != wanted_layers:
        raise RequestError(
            f"{donor.path} has a head for {given_layers} trunk layers, but {base.path} has "
            f"{wanted_layers}: its head does not fit"
        )
    _check_vocabulary(base, donor)
    for fault in shape_faults(base, donor):
        raise RequestError(f"{donor.path} does not fit {base.path}: {fault}")


def shape_faults(base: Model, donor: Model) -> Iterator[str]:
    """What is wrong with the shapes of the donor's head by the sizes of `base`."""
    expected = head_shapes(base)
    for name, suffix in head_suffixes(donor):
        wanted = expected.get(suffix)
        found = donor.tensors[name].shape
        if wanted is not None and plain_shape(found) != wanted:
            hint = ""
            if suffix == "nextn.eh_proj.weight" and plain_shape(found) == wanted[::-1]:
                hint = " (transposed)"
            yield f"{name}: expected shape {list(wanted)}, found {list(found)}{hint}"


def missing_suffixes(model: Model) -> list[str]:
    """Tensors that the head of `model` lacks, as suffixes below its block; all when it has none."""
    held = {suffix for _, suffix in head_suffixes(model)}
    required = REQUIRED_SUFFIXES.get(str(model.architecture), ())
    return [suffix for suffix in required if suffix not in held]


def head_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes in ggml order of an MTP block's tensors, by suffix, as the trunk's sizes say.

    Suffixes whose sizes the metadata lacks are left out; so are those with a free dimension.
    """
    architecture = model.architecture

    def size(key: str) -> int:
        held = _last(model.first, f"{architecture}.{key}")
        return held if isinstance(held, int) else 0

    width, heads, kv = (
        size(k) for k in ("embedding_length", "attention.head_count", "attention.head_count_kv")
    )
    key, value = size("attention.key_length"), size("attention.value_length")
    ffn, shared = size("feed_forward_length"), size("expert_shared_feed_forward_length")
    experts, expert_ffn = size("expert_count"), size("expert_feed_forward_length")
    vocabulary = vocabulary_size(model) or 0
    shapes = {
        "nextn.eh_proj.weight": (2 * width, width),
        "nextn.enorm.weight": (width,),
        "nextn.hnorm.weight": (width,),
        "nextn.shared_head_norm.weight": (width,),
        "nextn.embed_tokens.weight": (width, vocabulary),
        "attn_norm.weight": (width,),
        "post_attention_norm.weight": (width,),
        "attn_q.weight": (width, 2 * heads * key),
        "attn_k.weight": (width, kv * key),
        "attn_v.weight": (width, kv * value),
        "attn_output.weight": (heads * value, width),
        "attn_q_norm.weight": (key,),
        "attn_k_norm.weight": (key,),
        "ffn_gate.weight": (width, ffn),
        "ffn_up.weight": (width, ffn),
        "ffn_down.weight": (ffn, width),
        "ffn_gate_inp.weight": (width, experts),
        "ffn_gate_exps.weight": (width, expert_ffn, experts),
        "ffn_up_exps.weight": (width, expert_ffn, experts),
        "ffn_down_exps.weight": (expert_ffn, width, experts),
        "ffn_gate_inp_shexp.weight": (width,),
        "ffn_gate_shexp.weight": (width, shared),
        "ffn_up_shexp.weight": (width, shared),
        "ffn_down_shexp.weight": (shared, width),
    }
    return {suffix: plain_shape(shape) for suffix, shape in shapes.items() if min(shape) > 0}


def differing_tokens(a: Model, b: Model) -> int | None:
    """In how many places two token lists differ; None where one of them is not there."""
    key = "tokenizer.ggml.tokens"
    if not all(isinstance(m.first.keys.get(key), ArrayRef) for m in (a, b)):
        return None
    if a.first.raw(key) == b.first.raw(key):
        return 0
    ours, theirs = a.first.array(key) or [], b.first.array(key) or []
    shared = sum(x == y for x, y in zip(ours, theirs, strict=False))
    return max(len(ours), len(theirs)) - shared


def _check_vocabulary(base: Model, donor: Model) -> None:
    sizes = [vocabulary_size(m) for m in (donor, base)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise RequestError(
            f"{donor.path} has a vocabulary of {sizes[0]} tokens, but {base.path} has one of "
            f"{sizes[1]}: its head does not fit"
        )
    differing = differing_tokens(base, donor)
    if differing and differing > _SAME_TOKENIZER * (sizes[1] or differing):
        raise RequestError(
            f"{donor.path} and {base.path} have different tokenizers ({differing} tokens differ): "
            "its head does not fit"
        )


def _last(file: GgufFile, key: str) -> Scalar | tuple[Scalar, ...] | None:
    """A value; of a per-layer array the last entry, of any other array all of them."""
    if not isinstance(file.keys.get(key), ArrayRef):
        return file.scalar(key)
    held = file.array(key) or []
    if key.endswith("dimension_sections"):
        return tuple(held)
    return held[-1] if held else None


def plain_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the ones at its end, which ggml does not tell from missing ones."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
