"""Estimates the memory that drafting takes in addition to the model, from the metadata."""

from dataclasses import dataclass

from .files.format import ArrayRef, padded
from .heads.fastmtp import (
    EMBEDDING_TENSOR,
    OUTPUT_TENSOR,
    SHORT_HEAD_SUFFIX,
    StoredDraftVocabulary,
    draft_in_use,
)
from .heads.nextn import REPLAYED
from .model import Model

_F16_BYTES, _F32_BYTES = 2, 4
# llama.cpp rounds a context up to whole buckets; our runtime's cache has one more, for drafts past
# the end of the context (native/src/head/head_cache.cpp).
_BUCKET = 256
_DEFAULT_INTERVAL = 4  # llama.cpp's default for full_attention_interval (qwen35.cpp)


@dataclass(frozen=True)
class DraftMemory:
    """Bytes that drafting takes, without compute buffers.

    head: the MTP blocks and a stored draft vocabulary. draft_rows: rows of embedding and output
    that our runtime gathers for a list in the `ids` layout, or for the one that it makes.
    whole_rows: embedding and output, which the head needs on its GPU if it drafts over the whole
    vocabulary; on a CPU they are used in place, so they are not part of the total. embedding_rows:
    what of them the head still copies if the whole trunk is on that GPU: an embedding of its own.
    cache: K and V of the MTP blocks in F16, for `context` positions. state_copy: one snapshot of
    the trunk's recurrent state; `copies` of them are kept. state_log: replaces each snapshot on a
    CPU with patches/, where llama.cpp rolls back by replay; the snapshot itself for architectures
    that it does not replay.
    """

    head: int
    draft_rows: int
    whole_rows: int
    embedding_rows: int
    cache: int
    state_copy: int
    state_log: int
    context: int
    depth: int
    copies: int

    @property
    def total(self) -> int:
        """All of it, with rollback by snapshots."""
        return self.head + self.draft_rows + self.cache + self.copies * self.state_copy

    @property
    def total_by_replay(self) -> int:
        """All of it, with rollback by replay."""
        return self.total - self.copies * (self.state_copy - self.state_log)


def draft_memory(
    trunk: Model, head: Model, draft: StoredDraftVocabulary | None, context: int, depth: int
) -> DraftMemory:
    """Memory for drafting `depth` tokens at up to `context` positions.

    trunk, head: the same model, or a model and its separate head.
    """
    layers = max(_size(head, "nextn_predict_layers"), 1)
    key_values = sum(_last(head, "attention.head_count_kv", layers)) * (
        _size(head, "attention.key_length") + _size(head, "attention.value_length")
    )
    stored = sum(head.tensors[name].nbytes for name in head.head.names)
    if head is not trunk:
        stored = sum(tensor.nbytes for tensor in head.tensors.values())
    own = [t for name, t in head.tensors.items() if name.endswith(SHORT_HEAD_SUFFIX)]
    names = (EMBEDDING_TENSOR,) if own else (EMBEDDING_TENSOR, OUTPUT_TENSOR)
    found = (trunk.tensors.get(name) or head.tensors.get(name) for name in names)
    shared = [tensor for tensor in found if tensor is not None]
    rows = whole = embedding = 0
    in_use = draft_in_use(draft, trunk.vocabulary_size or 0)
    if in_use is None:
        whole = sum(tensor.nbytes for tensor in shared)
        if OUTPUT_TENSOR in trunk.tensors:
            embedding = shared[0].nbytes
    elif in_use.gathered:
        rows = sum(in_use.size * t.type.row_bytes(t.shape[0]) for t in (*shared, *own))
    positions = padded(context, _BUCKET) + _BUCKET
    return DraftMemory(
        head=stored,
        draft_rows=rows,
        whole_rows=whole,
        embedding_rows=embedding,
        cache=key_values * _F16_BYTES * positions,
        state_copy=state_bytes(trunk),
        state_log=_recurrent_layers(trunk) * _layer_log(trunk) * _F32_BYTES,
        context=context,
        depth=depth,
        # llama.cpp keeps no snapshots of other architectures; a session copies the state once.
        copies=depth if trunk.architecture in REPLAYED else min(depth, 1),
    )


def state_bytes(trunk: Model) -> int:
    """Bytes of the recurrent states of one sequence."""
    return _recurrent_layers(trunk) * _layer_state(trunk) * _F32_BYTES


def _layer_state(model: Model) -> int:
    """Values in the state of one linear-attention layer (n_embd_r, n_embd_s in llama-hparams)."""
    state, inner = _size(model, "ssm.state_size"), _size(model, "ssm.inner_size")
    return max(_size(model, "ssm.conv_kernel") - 1, 0) * _channels(model) + state * inner


def _layer_log(model: Model) -> int:
    """Values that a layer keeps per token on a CPU (patches/0106: n_embd_log_r, n_embd_log_s)."""
    if model.architecture not in REPLAYED:
        return _layer_state(model)
    heads = _size(model, "ssm.group_count") + _size(model, "ssm.time_step_rank")
    decays = _size(model, "ssm.time_step_rank")
    return _channels(model) + heads * _size(model, "ssm.state_size") + decays


def _channels(model: Model) -> int:
    """Channels of the convolution of one layer."""
    keys = _size(model, "ssm.group_count") * _size(model, "ssm.state_size")
    return _size(model, "ssm.inner_size") + 2 * keys


def _recurrent_layers(model: Model) -> int:
    trunk = model.head.trunk_layers
    key = f"{model.architecture}.attention.recurrent_layers"
    if isinstance(model.first.keys.get(key), ArrayRef):
        return sum(map(bool, (model.first.array(key) or [])[:trunk]))
    interval = _size(model, "full_attention_interval") or _DEFAULT_INTERVAL
    return trunk - trunk // interval


def _size(model: Model, key: str) -> int:
    """An integer of the metadata; the last entry of a per-layer array; 0 if it is missing."""
    return _last(model, key, 1)[0]


def _last(model: Model, key: str, n: int) -> list[int]:
    """An integer of the metadata for each of the last `n` layers; 0 if it is missing."""
    full = f"{model.architecture}.{key}"
    held = model.first.keys.get(full)
    entries = (model.first.array(full) or [0])[-n:] if isinstance(held, ArrayRef) else [held] * n
    return [e if isinstance(e, int) and not isinstance(e, bool) and e > 0 else 0 for e in entries]
