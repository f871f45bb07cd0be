"""Reads the JSON and text files of a checkpoint; errors are a single sentence."""

from contextlib import closing
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.errors import CheckpointError, FormatError
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.hub.sources import FileSource


def read_text(path: Path) -> str:
    """The text of the file at `path`; CheckpointError if it does not exist."""
    if not path.exists():
        raise CheckpointError(f"{path}: expected this file, found none")
    try:
        with closing(FileSource(path)) as source:
            text = source.read(0, source.size).decode("utf-8")
    except FormatError as error:
        raise CheckpointError(str(error)) from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: expected text in UTF-8, found: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`; CheckpointError if it does not exist."""
    return parse_json_object(read_text(path), path)


def parse_json_object(text: str, path: Path) -> dict[str, Any]:
    """Parse `text`, read from `path`, as a JSON object; CheckpointError if it is not one."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON, found: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
