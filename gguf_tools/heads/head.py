"""The MTP head of a GGUF model: its block, its tensors and its faults.

This is the only definition of a complete head; `Model.head` computes it once and caches it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import FormatError, RequestError
from ..files.format import ArrayRef, GgufFile, Scalar, TensorInfo
from ..machine.shell import quoted
from ..machine.text import first_of
from .fastmtp import (
    EMBEDDING_TENSOR,
    ID_MAP_TENSOR,
    OUTPUT_TENSOR,
    SHORT_HEAD_SUFFIX,
    DraftInUse,
    DraftLayout,
    StoredDraftVocabulary,
    draft_in_use,
    find_draft_vocabulary,
    vocabulary_size,
)
from .nextn import BLOCKS, CARRIED, FUSED_SUFFIXES, KNOWN, NextnBlock

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)")
OUTPUT_NORM_TENSOR = "output_norm.weight"
TRUNK_TENSOR = "blk.0.attn_norm.weight"  # llama.cpp treats a file without it as head-only
_WIDE_TRUNK_TENSOR = "blk.0.hc_attn_norm.weight"  # the same, with hyper-connections
# What a head-only file shares with its trunk if it has no embedding, and the key that says so
# (`convert_hf_to_gguf.py --mtp-shared-embd` of llama.cpp #28243, Unsloth's sidecars).
SHARED_TENSORS = (EMBEDDING_TENSOR, OUTPUT_NORM_TENSOR, OUTPUT_TENSOR)
SHARED_KEY = "nextn_shared_target_tensors"
# The architecture that a carrier was made from (`carrier.py`).
CARRIED_FROM_KEY = "mtp_gguf.carrier.architecture"

# Metadata that a head-only file repeats; where both files have them, the values must be the same.
_SHARED_KEYS = (
    *("embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.sliding_window"),
    *("attention.key_length", "attention.value_length"),
    *("attention.key_length_mla", "attention.value_length_mla"),
    *("attention.q_lora_rank", "attention.kv_lora_rank"),
    *("rope.dimension_count", "rope.dimension_sections"),
    *("expert_count", "expert_used_count", "expert_shared_count"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *("hyper_connection.count", "hyper_connection.low_rank", "kda.head_dim"),
)
# Publishers name the unused ids of the same vocabulary differently. If more tokens than this
# differ, it is another tokenizer.
_SAME_TOKENIZER = 0.01


@dataclass(frozen=True)
class HeadFault:
    """A fault that prevents using a head. code: for scripts. text: one sentence."""

    code: str
    text: str


@dataclass(frozen=True)
class HeadReport:
    """Whether a file can draft.

    ready: the head exists and is complete. reason: one sentence that says so, or what is missing.
    block: index of the MTP block; None if the file has neither its tensors nor metadata for it.
    types: number of matrices of the head by tensor type. stock: whether an unpatched llama.cpp
    loads the file. ours: whether our runtime drafts with it; else llama-server does. shared:
    whether it is a head-only file that takes embedding and output from its trunk. in_use: what our
    runtime drafts over; None for the whole vocabulary.
    """

    ready: bool
    reason: str
    block: int | None
    types: Mapping[str, int]
    draft: StoredDraftVocabulary | None
    stock: bool
    ours: bool = False
    shared: bool = False
    in_use: DraftInUse | None = None


def block_of(name: str) -> int | None:
    """The index of the block that a tensor is in; None for tensors outside the blocks."""
    match = _BLOCK.fullmatch(name)
    return int(match[1]) if match else None


def part_of(name: str, head_block: int | None, layout: DraftLayout | None) -> str:
    """The part of a model that a tensor belongs to: base, head or draft vocabulary."""
    short_output = layout is DraftLayout.SIDECAR and name == OUTPUT_TENSOR
    short_head = layout is DraftLayout.TABLE and name.endswith(SHORT_HEAD_SUFFIX)
    if name == ID_MAP_TENSOR or short_output or short_head:
        return "draft vocabulary"
    block = block_of(name)
    return "base" if block is None or head_block is None or block < head_block else "head"


def plain_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without trailing ones; ggml treats missing dimensions as 1."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


class MtpHead:
    """The MTP head of a model, which may be incomplete, contradict the metadata, or be absent.

    Tensors take precedence over metadata, because `graft` and `strip` also repair files whose
    metadata claim a head that does not exist or omit one that does.

    path: names the model in messages. file: the one with the metadata. tensors: those of all
    shards.
    """

    def __init__(self, path: Path | str, file: GgufFile, tensors: Mapping[str, TensorInfo]) -> None:
        self._path = path
        self.file = file
        self.tensors = tensors

    @cached_property
    def architecture(self) -> str:
        """The model's architecture; RequestError if its heads are not supported."""
        if not self.is_known:
            raise RequestError(f"{self._path}: {self._unknown_text}")
        return str(self.file.scalar("general.architecture"))

    @cached_property
    def kind(self) -> NextnBlock:
        """The row of the architecture; RequestError if its heads are not supported."""
        return BLOCKS[self.architecture]

    @property
    def _unknown_text(self) -> str:
        """Why a model of another architecture has no head, and how it gets one."""
        found = self.file.keys.get("general.architecture")
        if not isinstance(found, str):
            found = "an array" if isinstance(found, ArrayRef) else "none"
            return f"general.architecture: expected the name of an architecture, found {found}"
        lack = f"llama.cpp has no MTP head for architecture {found!r}"
        if blocks := self._nextn_blocks:
            lack = f"llama.cpp does not draft with block {min(blocks)}, a NextN block of {found!r}"
        return lack + (" (mtp-gguf train-head can train one)" if found in CARRIED else "")

    @cached_property
    def _nextn_blocks(self) -> set[int]:
        """Blocks with tensors of a NextN block."""
        names = (name for name in self.tensors if ".nextn." in name)
        return {block for name in names if (block := block_of(name)) is not None}

    @property
    def is_known(self) -> bool:
        """Whether MTP heads of the model's architecture are supported."""
        return self.file.keys.get("general.architecture") in KNOWN

    @property
    def carried_from(self) -> str | None:
        """The architecture of the original if this is a carrier, else None."""
        found = self.file.keys.get(CARRIED_FROM_KEY)
        is_carrier = self.file.keys.get("general.architecture") == "glm4moe"
        return found if is_carrier and isinstance(found, str) else None

    @cached_property
    def trunk_layers(self) -> int:
        """Number of trunk layers, which is also the index of the MTP block if there is one.

        RequestError if tensors and metadata do not determine it, or if blocks are missing.
        """
        present = {b for name in self.tensors if (b := block_of(name)) is not None}
        own = self._nextn_blocks
        blocks, claimed = self._block_count, self.claimed_layers
        if own:
            first = min(own)
        elif blocks is None or not 0 <= claimed < blocks:
            raise RequestError(
                f"{self._path}: {self.architecture}.block_count is {blocks}, with {claimed} MTP "
                "layers: the number of trunk layers cannot be determined"
            )
        else:
            first = blocks - claimed
        trunk = {block for block in present if block < first}
        if first == 0 or len(trunk) not in (0, first):
            raise RequestError(
                f"{self._path}: expected blocks 0 to {first - 1} before the MTP head, "
                f"found {len(trunk)} of them"
            )
        if not own and present - trunk:
            raise RequestError(
                f"{self._path}: expected {first} trunk layers by "
                f"{self.architecture}.block_count ({blocks}, of these {claimed} MTP layers), "
                f"found block {max(present)} without nextn tensors"
            )
        return first

    @cached_property
    def layers(self) -> int:
        """Number of MTP layers that have tensors; RequestError if there are gaps between them."""
        first = self.trunk_layers
        blocks = {b for name in self.tensors if (b := block_of(name)) is not None and b >= first}
        if blocks and max(blocks) - first + 1 != len(blocks):
            raise RequestError(
                f"{self._path}: expected MTP blocks from {first} without gaps, found "
                f"{len(blocks)} up to {max(blocks)}"
            )
        return len(blocks)

    @property
    def claimed_layers(self) -> int:
        """Number of MTP layers according to the metadata."""
        return self.file.integer(f"{self.architecture}.nextn_predict_layers") or 0

    @property
    def usable_layers(self) -> int:
        """Number of its MTP layers that llama.cpp drafts with: the first, or all of them."""
        return min(self.layers, 1) if self.kind.single else self.layers

    @cached_property
    def names(self) -> list[str]:
        """The tensors of the MTP block and of a stored draft vocabulary, in file order."""
        first = self.trunk_layers
        return [
            name
            for name in self.tensors
            if name == ID_MAP_TENSOR or ((block := block_of(name)) is not None and block >= first)
        ]

    @cached_property
    def suffixes(self) -> dict[str, str]:
        """Maps the name of each tensor of the MTP block to its suffix (the part after `blk.N.`)."""
        matches = {name: _BLOCK.fullmatch(name) for name in self.names}
        return {name: match[2] for name, match in matches.items() if match}

    @cached_property
    def is_alone(self) -> bool:
        """Whether this is a head-only file, without a trunk."""
        wide = self.is_known and self.kind.streams
        return (_WIDE_TRUNK_TENSOR if wide else TRUNK_TENSOR) not in self.tensors

    @cached_property
    def is_shared(self) -> bool:
        """Whether this is a head-only file that takes embedding, last norm and output of its trunk.

        The tensors decide, as in llama.cpp; the key that publishers write may be missing.
        """
        return self.is_alone and bool(self.suffixes) and EMBEDDING_TENSOR not in self.tensors

    @cached_property
    def missing(self) -> list[str]:
        """Suffixes of required tensors that usable MTP blocks lack; all of them without a head."""
        shared_experts = self.file.keys.get(f"{self.architecture}.expert_shared_count") != 0
        first = self.trunk_layers
        missing: list[str] = []
        for block in range(first, first + max(self.usable_layers, 1)):
            prefix = f"blk.{block}."
            present = {s for name, s in self.suffixes.items() if name.startswith(prefix)}
            for fused, parts in FUSED_SUFFIXES.items():
                if fused in present:
                    present.update(parts)
            missing += self.kind.missing(present, shared_experts)
        return missing

    def fused_parts(self, name: str) -> dict[str, int]:
        """The parts of the fused tensor `name` with their number of rows; empty if not fused.

        Blocks of the trunk may have fused tensors, too. The attn_qkv of linear attention is not
        a fused tensor.
        """
        match = _BLOCK.fullmatch(name)
        suffixes = FUSED_SUFFIXES.get(match[2], ()) if match else ()
        if not match or not suffixes or not self.is_known:
            return {}
        block = f"blk.{match[1]}."
        if match[2] == "attn_qkv.weight" and block + "attn_output.weight" not in self.tensors:
            return {}
        rows = {block + s: self.shapes[s][1] for s in suffixes if s in self.shapes}
        shape = self.tensors[name].shape
        fits = len(rows) == len(suffixes) and len(shape) > 1 and sum(rows.values()) == shape[1]
        return rows if fits else {}

    def check_complete(self) -> None:
        """RequestError, naming the missing tensors, if the MTP block is incomplete."""
        if self.missing:
            raise RequestError(
                f"{self._path} has no complete MTP head: {first_of(self.missing)} missing"
            )

    def check_layers(self) -> None:
        """RequestError if the file has more MTP layers than llama.cpp drafts with."""
        if self.layers > self.usable_layers:
            path = quoted(self._path)
            raise RequestError(
                f"{self._path}: expected one MTP layer, with which llama.cpp drafts, found "
                f"{self.layers} ({self.blocks_text}); mtp-gguf doctor {path} tells how to keep the "
                "first"
            )

    @cached_property
    def faults(self) -> tuple[HeadFault, ...]:
        """Faults that prevent using the head, in the order to fix them; empty for a valid head.

        Metadata of a wrong type are reported as a fault, not raised.
        """
        if not self.is_known:
            return (HeadFault("architecture", self._unknown_text),)
        try:
            _ = self.layers
            stages = (self._presence_faults, self._list_faults, self._shape_faults)
            for stage in stages:
                if found_here := tuple(stage()):
                    return found_here
        except (RequestError, FormatError) as error:
            return (HeadFault("blocks", str(error)),)
        try:
            _ = self.draft
        except FormatError as error:
            return (HeadFault("draft-vocabulary", str(error)),)
        return ()

    @cached_property
    def draft(self) -> StoredDraftVocabulary | None:
        """The draft vocabulary, from the headers; FormatError if its parts are contradictory."""
        return find_draft_vocabulary(self.file, self.tensors)

    @cached_property
    def types(self) -> Mapping[str, int]:
        """Number of matrices of the head by tensor type, most frequent type first."""
        matrices = [
            self.tensors[name].type.name
            for name, suffix in self.suffixes.items()
            if len(self.tensors[name].shape) > 1 and suffix != SHORT_HEAD_SUFFIX
        ]
        return dict(sorted(Counter(matrices).items(), key=lambda item: (-item[1], item[0])))

    @cached_property
    def report(self) -> HeadReport:
        """Whether the model can draft, in one sentence and a few facts."""
        if self.faults:
            fault = self.faults[0]
            hint = "mtp-gguf train-head trains" if self.carried_from else "mtp-gguf graft adds"
            return self.refusal(fault.text + (f"; {hint} one" if fault.code == "no-head" else ""))
        shared = self.is_shared
        drafts = self.kind.graph
        known = self.draft is None or self.draft.layout is DraftLayout.IDS
        stock = self.kind.loads_whole and not shared and known
        alone = "a head alone, " if self.is_alone else ""
        if shared:
            alone = "a head alone that shares its trunk's embedding and output, "
        reason = f"{alone}MTP head in {self.blocks_text}"
        if not drafts:
            reason += f", for a llama.cpp that drafts with {self.architecture} (newer than ours)"
        block, ours = self.trunk_layers, self.kind.ours
        in_use = draft_in_use(self.draft, (self.vocabulary_size or 0) if ours else 0)
        return HeadReport(True, reason, block, self.types, self.draft, stock, ours, shared, in_use)

    @property
    def blocks_text(self) -> str:
        """Where the head is: its block, or its blocks."""
        first, last = self.trunk_layers, self.trunk_layers + self.layers - 1
        return f"block {first}" if first == last else f"blocks {first} to {last}"

    def refusal(self, reason: str) -> HeadReport:
        """The report of a model that cannot draft."""
        return HeadReport(False, reason, self._block, {}, None, stock=False)

    def check_fit(self, base: "MtpHead") -> None:
        """RequestError, naming both files, if this head does not fit the trunk of `base`."""
        ours, theirs = base.architecture, self.architecture
        if theirs != ours:
            raise RequestError(
                f"{self._path} is {theirs}, but {base._path} is {ours}: its head does not fit"
            )
        for key in _SHARED_KEYS:
            given, wanted = self._shared(key, base), base._shared(key, self)
            if given != wanted and None not in (given, wanted):
                raise RequestError(
                    f"{self._path} has {key} {given}, but {base._path} has {wanted}: "
                    "its head does not fit"
                )
        if self.trunk_layers != base.trunk_layers:
            raise RequestError(
                f"{self._path} has a head for {self.trunk_layers} trunk layers, but {base._path} "
                f"has {base.trunk_layers}: its head does not fit"
            )
        self.check_vocabulary(base)
        for fault in self._shape_texts(base):
            raise RequestError(f"{self._path} does not fit {base._path}: {fault}")

    @property
    def _block_count(self) -> int | None:
        return self.file.integer(f"{self.architecture}.block_count")

    @property
    def _block(self) -> int | None:
        """The block of the head, or the block that it should be in."""
        try:
            if not self.is_known:
                return min(self._nextn_blocks, default=None)
            return self.trunk_layers if self.suffixes or self.claimed_layers else None
        except (RequestError, FormatError):
            return None

    def _presence_faults(self) -> Iterator[HeadFault]:
        """Faults of a head that is absent, incomplete, missing from the metadata, or miscounted."""
        trunk, claimed, blocks = self.trunk_layers, self.claimed_layers, self._block_count
        key = f"{self.architecture}.nextn_predict_layers"
        if not self.suffixes and not claimed:
            carrier = self.carried_from and f", a carrier of a {self.carried_from} model,"
            yield HeadFault("no-head", f"the file{carrier or ''} has no MTP head")
        elif not self.suffixes:
            text = f"the metadata claims {claimed} MTP layer, but no tensor of it is there"
            yield HeadFault("claimed-head", text)
        elif self.missing:
            missing, present = (
                [s for s in part if "_exps." in s]
                for part in (self.missing, self.suffixes.values())
            )
            half = ", its experts are half present" if missing and present else ""
            more = f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else ""
            yield HeadFault(
                "incomplete-head",
                f"the MTP head in block {trunk} is incomplete{half}: {', '.join(self.missing[:3])}"
                f"{more} {'are' if self.missing[1:] else 'is'} missing",
            )
        elif not claimed:
            yield HeadFault(
                "hidden-head",
                f"the MTP head is there (block {trunk}), but {key} is missing or 0, so llama.cpp "
                "will not use it",
            )
        elif claimed != self.layers or (self.kind.single and claimed != 1):
            expected = 1 if self.kind.single else self.layers
            there = f" ({self.blocks_text})" if self.layers > 1 else ""
            yield HeadFault(
                "layers",
                f"expected {expected} MTP layer{'s' if expected > 1 else ''}, found {claimed} by "
                f"{key} and {self.layers} by the tensors{there}",
            )
        elif blocks != trunk + claimed:
            yield HeadFault(
                "block-count",
                f"{self.architecture}.block_count is {'missing' if blocks is None else blocks}, "
                f"expected {trunk + claimed}: "
                f"{trunk} trunk layers and {claimed} MTP layer{'s' if claimed > 1 else ''}",
            )
        last = () if self.kind.streams else (OUTPUT_NORM_TENSOR,)
        for needed in (EMBEDDING_TENSOR, *last):
            if self.suffixes and not self.is_shared and needed not in self.tensors:
                yield HeadFault("shared-tensors", f"{needed} is missing, which the head needs")

    def _list_faults(self) -> Iterator[HeadFault]:
        """`recurrent_layers` must have an entry for each block, and false for the MTP block."""
        key = f"{self.architecture}.attention.recurrent_layers"
        if not isinstance(self.file.keys.get(key), ArrayRef):
            return
        entries = self.file.array(key) or []
        blocks = self.trunk_layers + self.claimed_layers
        if len(entries) != blocks or any(entries[self.trunk_layers :]):
            yield HeadFault(
                "recurrent-layers",
                f"{key} has {len(entries)} entries, expected {blocks} with false for the MTP block",
            )

    def _shape_faults(self) -> Iterator[HeadFault]:
        return (HeadFault("head-shape", text) for text in self._shape_texts(self))

    def _shape_texts(self, base: "MtpHead") -> Iterator[str]:
        """Faults of the head's shapes, given the sizes of `base`."""
        for name, suffix in self.suffixes.items():
            wanted = base.shapes.get(suffix)
            found = self.tensors[name].shape
            if wanted is not None and plain_shape(found) != wanted:
                hint = ""
                if suffix == "nextn.eh_proj.weight" and plain_shape(found) == wanted[::-1]:
                    hint = " (transposed)"
                yield f"{name}: expected shape {list(wanted)}, found {list(found)}{hint}"

    @property
    def vocabulary_size(self) -> int | None:
        """Rows of the embedding, or else tokens of the tokenizer; None if it has neither."""
        return vocabulary_size(self.file, self.tensors)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes in ggml order of an MTP block's tensors by suffix, from the trunk's sizes.

        Tensors whose sizes are missing from the metadata are omitted, and so are those of attention
        and feed-forward networks whose sizes only llama.cpp knows, or that differ between layers.
        """
        width, heads, kv = map(
            self._size, ("embedding_length", "attention.head_count", "attention.head_count_kv")
        )
        key, value = self._size("attention.key_length"), self._size("attention.value_length")
        ffn = self._size("feed_forward_length")
        experts, expert_ffn = self._size("expert_count"), self._size("expert_feed_forward_length")
        shared = self._size("expert_shared_feed_forward_length")
        queries, keys, values = 2 * heads * key, kv * key, kv * value
        if not self.kind.hybrid:  # GLM: no gates of attention, and a number of shared experts
            shared = expert_ffn * self._size("expert_shared_count")
            queries = heads * key
        fused = queries + keys + values if min(queries, keys, values) else 0
        shapes: dict[str, tuple[int, ...]] = {
            "nextn.eh_proj.weight": (2 * width, width),
            "nextn.enorm.weight": (width,),
            "nextn.hnorm.weight": (width,),
            "nextn.shared_head_norm.weight": (width,),
            "nextn.embed_tokens.weight": (width, self.vocabulary_size or 0),
            "attn_norm.weight": (width,),
            "post_attention_norm.weight": (width,),
            "ffn_norm.weight": (width,),
        }
        sizes: dict[str, tuple[int, ...]] = {
            "attn_q.weight": (width, queries),
            "attn_k.weight": (width, keys),
            "attn_v.weight": (width, values),
            "attn_qkv.weight": (width, fused),
            "attn_output.weight": (heads * value, width),
            "attn_q_norm.weight": (key,),
            "attn_k_norm.weight": (key,),
            "ffn_gate.weight": (width, ffn),
            "ffn_up.weight": (width, ffn),
            "ffn_down.weight": (ffn, width),
            "ffn_gate_inp.weight": (width, experts),
            "ffn_gate_exps.weight": (width, expert_ffn, experts),
            "ffn_up_exps.weight": (width, expert_ffn, experts),
            "ffn_gate_up_exps.weight": (width, 2 * expert_ffn, experts),
            "ffn_down_exps.weight": (expert_ffn, width, experts),
            "exp_probs_b.bias": (experts,),
            "ffn_gate_inp_shexp.weight": (width,),
            "ffn_gate_shexp.weight": (width, shared),
            "ffn_up_shexp.weight": (width, shared),
            "ffn_down_shexp.weight": (shared, width),
        }
        if self.kind.streams:
            wide = width * self._size("hyper_connection.count")
            rank = self._size("hyper_connection.low_rank")
            shapes |= {"nextn.hnorm.weight": (wide,)}
            for place in ("hc_attn", "hc_ffn", "nextn.hc_head"):
                shapes |= {
                    f"{place}_norm.weight": (wide,),
                    f"{place}_down.weight": (wide, rank),
                    f"{place}_up.weight": (rank, wide),
                }
        shapes |= sizes if self.kind.ours and self.kind.single else {}
        return {suffix: plain_shape(shape) for suffix, shape in shapes.items() if min(shape) > 0}

    def check_vocabulary(self, base: "MtpHead") -> None:
        """RequestError for another tokenizer, whose size may differ (a head has no rows of it)."""
        ours, theirs = (head.vocabulary_size for head in (base, self))
        differing = _differing_tokens(base.file, self.file)
        if differing is None:
            if None not in (ours, theirs) and ours != theirs:
                raise RequestError(
                    f"{self._path} has a vocabulary of {theirs} tokens, but {base._path} has one "
                    f"of {ours}: its head does not fit"
                )
        elif differing > _SAME_TOKENIZER * min(ours or differing, theirs or differing):
            raise RequestError(
                f"{self._path} and {base._path} have different tokenizers ({differing} tokens "
                "differ): its head does not fit"
            )

    def _size(self, key: str) -> int:
        found = self.parameter(key)
        return found if isinstance(found, int) else 0

    def _shared(self, key: str, other: "MtpHead") -> Scalar | tuple[Scalar, ...] | None:
        """A hyperparameter to compare with that of another file of the same architecture.

        If both have one entry per layer, those of the trunk; else the last one.
        """
        full = f"{self.architecture}.{key}"
        both = (isinstance(head.file.keys.get(full), ArrayRef) for head in (self, other))
        if all(both):
            entries = self.file.array(full) or []
            return tuple(entries[: min(self.trunk_layers, other.trunk_layers)])
        return self.parameter(key)

    def parameter(self, key: str, layer: int | None = None) -> Scalar | tuple[Scalar, ...] | None:
        """A hyperparameter: the value or whole array, or of a per-layer array one entry.

        layer: of an MTP layer, counted from 0; None for the last entry.
        """
        full = f"{self.architecture}.{key}"
        if not isinstance(self.file.keys.get(full), ArrayRef):
            return self.file.scalar(full)
        entries = self.file.array(full) or []
        if key.endswith("dimension_sections"):
            return tuple(entries)
        at = len(entries) - 1 if layer is None else self.trunk_layers + layer
        return entries[at] if 0 <= at < len(entries) else None


def _differing_tokens(a: GgufFile, b: GgufFile) -> int | None:
    """Number of ids whose token differs between the files; None if a token list is missing.

    Ids that only one file has do not count: embeddings are resized for added tokens, or rounded up.
    """
    key = "tokenizer.ggml.tokens"
    if not all(isinstance(file.keys.get(key), ArrayRef) for file in (a, b)):
        return None
    if a.raw(key) == b.raw(key):
        return 0
    ours, theirs = a.array(key) or [], b.array(key) or []
    return sum(x != y for x, y in zip(ours, theirs, strict=False))
