"""A FastMTP draft vocabulary for a GGUF file, ranked with the file's own tokenizer."""

from collections.abc import Sequence
from pathlib import Path

from mtp_gguf.gguf_tools.draft_list import required_ids, vocabulary_size
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.surgery import Model
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
