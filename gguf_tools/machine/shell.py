"""Paths as words of the commands that messages suggest."""

import shlex
from os import PathLike


def as_argument(path: str | PathLike[str]) -> str:
    """Return a path as an argument that no command takes for an option."""
    text = str(path)
    return f"./{text}" if text.startswith("-") else text


def quoted(path: str | PathLike[str]) -> str:
    """Return a path as an argument, quoted for a shell."""
    return shlex.quote(as_argument(path))
