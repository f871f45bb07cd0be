"""FastMTP draft vocabularies in GGUF files: their keys, tensors and layouts.

A draft vocabulary is a ranked list of target token ids, most useful first. docs/fastmtp.md
specifies the three layouts byte by byte.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from .errors import FormatError
from .format import ArrayRef, GgufFile, TensorInfo, ValueType
from .tensor_types import I64

IDS_KEY = "mtp_gguf.fastmtp.token_ids"
SOURCE_KEY = "mtp_gguf.fastmtp.source"
COVERAGE_KEY = "mtp_gguf.fastmtp.coverage"
ID_MAP_TENSOR = "d2t"
SHORT_HEAD_SUFFIX = "nextn.shared_head_head.weight"
OUTPUT_TENSOR = "output.weight"
EMBEDDING_TENSOR = "token_embd.weight"


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
