"""Loads the tokenizer of a checkpoint: tokenizer.json, or vocab.json with merges.txt.

Tokens in tokenizer_config.json are added as in transformers, so that every token has the id that
the model was trained with.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from mtp_gguf.gguf_tools.errors import CheckpointError

from ..checkpoints.config import is_whole, shown
from ..checkpoints.json_files import parse_json_object, read_json_object, read_text

SETTINGS_NAME = "tokenizer_config.json"
# The split of Qwen3.5's tokenizer, which vocab.json and merges.txt do not contain.
QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMED_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Defaults of the family's tokenizer class in transformers.
_DEFAULT_TOKEN = "<|endoftext|>"
_DEFAULT_NAMES = ("eos_token", "unk_token", "pad_token")
_NO_TOKENS = ("add_bos_token", "add_eos_token")  # settings that only sound like special tokens


@dataclass(frozen=True, eq=False)
class TokenizerFiles:
    """A tokenizer and the contents of its files.

    path: the file with the tokens. definition: tokenizer.json, unmodified; empty if there is none.
    settings: tokenizer_config.json; empty if there is none. merges: pairs separated by a space.
    splits: the regular expressions of the pre-tokenizer.
    """

    folder: Path
    path: Path
    tokenizer: Tokenizer
    definition: dict[str, Any]
    settings: dict[str, Any]
    merges: tuple[str, ...]
    splits: tuple[str, ...]

    def stores(self, text: str) -> bool:
        """Whether the file with the tokens has this one."""
        if not self.definition:
            return text in read_json_object(self.path)
        added = self.definition.get("added_tokens") or []
        return text in self.definition["model"]["vocab"] or text in [t["content"] for t in added]


def load_tokenizer(folder: Path) -> TokenizerFiles:
    """The tokenizer of a checkpoint; CheckpointError if it is missing or damaged.

    Padding, truncation and dropout are disabled: saved settings for these are left over from
    training.
    """
    settings = read_json_object(folder / SETTINGS_NAME) if (folder / SETTINGS_NAME).exists() else {}
    path = folder / "tokenizer.json"
    if path.exists() or not (folder / "vocab.json").exists():
        definition, tokenizer = _from_definition(path)
        merges = _merges_of(definition) or _optional_merges(folder)
        splits = tuple(_split_patterns(definition.get("pre_tokenizer")))
    else:
        path, definition, splits = folder / "vocab.json", {}, (QWEN35_SPLIT,)
        merges = _read_merges(folder / "merges.txt")
        tokenizer = _from_vocabulary(path, merges)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.model.dropout = None
    tokenizer.decoder = decoders.ByteLevel()  # as the tokenizer classes do, whatever the file has
    _add_tokens(tokenizer, folder, settings)
    return TokenizerFiles(folder, path, tokenizer, definition, settings, merges, splits)


def _from_definition(path: Path) -> tuple[dict[str, Any], Tokenizer]:
    text = read_text(path)
    definition = parse_json_object(text, path)
    _check_is_bpe(path, definition)
    try:
        return definition, Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: expected a tokenizer, found: {error}") from None


def _from_vocabulary(path: Path, merges: tuple[str, ...]) -> Tokenizer:
    vocabulary = read_json_object(path)
    for token, number in vocabulary.items():
        if not is_whole(number) or not 0 <= number < 1 << 32:
            raise CheckpointError(f"{path}: {token!r:.80}: expected an id, found {shown(number)}")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        tokenizer = Tokenizer(BPE(vocabulary, pairs))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: expected a vocabulary of its merges: {error}") from None
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN35_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def _check_is_bpe(path: Path, definition: dict[str, Any]) -> None:
    model = definition.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if kind != "BPE":
        raise CheckpointError(f"{path}: model.type: expected BPE, found {kind!r:.60}")
    assert isinstance(model, dict)
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        # Byte-level BPE has none; the tokenizers package aborts on merges without the given one.
        if model.get(key):
            raise CheckpointError(f"{path}: model.{key}: expected none, found {model[key]!r:.60}")


def _merges_of(definition: dict[str, Any]) -> tuple[str, ...]:
    """The merges of tokenizer.json as llama.cpp needs them, with spaces in tokens byte-encoded."""
    merges = definition["model"].get("merges") or []
    return tuple(
        merge if isinstance(merge, str) else " ".join(part.replace(" ", "\u0120") for part in merge)
        for merge in merges
    )


def _optional_merges(folder: Path) -> tuple[str, ...]:
    path = folder / "merges.txt"
    return _read_merges(path) if path.exists() else ()


def _read_merges(path: Path) -> tuple[str, ...]:
    """The pairs of merges.txt, one per line after a comment line."""
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        parts = line.split()
        if not parts or (number == 1 and line.startswith("#")):
            continue
        if len(parts) != 2:
            raise CheckpointError(f"{path}: line {number}: expected two tokens, found {line!r:.80}")
        merges.append(" ".join(parts))
    return tuple(merges)


def _split_patterns(node: Any) -> Iterator[str]:
    if not isinstance(node, dict):
        return
    pattern = node.get("pattern")
    if node.get("type") == "Split" and isinstance(pattern, dict) and "Regex" in pattern:
        yield str(pattern["Regex"])
    for child in node.get("pretokenizers") or []:
        yield from _split_patterns(child)


# ------------------------------------------------------------------------------ added tokens


def _add_tokens(tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]) -> None:
    """Add the tokens of tokenizer_config.json, or of the files of older checkpoints."""
    path = folder / SETTINGS_NAME
    if "added_tokens_decoder" in settings:
        names, extra = _named_tokens(path, settings)
        listed = _listed_tokens(path, settings["added_tokens_decoder"])
    else:
        older = folder / "special_tokens_map.json"
        if older.exists():
            path, settings = older, {**settings, **read_json_object(older)}
        names, extra = _named_tokens(path, settings)
        path = folder / "added_tokens.json"
        listed = _older_tokens(path, names, extra)
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    wanted = {}
    for token in listed.values():
        token.special = token.special or token.content in names
        if token.content not in known or _flags(known[token.content]) != _flags(token):
            wanted[token.content] = token
    for content, token in names.items():
        if content not in wanted and not (content in known and known[content].special):
            wanted[content] = known.get(content, token)
            wanted[content].special = True
    for content in extra:
        if content not in known and content not in wanted:
            wanted[content] = AddedToken(content, special=True)
    tokenizer.add_tokens([*wanted.values()])
    for number, token in listed.items():
        if (found := tokenizer.token_to_id(token.content)) != number:
            raise CheckpointError(
                f"{path}: {token.content!r:.60}: expected id {found}, as the vocabulary has it, "
                f"found {shown(number)}"
            )


def _flags(token: AddedToken) -> tuple[bool, bool, bool, bool, bool]:
    return token.single_word, token.lstrip, token.rstrip, token.normalized, token.special


def _named_tokens(
    path: Path, settings: dict[str, Any]
) -> tuple[dict[str, AddedToken], tuple[str, ...]]:
    """Special tokens with a role in the settings, by text; and the texts of those without."""
    standard = {f"{kind}_token" for kind in NAMED_KINDS}
    values = {**dict.fromkeys(_DEFAULT_NAMES, _DEFAULT_TOKEN), **settings}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    roles = {
        key: value
        for key, value in values.items()
        if key in standard
        or (key.endswith("_token") and key not in _NO_TOKENS and isinstance(value, str))
    }
    if isinstance(extra, dict):
        roles |= extra
        extra = []
    if not isinstance(extra, list):
        raise CheckpointError(f"{path}: extra_special_tokens: expected a list, found {extra!r:.60}")
    names = {}
    for key, value in roles.items():
        if value is not None:
            token = _token(f"{path}: {key}", value, special=True)
            names[token.content] = token
    others = [_token(f"{path}: extra_special_tokens", value, special=True) for value in extra]
    return names, tuple(token.content for token in others)


def _listed_tokens(path: Path, listed: object) -> dict[int, AddedToken]:
    """The added tokens of tokenizer_config.json by id, in order."""
    where = f"{path}: added_tokens_decoder"
    if not isinstance(listed, dict) or not all(re.fullmatch(r"\d{1,9}", key) for key in listed):
        raise CheckpointError(f"{where}: expected tokens by id, found {listed!r:.60}")
    ordered = sorted(((int(n), value) for n, value in listed.items()), key=lambda item: item[0])
    return {number: _token(f"{where}: {number}", value) for number, value in ordered}


def _older_tokens(
    path: Path, names: dict[str, AddedToken], extra: tuple[str, ...]
) -> dict[int, AddedToken]:
    """The added tokens of added_tokens.json by id, in order; empty if the file is absent."""
    listed = read_json_object(path) if path.exists() else {}
    for text, number in listed.items():
        if not is_whole(number):
            raise CheckpointError(f"{path}: {text!r:.80}: expected an id, found {shown(number)}")
    tokens = {}
    for text, number in sorted(listed.items(), key=lambda item: (item[1], item[0])):
        special = text in names or text in extra
        tokens[number] = AddedToken(text, normalized=not special, special=special)
    return tokens


def _token(where: str, value: object, special: bool = False) -> AddedToken:
    """Parse a token in the settings: a string, or an object with its text and flags."""
    if isinstance(value, str):
        return AddedToken(value, special=special)
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    fields = dict(value) if isinstance(value, dict) else {}
    content = fields.pop("content", None)
    fields.pop("__type", None)
    known = {key: fields.pop(key) for key in flags if key in fields}
    if not isinstance(content, str) or not all(isinstance(flag, bool) for flag in known.values()):
        raise CheckpointError(f"{where}: expected a token, found {value!r:.80}")
    return AddedToken(content, **{"special": special, **known})
