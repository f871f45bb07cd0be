"""The tokenizer of a checkpoint as GGUF metadata, as llama.cpp's converter writes it.

Only byte-level BPE is known. What llama.cpp must know besides tokens and merges is how text is
split before merging: it has the splits built in and picks one by name (`tokenizer.ggml.pre`). The
name is found by the split's own regular expression in tokenizer.json.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.format import Value, ValueType

from .checkpoint import read_json_object
from .config import ConfigReader, is_whole

# Regular expressions of tokenizer.json and llama.cpp's names for them (src/llama-vocab.cpp).
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _SPACES: "qwen35",
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    + _SPACES: "qwen2",
}


class TokenType(IntEnum):
    """Kinds of tokens (`enum llama_token_type` in llama.h)."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint; CheckpointError when it is absent or damaged."""
    path = folder / "tokenizer.json"
    _check_is_bpe(folder, read_json_object(path))
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: expected a tokenizer, found: {error}") from None


def tokenizer_metadata(
    folder: Path, tokenizer: Tokenizer, n_vocab: int, pre: str | None
) -> dict[str, Value]:
    """The tokenizer.* keys: `n_vocab` tokens, the unused ids named [PADn].

    pre: the name of the pre-tokenizer where the user gave one; otherwise it is recognised.
    """
    definition = read_json_object(folder / "tokenizer.json")
    tokens, kinds = _tokens(folder, tokenizer, n_vocab)
    keys = {
        "tokenizer.ggml.model": Value(ValueType.STRING, "gpt2"),
        "tokenizer.ggml.pre": Value(ValueType.STRING, pre or _recognise(folder, definition)),
        "tokenizer.ggml.tokens": Value(ValueType.STRING, tokens),
        "tokenizer.ggml.token_type": Value(ValueType.I32, kinds),
    }
    keys |= _special_vocabulary(folder, n_vocab)
    if _adds_nothing(definition):
        keys["tokenizer.ggml.add_bos_token"] = Value(ValueType.BOOL, False)
        keys["tokenizer.ggml.add_eos_token"] = Value(ValueType.BOOL, False)
    return keys


def _adds_nothing(definition: dict[str, Any]) -> bool:
    """Whether the post-processor is plain ByteLevel, which puts no token around a text.

    It outweighs tokenizer_config.json; released versions of the gguf package overlook it.
    """
    processor = definition.get("post_processor") or {}
    kinds = [p.get("type") for p in processor.get("processors", [processor])]
    return "ByteLevel" in kinds and "TemplateProcessing" not in kinds


def _check_is_bpe(folder: Path, definition: dict[str, Any]) -> None:
    model = definition.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if kind != "BPE":
        raise CheckpointError(
            f"{folder / 'tokenizer.json'}: model.type: expected BPE, found {kind!r:.60}"
        )
    assert isinstance(model, dict)
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        # Byte-level BPE has none; the tokenizers package aborts on merges that lack theirs.
        if model.get(key):
            raise CheckpointError(
                f"{folder / 'tokenizer.json'}: model.{key}: expected none, found {model[key]!r:.60}"
            )


def _recognise(folder: Path, definition: dict[str, Any]) -> str:
    patterns = list(_split_patterns(definition.get("pre_tokenizer")))
    for pattern in patterns:
        if pattern in PRE_TOKENIZERS:
            return PRE_TOKENIZERS[pattern]
    raise CheckpointError(
        f"{folder / 'tokenizer.json'}: pre_tokenizer: its split is not known "
        f"({', '.join(patterns) or 'no regular expression'}); if you know llama.cpp's name for "
        "it, pass --tokenizer-pre NAME"
    )


def _split_patterns(node: Any) -> Iterator[str]:
    if not isinstance(node, dict):
        return
    pattern = node.get("pattern")
    if node.get("type") == "Split" and isinstance(pattern, dict) and "Regex" in pattern:
        yield str(pattern["Regex"])
    for child in node.get("pretokenizers") or []:
        yield from _split_patterns(child)


