"""Chat templates of a checkpoint: those that transformers takes, and a note where files differ."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_edits import edit_json
from support.commands import invoke
from support.conversions import converted, refuse
from support.gguf_files import value_of

KEY = "tokenizer.chat_template"
JINJA, SETTINGS, OLDER = "chat_template.jinja", "tokenizer_config.json", "chat_template.json"
NAMED = [{"name": "default", "template": "list"}, {"name": "rag", "template": "rag of list"}]

# What each file of a checkpoint says; further names are files of additional_chat_templates.
CASES: dict[str, dict[str, Any]] = {
    "jinja": {JINJA: "jinja"},
    "settings": {SETTINGS: "settings"},
    "list": {SETTINGS: NAMED},
    "object": {SETTINGS: {"default": "object", "tool_use": "tools of object"}},
    "no default": {SETTINGS: NAMED[1:]},
    "jinja over settings": {JINJA: "jinja", SETTINGS: "settings"},
    "jinja over null": {JINJA: "jinja", SETTINGS: None},
    "jinja over list": {JINJA: "jinja", SETTINGS: NAMED},
    "folder": {JINJA: "jinja\n", "rag": "rag", "tool_use": "{{ tools }}\r\n"},
    "folder over list": {JINJA: "jinja", SETTINGS: NAMED, "tool_use": "tools"},
    "folder's default": {JINJA: "jinja", "default": "of the folder"},
    "folder alone": {"rag": "rag"},
    "no settings": {JINJA: "jinja", "without": SETTINGS},
}


def checkpoint_with(folder: Path, files: dict[str, Any]) -> Path:
    """Give a checkpoint these templates and no others."""
    for name, template in files.items():
        if name == SETTINGS:
            edit_json(folder / name, partial(dict.update, chat_template=template))
        elif name == OLDER:
            (folder / name).write_text(json.dumps({"chat_template": template}), encoding="utf-8")
        elif name == "without":
            (folder / template).unlink()
        else:
            path = folder / (name if name == JINJA else f"additional_chat_templates/{name}.jinja")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(template.encode())
    return folder


@pytest.fixture
def bare(broken: Path) -> Path:
    """The tiny checkpoint without a template."""
    (broken / JINJA).unlink()
    return broken


def templates_of(path: Path) -> dict[str, str]:
    names = value_of(path, f"{KEY}s") or ()
    found = {name: value_of(path, f"{KEY}.{name}") for name in names}
    default = value_of(path, KEY)
    return found if default is None else {"default": default, **found}


def notes_of(model: Path) -> list[str]:
    result = invoke("convert", model, "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    return [note for note in json.loads(result.stdout)["notes"] if "chat template" in note]


@pytest.mark.upstream
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the `upstream` extra")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_are_those_of_transformers(name: str, bare: Path, output: Path) -> None:
    import transformers  # noqa: PLC0415  (slow)

    model = checkpoint_with(bare, CASES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(model).chat_template
    converted(model, output / "x.gguf", "--quant", "F16")
    ours = templates_of(output / "x.gguf")
    assert ours == (theirs if isinstance(theirs, dict) else {"default": theirs})


@pytest.mark.parametrize(
    ("files", "notes"),
    [
        ({JINJA: "a", SETTINGS: "b"}, [(SETTINGS, "'default'", JINJA)]),
        ({JINJA: "a\n", SETTINGS: "a"}, []),
        ({JINJA: "list", SETTINGS: NAMED}, [(SETTINGS, "'rag'", JINJA)]),
        ({JINJA: "a", SETTINGS: "b", OLDER: "c"}, [(SETTINGS, "", JINJA), (OLDER, "", JINJA)]),
        ({SETTINGS: "b", OLDER: "c"}, [(OLDER, "'default'", SETTINGS)]),
        ({"rag": "a", SETTINGS: "b"}, []),
    ],
)
def test_that_differ_are_noted(
    files: dict[str, Any], notes: list[tuple[str, str, str]], bare: Path
) -> None:
    found = notes_of(checkpoint_with(bare, files))
    assert len(found) == len(notes)
    for note, (unused, name, used) in zip(found, notes, strict=True):
        assert note.startswith(f"{unused}: its chat template {name}")
        assert f"not that of {used}" in note


def test_default_beside_a_folder_without_one(bare: Path, output: Path) -> None:
    """transformers has no default then, and refuses a conversation without tools."""
    model = checkpoint_with(bare, {"tool use": "tools", SETTINGS: "settings"})
    converted(model, output / "x.gguf", "--quant", "F16")
    assert templates_of(output / "x.gguf") == {"default": "settings", "tool_use": "tools"}


def test_of_an_older_processor(bare: Path, output: Path) -> None:
    converted(checkpoint_with(bare, {OLDER: "x"}), output / "x.gguf", "--quant", "F16")
    assert templates_of(output / "x.gguf") == {"default": "x"}


def test_that_is_no_text(broken: Path, output: Path) -> None:
    (broken / JINJA).write_bytes(b"\xff\xfe")
    refuse(broken, output, JINJA, "UTF-8")


@pytest.mark.parametrize("found", [5, ["x"], [{"name": "default"}], {"default": 1}])
def test_that_are_none(found: object, broken: Path, output: Path) -> None:
    edit_json(broken / SETTINGS, lambda c: c.update(chat_template=found))
    refuse(broken, output, SETTINGS, "chat_template", "expected names and templates")
