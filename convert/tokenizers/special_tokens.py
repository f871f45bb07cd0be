"""The roles of special tokens as llama.cpp's converter writes them.

Roles come from tokenizer_config.json (`eos_token`), or else from the ids in config.json. Whether
tokens are added before or after a text is determined by the post-processor of tokenizer.json, or
else by tokenizer_config.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.files.format import Value, ValueType

from ..checkpoints.config import is_whole, shown
from ..checkpoints.json_files import read_json_object
from .tokenizer_files import NAMED_KINDS, TokenizerFiles

_ID_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # spelled so in the format
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}
_FLAGS = ("bos", "eos", "sep")


def special_metadata(
    files: TokenizerFiles, n_vocab: int, tokens_by_role: Mapping[str, str]
) -> dict[str, Value]:
    """The keys for merges, special ids and added tokens.

    tokens_by_role: as `TargetModel.tokens`.
    """
    roles = _Roles(files.settings)
    if files.definition:
        roles.read_post_processor(files.definition.get("post_processor"))
    keys: dict[str, Value] = {}
    if files.merges:
        keys["tokenizer.ggml.merges"] = Value(ValueType.STRING, files.merges)
    for kind, number in _special_ids(files, roles, n_vocab, tokens_by_role).items():
        keys[f"tokenizer.ggml.{_ID_KEYS[kind]}"] = Value(ValueType.U32, number)
    for kind in _FLAGS:
        flag = roles.added.get(kind, files.settings.get(f"add_{kind}_token"))
        if isinstance(flag, bool):
            keys[f"tokenizer.ggml.add_{kind}_token"] = Value(ValueType.BOOL, flag)
    keys |= _normalizer_flags(files.definition.get("normalizer"))
    return keys


def check_id(path: Path, key: str, value: Any, n_vocab: int) -> int:
    """Return `value` if it is an id of the vocabulary; CheckpointError otherwise."""
    if not is_whole(value) or not 0 <= value < n_vocab:
        raise CheckpointError(
            f"{path}: {key}: expected an id from 0 to {n_vocab - 1}, found {shown(value)}"
        )
    return value


class _Roles:
    """The token of each role, and which of them the tokenizer adds to a text.

    `named` holds the values of the settings, strings or objects; `added` holds for each role
    whether its token is added to a text, if the post-processor determines that.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self.kinds = list(NAMED_KINDS)
        self.named = {kind: settings.get(f"{kind}_token") for kind in NAMED_KINDS}
        self.named["bos"] = self.named["bos"] or self.named["cls"]
        self.named["eos"] = self.named["eos"] or self.named["sep"]
        self.added: dict[str, bool] = {}

    def read_post_processor(self, processor: Any) -> None:
        """Set roles according to the post-processor of tokenizer.json."""
        for step in _list(_field(processor, "processors")) or [processor]:
            kind = _field(step, "type")
            if kind == "ByteLevel":
                self.added.setdefault("bos", False)
                self.added.setdefault("eos", False)
            elif kind == "RobertaProcessing":
                self.added |= {"bos": True, "eos": True, "sep": True}
                for role in ("cls", "sep"):
                    self.named[role] = self.named[role] or _first(_field(step, role))
            elif kind == "TemplateProcessing":
                self._read_template(_list(_field(step, "single")), _list(_field(step, "pair")))

    def _read_template(self, single: list[Any], pair: list[Any]) -> None:
        """Read the tokens before and after a text, and the separator between two texts."""
        first = last = None
        if len(single) > 1:
            first, last = _special_piece(single[0]), _special_piece(single[-1])
        if first:
            if first not in (self.named["bos"], self.named["cls"]):
                self.named["bos"] = self.named["bos"] or first
                self.named["cls"] = self.named["cls"] or first
            self.added["bos"] = first in (self.named["bos"], self.named["cls"])
        if last:
            if last != self.named["eos"]:
                self._replace_eos(last)
            self.added["eos"] = True
        if first and pair and _special_piece(pair[0]) == first:
            pair = pair[1:]
        if last and pair and _special_piece(pair[-1]) == last:
            pair = pair[:-1]
        ends = [_field(_field(piece, "Sequence"), "id") for piece in (*pair[:1], *pair[-1:])]
        between = [_special_piece(piece) for piece in pair[1:-1]]
        if ends == ["A", "B"] and between:
            separators = (self.named["sep"], self.named["eos"])
            separated = bool(between[0]) and between[0] in separators and not last
            if len(between) == 2 and between[1] and between[1] in separators:
                separated = True
            self.added["sep"] = separated
            if separated:
                self.named["sep"] = self.named["sep"] or self.named["eos"]

    def _replace_eos(self, token: str) -> None:
        """Make the previous end-of-text token end-of-turn (eot), or else end-of-message (eom)."""
        free = [kind for kind in ("eot", "eom") if kind not in self.kinds]
        if self._settings and free:
            self.kinds.append(free[0])
            self.named[free[0]] = self.named["eos"]
        self.named["eos"] = token


def _special_ids(
    files: TokenizerFiles, roles: _Roles, n_vocab: int, tokens_by_role: Mapping[str, str]
) -> dict[str, int]:
    by_text: dict[str, Any] = {}
    for token in files.definition.get("added_tokens") or []:
        by_text.setdefault(token["content"], token["id"])
    config_path = files.folder / "config.json"
    config = read_json_object(config_path)
    text_config = config.get("text_config")
    ids = {}
    for kind in roles.kinds:
        if kind not in _ID_KEYS:
            continue
        named = roles.named[kind] if files.settings else None
        text = named.get("content") if isinstance(named, dict) else named
        if isinstance(text, str) and text in by_text:
            ids[kind] = check_id(files.path, f"{kind}_token {text!r}", by_text[text], n_vocab)
            continue
        key = f"{kind}_token_id"
        number = config.get(key)
        if number is None and isinstance(text_config, dict):
            number = text_config.get(key)
        if number is not None and not isinstance(number, list):  # several ids are no single role
            ids[kind] = check_id(config_path, key, number, n_vocab)
    for kind, text in tokens_by_role.items():
        if text in by_text:
            ids[kind] = check_id(files.path, repr(text), by_text[text], n_vocab)
    return ids


def _normalizer_flags(normalizer: Any) -> dict[str, Value]:
    kind = _field(normalizer, "type")
    flags: dict[str, Any] = {}
    if kind == "Lowercase":
        flags["lowercase"] = True
    elif kind == "StripAccents":
        flags["strip_accents"] = True
    elif kind == "BertNormalizer":
        flags = {key: _field(normalizer, key) for key in ("lowercase", "strip_accents")}
    keys = {
        f"tokenizer.ggml.normalizer.{key}": Value(ValueType.BOOL, flag)
        for key, flag in flags.items()
        if isinstance(flag, bool)
    }
    for step in _list(_field(normalizer, "normalizers")):
        keys |= _normalizer_flags(step)
    return keys


def _field(node: Any, key: str) -> Any:
    """The value under a key of an object; None if there is no such key or it is not an object."""
    return node.get(key) if isinstance(node, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None


def _special_piece(piece: Any) -> Any:
    """The special token of a template's piece; None if the piece is a placeholder for text."""
    return _field(_field(piece, "SpecialToken"), "id")
