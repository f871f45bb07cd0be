"""A FastMTP draft vocabulary for a GGUF file, ranked with the file's own tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mtp_gguf.gguf_tools.draft_list import required_ids, vocabulary_size
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.surgery import Model
from mtp_gguf.native.generate import Generation, generate
from mtp_gguf.native.vocabulary import Vocabulary

from . import draft_vocabulary
from .draft_vocabulary import DraftVocabulary


def rank_for_gguf(
    model: Model, size: int | None, corpus: Sequence[Path], ids_file: Path | None
) -> DraftVocabulary:
    """Rank as `convert --fastmtp` does: by the ids file, else by the corpus, else by id.

    size: None takes the default. RequestError when the request does not fit the vocabulary.
    """
    n_vocab = vocabulary_size(model)
    if not n_vocab:
        raise RequestError(f"{model.path}: has neither an embedding nor tokens to choose from")
    required = required_ids(model)
    wanted = size or draft_vocabulary.default_size(n_vocab, len(required))
    if ids_file:
        return draft_vocabulary.rank_by_list(ids_file, required, n_vocab, size)
    if corpus:
        with Vocabulary(model.paths[0]) as tokenizer:
            if tokenizer.size != n_vocab:
                raise RequestError(
                    f"{model.path}: its tokenizer has {tokenizer.size} tokens, its embedding "
                    f"{n_vocab} rows"
                )
            return draft_vocabulary.rank_by_corpus(corpus, tokenizer, required, n_vocab, wanted)
    return draft_vocabulary.rank_by_id(required, n_vocab, wanted)


def rank_by_own_output(
    model: Model,
    prompts: Sequence[str],
    size: int | None,
    settings: Generation,
    progress: Callable[[int], None],
) -> DraftVocabulary:
    """Rank by how often the model itself writes each token, in answer to `prompts`.

    Tokens that it did not write follow by how often they are in the prompts, then by id.
    progress: called with the number of tokens just written. RequestError when it writes nothing.
    """
    n_vocab = vocabulary_size(model)
    if not n_vocab:
        raise RequestError(f"{model.path}: has neither an embedding nor tokens to choose from")
    required = required_ids(model)
    wanted = size or draft_vocabulary.default_size(n_vocab, len(required))
    asked, written = np.zeros(n_vocab, np.int64), np.zeros(n_vocab, np.int64)
    for prompt, answer in generate(model.paths[0], prompts, settings):
        asked += np.bincount(prompt, minlength=n_vocab)[:n_vocab]
        written += np.bincount(answer, minlength=n_vocab)[:n_vocab]
        progress(len(answer))
    total = int(written.sum())
    if not total:
        raise RequestError(f"{model.path}: wrote nothing in answer to {len(prompts)} prompts")
    source = f"counted on {total} tokens of its own output"
    # What the prompts say breaks ties alone.
    ranked = draft_vocabulary.rank_by_counts(
        written * (int(asked.sum()) + 1) + asked, source, required, wanted
    )
    covered = np.cumsum(written[ranked.ids]) / total
    sizes = sorted({n for n in draft_vocabulary.COVERAGE_SIZES if n < wanted} | {wanted})
    return DraftVocabulary(ranked.ids, source, {n: float(covered[n - 1]) for n in sizes})
