"""The tokenizer of a checkpoint as GGUF metadata, as llama.cpp's converter writes it.

Only byte-level BPE is supported. Besides tokens and merges, llama.cpp needs the pre-tokenizer,
which splits text before merging; the splits are built in and selected by name
(`tokenizer.ggml.pre`). The name is found by the regular expression in tokenizer.json.
"""

from collections.abc import Mapping
from enum import IntEnum

from tokenizers import AddedToken

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.files.format import Value, ValueType

from ..checkpoints.config import ConfigReader
from ..checkpoints.json_files import read_json_object
from .special_tokens import check_id, special_metadata
from .tokenizer_files import QWEN35_SPLIT, SETTINGS_NAME, TokenizerFiles

# Regular expressions in tokenizer.json, and llama.cpp's names for them (src/llama-vocab.cpp).
PRE_TOKENIZERS = {
    QWEN35_SPLIT: "qwen35",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}
# Added tokens that llama.cpp treats as control tokens because of their text, whatever their flags.
_CONTROL_TEXTS = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
_CONTROL_ENDS = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))


class TokenType(IntEnum):
    """Types of tokens (`enum llama_token_type` in llama.h)."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


def tokenizer_metadata(
    files: TokenizerFiles, n_vocab: int, pre: str, tokens_by_role: Mapping[str, str]
) -> dict[str, Value]:
    """The tokenizer.* keys for `n_vocab` tokens, with unused ids named [PADn].

    pre: the name of the pre-tokenizer. tokens_by_role: as `TargetModel.tokens`.
    """
    tokens, kinds = _tokens(files, n_vocab)
    return {
        "tokenizer.ggml.model": Value(ValueType.STRING, "gpt2"),
        "tokenizer.ggml.pre": Value(ValueType.STRING, pre),
        "tokenizer.ggml.tokens": Value(ValueType.STRING, tokens),
        "tokenizer.ggml.token_type": Value(ValueType.I32, kinds),
        **special_metadata(files, n_vocab, tokens_by_role),
    }


def pre_tokenizer(files: TokenizerFiles, splits: Mapping[str, str]) -> str:
    """Return llama.cpp's name of the pre-tokenizer; CheckpointError if its split is unknown.

    splits: as `TargetModel.splits`, beside those of all families.
    """
    known = {**PRE_TOKENIZERS, **splits}
    for pattern in files.splits:
        if pattern in known:
            return known[pattern]
    raise CheckpointError(
        f"{files.path}: pre_tokenizer: its split is unknown "
        f"({', '.join(files.splits) or 'no regular expression'}); if you know llama.cpp's name for "
        "it, pass --tokenizer-pre NAME"
    )


def _tokens(files: TokenizerFiles, n_vocab: int) -> tuple[list[str], list[int]]:
    vocabulary = files.tokenizer.get_vocab(with_added_tokens=True)
    by_id: dict[int, str] = {}
    for token, number in sorted(vocabulary.items()):
        if (other := by_id.setdefault(number, token)) != token:
            raise CheckpointError(
                f"{files.path}: expected one token for each id, found {other!r:.60} and "
                f"{token!r:.60} for {number}"
            )
    if by_id and max(by_id) >= n_vocab:
        raise _too_many(files, by_id, n_vocab)
    added = files.tokenizer.get_added_tokens_decoder()
    tokens, kinds = [], []
    for number in range(n_vocab):
        text = by_id.get(number)
        if text is None:
            text, kind = f"[PAD{number}]", TokenType.UNUSED
        elif number in added:
            text, kind = _added_token(files, number, added[number], text)
        else:
            kind = TokenType.NORMAL
        tokens.append(text)
        kinds.append(int(kind))
    _check_distinct(files, tokens)
    return tokens, kinds


def _too_many(files: TokenizerFiles, by_id: dict[int, str], n_vocab: int) -> CheckpointError:
    """An error about tokens without a row of the embedding: those of the settings, or all."""
    limit = f"vocab_size ({n_vocab}) of the config"
    for number, text in sorted(by_id.items()):
        if number >= n_vocab and not files.stores(text):
            return CheckpointError(
                f"{files.folder / SETTINGS_NAME}: expected tokens of {files.path.name}, found "
                f"{text!r:.60}, for which {limit} leaves no id; correct the name, or train with a "
                "resized embedding (resize_token_embeddings of transformers)"
            )
    return CheckpointError(f"{files.path}: expected ids below {limit}, found {max(by_id)}")


def _added_token(
    files: TokenizerFiles, number: int, token: AddedToken, text: str
) -> tuple[str, TokenType]:
    """Text and type of an added token; the text is normalized, as llama.cpp compares it."""
    if not token.normalized:
        ids = files.tokenizer.encode(text, add_special_tokens=False).ids
        text = files.tokenizer.decode(ids, skip_special_tokens=False)
    framed = any(text.startswith(start) and text.endswith(end) for start, end in _CONTROL_ENDS)
    if token.special or framed or text in _CONTROL_TEXTS:
        return text, TokenType.CONTROL
    return text.replace("\u2581", " "), TokenType.USER_DEFINED  # the space of SentencePiece


def _check_distinct(files: TokenizerFiles, tokens: list[str]) -> None:
    """CheckpointError for tokens with the same text, on which llama.cpp aborts."""
    first: dict[str, int] = {}
    for number, text in enumerate(tokens):
        read = text.partition("\0")[0] or f"[EMPTY_{number}]"  # as llama.cpp reads it
        if first.setdefault(read, number) != number:
            raise CheckpointError(
                f"{files.path}: expected a different text for each token, found {read!r:.60} for "
                f"{first[read]} and {number}, which llama.cpp cannot load"
            )


def special_ids(files: TokenizerFiles, n_vocab: int) -> list[int]:
    """Ids that every draft vocabulary contains: added tokens and the end-of-turn ids.

    Added tokens are those for chat turns, tools and thinking; generation_config.json may name
    further ids that end a turn. CheckpointError if one is outside the vocabulary.
    """
    ids = set(files.tokenizer.get_added_tokens_decoder())
    for name in ("generation_config.json", "config.json"):
        path = files.folder / name
        if path.is_file():
            ends = ConfigReader(str(path), read_json_object(path)).config.get("eos_token_id")
            for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
                ids.add(check_id(path, "eos_token_id", end, n_vocab))
    return sorted(ids)
