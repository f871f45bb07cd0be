"""Small TOML files of ours: each field is read once, by type, and what is unknown is an error."""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from ..errors import FormatError
from ..hub.sources import FileSource

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Table:
    """One table of a file.

    Each method that reads a field raises FormatError if it is not of this type.
    """

    def __init__(self, path: Path, name: str, values: dict[str, Any]) -> None:
        self._path = path
        self._name = name
        self._left = dict(values)

    def _take(self, key: str, expected: str) -> Any:
        if key not in self._left:
            raise FormatError(
                f"{self._path}: {self._name}{key}: expected {expected}, found nothing"
            )
        return self._left.pop(key)

    def _wrong(self, key: str, expected: str, found: object) -> FormatError:
        return FormatError(f"{self._path}: {self._name}{key}: expected {expected}, found {found!r}")

    def table(self, key: str) -> "Table":
        """A table within this one."""
        value = self._take(key, "a table")
        if not isinstance(value, dict):
            raise self._wrong(key, "a table", value)
        return Table(self._path, f"{self._name}{key}.", value)

    def tables(self, key: str) -> "list[Table]":
        """The tables of an array, which may be missing."""
        value = self._left.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._wrong(key, "tables", value)
        return [Table(self._path, f"{self._name}{key}[{i}].", item) for i, item in enumerate(value)]

    def text(self, key: str) -> str:
        """Printable text."""
        value = self._take(key, "text")
        if not isinstance(value, str) or not value or len(value) > 1000 or not value.isprintable():
            raise self._wrong(key, "printable text", value)
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of some texts."""
        value = self.text(key)
        if value not in choices:
            raise self._wrong(key, f"one of {', '.join(choices)}", value)
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        """An integer of at least `low`, and less than `high`."""
        return int(self._integer(key, f"a number from {low} to {high - 1}", low, high))

    def integer_or(self, word: str, key: str, low: int, high: int) -> int | str:
        """The word, or an integer as of `integer`."""
        return self._integer(key, f'{low} to {high - 1} or "{word}"', low, high, word)

    def _integer(self, key: str, expected: str, low: int, high: int, *others: str) -> int | str:
        value: int | str = self._take(key, expected)
        if value not in others and (type(value) is not int or not low <= value < high):
            raise self._wrong(key, expected, value)
        return value

    def number(self, key: str) -> float:
        """A positive number."""
        value = self._take(key, "a positive number")
        if type(value) not in (int, float) or not 0 < value < 1e12:
            raise self._wrong(key, "a positive number", value)
        return float(value)

    def numbers(self, key: str, most: int) -> tuple[float, ...]:
        """At most so many positive numbers."""
        expected = f"at most {most} positive numbers"
        value = self._take(key, expected)
        if (
            not isinstance(value, list)
            or len(value) > most
            or not all(type(item) in (int, float) and 0 < item < 1e12 for item in value)
        ):
            raise self._wrong(key, expected, value)
        return tuple(map(float, value))

    def done(self, *others: "Table") -> None:
        """FormatError for an unknown field, so that a typo is not silently ignored."""
        for table in (self, *others):
            for key in table._left:
                raise FormatError(f"{self._path}: {table._name}{key}: no such field; delete it")


def read_table(path: Path, most: int, advice: str) -> Table:
    """Read a file of at most `most` bytes.

    advice: what to do about one that is not TOML, the end of the error's sentence.
    """
    with closing(FileSource(path)) as source:
        if source.size > most:
            raise FormatError(f"{path}: expected at most {most} bytes, found {source.size}")
        raw = source.read(0, source.size)
    try:
        return Table(path, "", tomllib.loads(raw.decode("utf-8")))
    except (ValueError, RecursionError) as error:  # TOML's and Unicode's errors too
        raise FormatError(f"{path}: expected TOML, found: {error}; {advice}") from None


def toml_value(value: object) -> str:
    """A value as TOML. All strings are printable text, for which JSON and TOML are the same."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
