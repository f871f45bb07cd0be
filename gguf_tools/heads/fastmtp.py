"""FastMTP draft vocabularies in GGUF files: their keys, tensors and layouts.

A draft vocabulary is a ranked list of target token ids, most useful first. docs/fastmtp.md
specifies the three layouts byte by byte.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ..errors import FormatError
from ..files.format import ArrayRef, GgufFile, TensorInfo, ValueType
from ..files.tensor_types import I64

IDS_KEY = "mtp_gguf.fastmtp.token_ids"
SOURCE_KEY = "mtp_gguf.fastmtp.source"
COVERAGE_KEY = "mtp_gguf.fastmtp.coverage"
ID_MAP_TENSOR = "d2t"
SHORT_HEAD_SUFFIX = "nextn.shared_head_head.weight"
OUTPUT_TENSOR = "output.weight"
EMBEDDING_TENSOR = "token_embd.weight"

_DEFAULT_SIZE = 32768
# What our runtime does when it loads a file (native/src/head/draft_vocabulary.cpp): it makes a list
# for a vocabulary of at least this size. At the end of a list so many ids, or a quarter, are
# replaced by tokens of the text, and three eighths of a made list by others that are like them.
_LEAST_VOCABULARY = 32768
_RING = 2048


class DraftLayout(str, Enum):
    """How a draft vocabulary is stored."""

    IDS = "ids"
    TABLE = "table"
    SIDECAR = "sidecar"


@dataclass(frozen=True)
class StoredDraftVocabulary:
    """What the headers say about a draft vocabulary: layout, size, and origin of the list."""

    layout: DraftLayout
    size: int
    source: str | None
    coverage: float | None


@dataclass(frozen=True)
class DraftInUse:
    """What our runtime drafts over.

    size: tokens. ring: how many of them follow the text. layout: that of the list in the file; None
    if the file has none, and gets one when it is loaded.
    """

    size: int
    ring: int
    layout: DraftLayout | None

    @property
    def gathered(self) -> bool:
        """Whether the rows of its tokens are copied from those of the whole vocabulary."""
        return self.layout in {None, DraftLayout.IDS}

    @property
    def other_sizes(self) -> list[int]:
        """Sizes to compare it with; -1 for the whole vocabulary. A made list can also be longer."""
        larger = [] if self.layout else [2 * self.size]
        smaller = [size for size in (self.size // 2, self.size // 4) if size]
        return larger + smaller + ([-1] if self.gathered else [])

    @property
    def text(self) -> str:
        """The same in a few words for people."""
        made = "by id, chosen when the file is loaded"
        origin = f"layout {self.layout.value}" if self.layout else made
        follow = f", the last {self.ring} follow the text" if self.ring else ""
        return f"{self.size} tokens, {origin}{follow}"


def default_size(n_vocab: int, n_required: int) -> int:
    """The default size of a list: 32K as in FastMTP, or a quarter of a small vocabulary."""
    return max(min(_DEFAULT_SIZE, n_vocab // 4), n_required)


def draft_in_use(draft: StoredDraftVocabulary | None, n_vocab: int) -> DraftInUse | None:
    """What our runtime drafts over by default; None for the whole vocabulary."""
    if draft is not None:
        ring = min(_RING, draft.size // 4) if draft.layout is DraftLayout.IDS else 0
        return DraftInUse(draft.size, ring, draft.layout)
    if n_vocab < _LEAST_VOCABULARY:
        return None
    size = default_size(n_vocab, 0)
    return DraftInUse(size, min(_RING, size // 4) + size * 3 // 8, None)


def find_draft_vocabulary(
    file: GgufFile, tensors: Mapping[str, TensorInfo]
) -> StoredDraftVocabulary | None:
    """The draft vocabulary of a model, read from its headers; None if it has none.

    file: the one with the metadata. tensors: those of all shards, by name.

    FormatError if its parts contradict each other. The ids themselves are not read.
    """
    source = file.scalar(SOURCE_KEY)
    coverage = file.scalar(COVERAGE_KEY)
    about = (
        source if isinstance(source, str) else None,
        coverage if isinstance(coverage, float) and 0 <= coverage <= 1 else None,
    )
    array = file.keys.get(IDS_KEY)
    if array is not None:
        if not isinstance(array, ArrayRef) or array.type is not ValueType.U32 or not array.count:
            raise FormatError(f"{file.source.name}: {IDS_KEY}: expected a filled array of U32")
        return StoredDraftVocabulary(DraftLayout.IDS, array.count, *about)
    id_map = tensors.get(ID_MAP_TENSOR)
    if id_map is None:
        return None
    if id_map.type is not I64 or len(id_map.shape) != 1 or not id_map.shape[0]:
        raise FormatError(
            f"{file.source.name}: {ID_MAP_TENSOR}: expected one dimension of I64, "
            f"found {list(id_map.shape)} {id_map.type.name}"
        )
    size = id_map.shape[0]
    short = next((t for t in tensors.values() if t.name.endswith(SHORT_HEAD_SUFFIX)), None)
    layout = DraftLayout.TABLE if short is not None else DraftLayout.SIDECAR
    rows = short or tensors.get(OUTPUT_TENSOR)
    if rows is None or rows.shape[1:] != (size,):
        name = OUTPUT_TENSOR if rows is None else rows.name
        found = "no such tensor" if rows is None else f"shape {list(rows.shape)}"
        raise FormatError(
            f"{file.source.name}: {name}: expected {size} rows, as {ID_MAP_TENSOR} has ids, "
            f"found {found}"
        )
    return StoredDraftVocabulary(layout, size, *about)


def vocabulary_size(file: GgufFile, tensors: Mapping[str, TensorInfo]) -> int | None:
    """Rows of the embedding, or else tokens of the tokenizer; None if the model has neither.

    file: the one with the metadata. tensors: those of all shards, by name.
    """
    embedding = tensors.get(EMBEDDING_TENSOR)
    if embedding is not None:
        return embedding.shape[-1]
    tokens = file.keys.get("tokenizer.ggml.tokens")
    return tokens.count if isinstance(tokens, ArrayRef) else None
