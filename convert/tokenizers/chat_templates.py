"""Finds the chat templates of a checkpoint, in the order of transformers.

chat_template.jinja and the files of additional_chat_templates/ come before the templates of
tokenizer_config.json. Those of chat_template.json, which older processors have, come last.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.files.format import Value, ValueType

from ..checkpoints.config import shown
from ..checkpoints.json_files import read_json_object, read_text
from .tokenizer_files import SETTINGS_NAME

_KEY = "tokenizer.chat_template"
_DEFAULT = "default"
_JINJA = "chat_template.jinja"


class ChatTemplates(NamedTuple):
    """Chat templates as GGUF keys. notes: sentences for the user if the files disagree."""

    keys: dict[str, Value]
    notes: tuple[str, ...]


def chat_templates(folder: Path, settings: Mapping[str, Any]) -> ChatTemplates:
    """Return the chat templates of a checkpoint; CheckpointError if one is not text.

    settings: the contents of tokenizer_config.json. The first file that has templates is used. If
    it names no default, the default is that of the next file.
    """
    used: dict[str, str] = {}
    first, notes = "", []
    for file, templates in _sources(folder, settings):
        if not used:
            first, used = file, templates
            continue
        for name, text in templates.items():
            if name == _DEFAULT and name not in used:
                used[name] = text
            elif used.get(name, "").strip() != text.strip():
                notes.append(
                    f"{file}: its chat template {name!r} is not that of {first}, which is used, "
                    "as in transformers"
                )
    keys = {}
    for name, text in used.items():
        key = re.sub(r"[^A-Za-z0-9]", "_", name)
        if key:
            keys[_KEY if key == _DEFAULT else f"{_KEY}.{key}"] = Value(ValueType.STRING, text)
    if names := sorted(key.removeprefix(f"{_KEY}.") for key in keys if key != _KEY):
        keys["tokenizer.chat_templates"] = Value(ValueType.STRING, names)
    return ChatTemplates(keys, tuple(notes))


def _sources(folder: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each file that has templates, and these by name."""
    files = {
        file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (folder / _JINJA).is_file():
        files = {_DEFAULT: folder / _JINJA} | files
    if files:
        yield _JINJA, {name: read_text(file) for name, file in files.items()}
    if templates := _named(folder / SETTINGS_NAME, settings):
        yield SETTINGS_NAME, templates
    older = folder / "chat_template.json"
    if older.is_file() and (templates := _named(older, read_json_object(older))):
        yield older.name, templates


def _named(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates in a JSON file by name; one without a name is the default."""
    found = settings.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {_DEFAULT: found}
    if isinstance(found, dict):
        found = [{"name": name, "template": text} for name, text in found.items()]
    named = {}
    for choice in found if isinstance(found, list) else [found]:
        fields = choice if isinstance(choice, dict) else {}
        name, text = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(text, str):
            raise CheckpointError(
                f"{path}: chat_template: expected names and templates, found {shown(choice)}"
            )
        named[name] = text
    return named
