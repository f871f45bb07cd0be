"""A FastMTP draft vocabulary for a GGUF file, ranked with the file's own tokenizer."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.heads.draft_list import required_ids
from mtp_gguf.gguf_tools.heads.fastmtp import default_size
from mtp_gguf.gguf_tools.model import Model

from . import draft_vocabulary
from .draft_vocabulary import DraftVocabulary, Encoder


class Tokenizer(Encoder, Protocol):
    """A tokenizer of `size` tokens."""

    size: int


def rank_for_gguf(
    model: Model,
    size: int | None,
    corpus: Sequence[Path],
    ids_file: Path | None,
    open_tokenizer: Callable[[Path], AbstractContextManager[Tokenizer]],
) -> DraftVocabulary:
    """Rank as `convert --fastmtp` does: by the ids file, else by the corpus, else by id.

    size: None for the default. open_tokenizer: opens the tokenizer of a GGUF. RequestError if the
    request does not fit the vocabulary.
    """
    n_vocab = model.vocabulary_size
    if not n_vocab:
        raise RequestError(f"{model.path}: has neither an embedding nor tokens to choose from")
    required = required_ids(model)
    wanted = size or default_size(n_vocab, len(required))
    if ids_file:
        return draft_vocabulary.rank_by_list(ids_file, required, n_vocab, size)
    if corpus:
        with open_tokenizer(model.paths[0]) as tokenizer:
            if tokenizer.size != n_vocab:
                raise RequestError(
                    f"{model.path}: its tokenizer has {tokenizer.size} tokens, its embedding "
                    f"{n_vocab} rows"
                )
            return draft_vocabulary.rank_by_corpus(corpus, tokenizer, required, n_vocab, wanted)
    return draft_vocabulary.rank_by_id(required, n_vocab, wanted)


def rank_by_own_output(
    model: Model,
    answers: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]],
    size: int | None,
    progress: Callable[[int], None],
) -> DraftVocabulary:
    """Rank by how often the model itself generates each token.

    answers: the tokens of each prompt and of the model's answer. Tokens that were not generated
    follow, ranked by their frequency in the prompts, then by id.
    progress: called with the number of tokens just generated. RequestError if there are none.
    """
    n_vocab = model.vocabulary_size
    if not n_vocab:
        raise RequestError(f"{model.path}: has neither an embedding nor tokens to choose from")
    required = required_ids(model)
    wanted = size or default_size(n_vocab, len(required))
    asked, written = np.zeros(n_vocab, np.int64), np.zeros(n_vocab, np.int64)
    count = 0
    for prompt, answer in answers:
        count += 1
        asked += np.bincount(prompt, minlength=n_vocab)[:n_vocab]
        written += np.bincount(answer, minlength=n_vocab)[:n_vocab]
        progress(len(answer))
    total = int(written.sum())
    if not total:
        raise RequestError(f"{model.path}: wrote nothing in answer to {count} prompts")
    source = f"counted on {total} tokens of its own output"
    # Frequency in the prompts only breaks ties.
    ranked = draft_vocabulary.rank_by_counts(
        written * (int(asked.sum()) + 1) + asked, source, required, wanted
    )
    covered = np.cumsum(written[ranked.ids]) / total
    sizes = sorted({n for n in draft_vocabulary.COVERAGE_SIZES if n < wanted} | {wanted})
    return DraftVocabulary(ranked.ids, source, {n: float(covered[n - 1]) for n in sizes}, total)
