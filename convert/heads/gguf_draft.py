"""A FastMTP draft vocabulary for a GGUF file, ranked with the file's own tokenizer."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.heads.draft_list import required_ids
from mtp_gguf.gguf_tools.heads.fastmtp import default_size
from mtp_gguf.gguf_tools.model import Model

from ..options import DraftOptions
from .draft_vocabulary import DraftVocabulary, Encoder, rank, rank_by_counts


def rank_for_gguf(model: Model, asked: DraftOptions) -> DraftVocabulary:
    """Rank as `convert --fastmtp` does, with the tokenizer of the file.

    RequestError if the request does not fit the vocabulary.
    """
    n_vocab = _vocabulary_size(model)

    @contextmanager
    def tokenizer() -> Iterator[Encoder]:
        from mtp_gguf.native.vocabulary import Vocabulary  # noqa: PLC0415  (loads llama.cpp)

        with Vocabulary(model.paths[0]) as vocabulary:
            if vocabulary.size != n_vocab:
                raise RequestError(
                    f"{model.path}: its tokenizer has {vocabulary.size} tokens, its embedding "
                    f"{n_vocab} rows"
                )
            yield vocabulary

    return rank(asked, required_ids(model), n_vocab, tokenizer)


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
    n_vocab, required = _vocabulary_size(model), required_ids(model)
    wanted = size or default_size(n_vocab, len(required))
    asked, written = np.zeros(n_vocab, np.int64), np.zeros(n_vocab, np.int64)
    count = 0
    for prompt, answer in answers:
        count += 1
        asked += np.bincount(prompt, minlength=n_vocab)[:n_vocab]
        written += np.bincount(answer, minlength=n_vocab)[:n_vocab]
        progress(len(answer))
    if not written.any():
        raise RequestError(f"{model.path}: wrote nothing in answer to {count} prompts")
    source = f"counted on {written.sum()} tokens of its own output"
    ranked = rank_by_counts(written, source, required, wanted, ties=asked)
    known = {n: share for n, share in ranked.coverage.items() if n <= wanted}
    return replace(ranked, coverage=known)


def _vocabulary_size(model: Model) -> int:
    """The number of tokens to choose from; RequestError without any."""
    if not model.vocabulary_size:
        raise RequestError(f"{model.path}: has neither an embedding nor tokens to choose from")
    return model.vocabulary_size