def _tokens(folder: Path, tokenizer: Tokenizer, n_vocab: int) -> tuple[list[str], list[int]]:
    by_id = {number: text for text, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    if by_id and max(by_id) >= n_vocab:
        raise CheckpointError(
            f"{folder / 'tokenizer.json'}: expected ids below vocab_size ({n_vocab}) of the "
            f"config, found {max(by_id)}"
        )
    added = tokenizer.get_added_tokens_decoder()
    tokens, kinds = [], []
    for number in range(n_vocab):
        text = by_id.get(number)
        if text is None:
            tokens.append(f"[PAD{number}]")
            kinds.append(TokenType.UNUSED)
        elif number in added:
            token = added[number]
            if not token.normalized:
                # llama.cpp takes these texts as already normalised.
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                text = tokenizer.decode(ids, skip_special_tokens=False)
            control = token.special or (text.startswith("<|") and text.endswith("|>"))
            tokens.append(text)
            kinds.append(TokenType.CONTROL if control else TokenType.USER_DEFINED)
        else:
            tokens.append(text)
            kinds.append(TokenType.NORMAL)
    return tokens, [int(kind) for kind in kinds]


def _special_vocabulary(folder: Path, n_vocab: int) -> dict[str, Value]:
    """Merges, special ids and chat template, found by the rules of the gguf package."""
    companion = folder / "tokenizer_config.json"
    if companion.exists():
        read_json_object(companion)  # the package passes over some that are none
    with _quiet_gguf():
        try:
            special = gguf.SpecialVocab(folder, load_merges=True)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{companion}: cannot be understood: {error}") from None
        collector = gguf.GGUFWriter(path=None, arch="")
        special.add_to_gguf(collector)
    keys = collected(collector)
    for key, value in keys.items():
        if key.endswith("_token_id"):
            name = key.rpartition(".")[2]
            _check_id(companion, name, value.data, n_vocab)
    return keys


def collected(writer: gguf.GGUFWriter) -> dict[str, Value]:
    """The keys that the gguf package's writer was given, as values of our own."""
    keys = {}
    for key, held in writer.kv_data[0].items():
        if key == "general.architecture":
            continue
        kind = held.type if held.type is not gguf.GGUFValueType.ARRAY else held.sub_type
        if kind is None:  # an array whose element type follows from its first element
            kind = gguf.GGUFValueType.get_type(held.value[0])
        keys[key] = Value(ValueType[_VALUE_TYPES.get(kind.name, kind.name)], held.value)
    return keys


_VALUE_TYPES = {
    "UINT8": "U8",
    "INT8": "I8",
    "UINT16": "U16",
    "INT16": "I16",
    "UINT32": "U32",
    "INT32": "I32",
    "UINT64": "U64",
    "INT64": "I64",
    "FLOAT32": "F32",
    "FLOAT64": "F64",
}


@contextmanager
def _quiet_gguf() -> Iterator[None]:
    """Keep the gguf package's notes on its own doings from the user's terminal."""
    logger = logging.getLogger("gguf.vocab")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def special_ids(folder: Path, tokenizer: Tokenizer, n_vocab: int) -> list[int]:
    """Ids that a draft vocabulary never lacks: added tokens and the end-of-turn ids.

    Added tokens are those of chat turns, tools and thinking; generation_config.json may name
    further ids that end a turn. CheckpointError when one is outside the vocabulary.
    """
    ids = set(tokenizer.get_added_tokens_decoder())
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            ends = ConfigReader(str(path), read_json_object(path)).config.get("eos_token_id")
            for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
                ids.add(_check_id(path, "eos_token_id", end, n_vocab))
    return sorted(ids)


def _check_id(path: Path, key: str, value: Any, n_vocab: int) -> int:
    if not is_whole(value) or not 0 <= value < n_vocab:
        raise CheckpointError(
            f"{path}: {key}: expected an id from 0 to {n_vocab - 1}, found {value!r:.40}"
        )
    return value
