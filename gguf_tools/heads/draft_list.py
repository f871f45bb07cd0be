"""Reads the token ids of a stored draft vocabulary in any layout, and checks them."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from sys import byteorder

from ..files.format import ArrayRef, Value, ValueType
from ..model import Metadata, Model
from .fastmtp import (
    COVERAGE_KEY,
    ID_MAP_TENSOR,
    IDS_KEY,
    SOURCE_KEY,
    DraftLayout,
    StoredDraftVocabulary,
    find_draft_vocabulary,
)

# The key of a list that is not in use: `fastmtp remove --in-place` hid it, or an in-place change
# was interrupted. It differs from the key of an active list only in its last byte.
HIDDEN_IDS_KEY = IDS_KEY[:-1] + "_"
DRAFT_KEYS = (IDS_KEY, SOURCE_KEY, COVERAGE_KEY, HIDDEN_IDS_KEY)

# Where the converter puts these keys.
BEFORE_TOKENIZER = ("tokenizer.",)

# Kinds of tokens that are not text (`enum llama_token_type` in llama.h): control, user-defined.
_SPECIAL_KINDS = (3, 4)
_TYPES_KEY = "tokenizer.ggml.token_type"


@dataclass(frozen=True)
class DraftList:
    """A stored draft vocabulary: `header` from the file, `ids` in rank order."""

    header: StoredDraftVocabulary
    ids: tuple[int, ...]

    def metadata(self, with_ids: bool) -> dict[str, Value]:
        """The keys that describe it, including the ids for the `ids` layout."""
        keys = {}
        if with_ids:
            keys[IDS_KEY] = Value(ValueType.U32, self.ids)
        if self.header.source is not None:
            keys[SOURCE_KEY] = Value(ValueType.STRING, self.header.source)
        if self.header.coverage is not None:
            keys[COVERAGE_KEY] = Value(ValueType.F32, self.header.coverage)
        return keys


def read_draft_list(model: Model) -> DraftList | None:
    """The model's draft vocabulary, or None; FormatError if its parts contradict each other."""
    header = find_draft_vocabulary(model.first, model.tensors)
    if header is None:
        return None
    if header.layout is DraftLayout.IDS:
        held = model.first.keys[IDS_KEY]
        assert isinstance(held, ArrayRef)
        data, code = model.first.source.read(held.offset, held.length), "I"
    else:
        data, code = model.read(ID_MAP_TENSOR), "q"
    ids = array(code, data)
    if byteorder == "big":
        ids.byteswap()
    return DraftList(header, tuple(ids))


def without_draft_keys(metadata: Metadata) -> Metadata:
    """`metadata` without the keys of a draft vocabulary."""
    return {key: value for key, value in metadata.items() if key not in DRAFT_KEYS}


def list_faults(ids: Sequence[int], n_vocab: int, required: Sequence[int]) -> list[str]:
    """The faults of a list of ids, one sentence each; empty for a valid list.

    required: ids that every list must contain.
    """
    if _are_relative(ids, n_vocab):
        return [
            "its ids are relative to their index (as d2t of EAGLE-3 has them), "
            "expected absolute token ids"
        ]
    faults = []
    outside = [i for i in ids if not 0 <= i < n_vocab]
    if outside:
        faults.append(
            f"{len(outside)} of its ids are outside 0 to {n_vocab - 1}, first {outside[0]}"
        )
    counts = Counter(ids)
    if len(counts) < len(ids):
        twice = next(i for i in ids if counts[i] > 1)
        faults.append(
            f"{len(ids) - len(counts)} of its ids are repetitions, first {twice} "
            f"({counts[twice]} times)"
        )
    absent = [i for i in required if i not in counts]
    if absent:
        faults.append(
            f"{len(absent)} special tokens (turn ends, tools, thinking) are not in it, "
            f"first {absent[0]}"
        )
    return faults


def required_ids(model: Model) -> list[int]:
    """Ids that every draft vocabulary must contain: special tokens and end-of-turn tokens."""
    ids: set[int] = set()
    n_vocab = model.vocabulary_size or 0
    if isinstance(model.first.keys.get(_TYPES_KEY), ArrayRef):
        kinds = (model.first.array(_TYPES_KEY) or [])[:n_vocab]
        ids |= {i for i, kind in enumerate(kinds) if kind in _SPECIAL_KINDS}
    for role in ("eos", "eot", "eom"):
        held = model.first.keys.get(f"tokenizer.ggml.{role}_token_id")
        if isinstance(held, int) and 0 <= held < n_vocab:
            ids.add(held)
    return sorted(ids)


def _are_relative(ids: Sequence[int], n_vocab: int) -> bool:
    """Whether the ids are offsets as in the `d2t` tensor of EAGLE-3 (token id minus index).

    Consecutive tokens have the same offset, so most offsets are repeated; a sorted list of absolute
    ids has at most a few repetitions.
    """
    if len(ids) < 2 or len(ids) - len(set(ids)) < len(ids) / 4:
        return False
    absolute = [index + i for index, i in enumerate(ids)]
    rising = all(a < b for a, b in pairwise(absolute))
    return rising and absolute[0] >= 0 and absolute[-1] < n_vocab
