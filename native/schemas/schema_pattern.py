r"""GBNF expressions for the JSON strings that match a regular expression.

Python's own parser reads the expression, as JSON Schema's dialect (ECMA 262) and Python's agree on
what a grammar can express. Classes such as `\d` are those of ECMA 262.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

_parser: Any = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

_Ranges = list[tuple[int, int]]  # of code points, both ends included

_LAST = 0x10FFFF
_LINE_ENDS: _Ranges = [(0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029)]
_DIGITS: _Ranges = [(0x30, 0x39)]
_WORD: _Ranges = [*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: _Ranges = [
    (0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
# JSON escapes the first three; the last have no UTF-8.
_NOT_RAW: _Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)]
_SHORT_ESCAPES = {ord(c): json.dumps(c)[2] for c in '"\\\b\f\n\r\t'}

_GROUPS = ("BRANCH", "SUBPATTERN")

_Item = tuple[Any, Any]  # of the parser: an operation and its argument


class UnsupportedPatternError(ValueError):
    """A regular expression that is malformed, or that a grammar cannot express."""


def string_content(pattern: str, char: str, name: Callable[[str], str]) -> str:
    """Return the expression for what stands between the quotes of a JSON string.

    As JSON Schema demands, the pattern may match anywhere unless it has anchors.

    Args:
        char: the rule for any character of a JSON string.
        name: makes a rule of an expression and returns its name.

    Raises:
        UnsupportedPatternError: says what cannot be expressed.

    """
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsupportedPatternError(str(error)) from None
    if parsed.state.flags != re.UNICODE:
        raise UnsupportedPatternError("flags")
    return _Pattern(char, name).sequence(parsed, starts=True, ends=True)


class _Pattern:
    def __init__(self, char: str, name: Callable[[str], str]) -> None:
        self._char = char
        self._name = name

    def sequence(self, items: Sequence[_Item], *, starts: bool, ends: bool) -> str:
        """The expression for items; starts, ends: they begin or end the pattern."""
        parsed = [(str(operation), argument) for operation, argument in items]
        if starts and parsed[:1] == [("AT", _parser.AT_BEGINNING)]:
            parsed, starts = parsed[1:], False
        if ends and parsed[-1:] == [("AT", _parser.AT_END)]:
            parsed, ends = parsed[:-1], False
        last = len(parsed) - 1
        parts = [
            self._item(operation, argument, starts=starts and i == 0, ends=ends and i == last)
            for i, (operation, argument) in enumerate(parsed)
        ]
        # Groups have taken account of where they are.
        if starts and not (parsed and parsed[0][0] in _GROUPS):
            parts.insert(0, f"{self._char}*")
            ends = ends and bool(parsed)
        if ends and not (parsed and parsed[-1][0] in _GROUPS):
            parts.append(f"{self._char}*")
        return " ".join(parts) or '""'

    def _item(self, operation: str, argument: Any, *, starts: bool, ends: bool) -> str:
        if operation == "BRANCH":
            _, branches = argument
            parts = [self.sequence(branch, starts=starts, ends=ends) for branch in branches]
            return f"({' | '.join(parts)})"
        if operation == "SUBPATTERN":
            _, added, dropped, items = argument
            if added or dropped:
                raise UnsupportedPatternError("flags")
            return f"({self.sequence(items, starts=starts, ends=ends)})"
        if operation in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, items = argument
            rule = self._name(self.sequence(items, starts=False, ends=False))
            return f"{rule}{{{least},{'' if most == _parser.MAXREPEAT else most}}}"
        if operation == "LITERAL":
            return _characters([(argument, argument)])
        if operation == "NOT_LITERAL":
            return _characters(_others([(argument, argument)]))
        if operation == "ANY":
            return _characters(_others(_LINE_ENDS))
        if operation == "IN":
            return _characters(_class(argument))
        if operation == "AT":
            raise UnsupportedPatternError("an anchor or boundary inside")
        if operation.startswith("ASSERT"):
            raise UnsupportedPatternError("a lookahead or lookbehind")
        raise UnsupportedPatternError(operation.lower().replace("_", " "))


def _class(items: Sequence[_Item]) -> _Ranges:
    """The code points of a character class."""
    named = {
        "CATEGORY_DIGIT": _DIGITS,
        "CATEGORY_WORD": _WORD,
        "CATEGORY_SPACE": _SPACE,
        "CATEGORY_NOT_DIGIT": _others(_DIGITS),
        "CATEGORY_NOT_WORD": _others(_WORD),
        "CATEGORY_NOT_SPACE": _others(_SPACE),
    }
    ranges: _Ranges = []
    for operation, argument in items:
        if str(operation) == "LITERAL":
            ranges.append((argument, argument))
        elif str(operation) == "RANGE":
            ranges.append(argument)
        elif str(operation) == "CATEGORY":
            ranges += named[str(argument)]
    return _others(ranges) if str(items[0][0]) == "NEGATE" else ranges


def _others(ranges: _Ranges) -> _Ranges:
    """The code points that are in none of the ranges."""
    found, start = [], 0
    for first, last in sorted(ranges):
        if start < first:
            found.append((start, first - 1))
        start = max(start, last + 1)
    return [*found, (start, _LAST)] if start <= _LAST else found


def _characters(ranges: _Ranges) -> str:
    """The expression for one of these characters, as it is written in a JSON string."""
    held = [code for first, last in ranges for code in range(first, min(last, 0x5C) + 1)]
    short = "".join(_SHORT_ESCAPES[code] for code in sorted({*held} & _SHORT_ESCAPES.keys()))
    raw = _raw_characters(_others(ranges))
    parts = [raw] if raw else []
    if short:
        parts.append('"\\\\" [' + short.replace("\\", "\\\\") + "]")
    if not parts:  # control characters without a short escape; others can do without them
        parts += [f'"\\\\u{code:04x}"' for code in held if code < 0x20]
    if not parts:
        raise UnsupportedPatternError("a class without characters")
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def other_strings(strings: Sequence[str]) -> str:
    """Return the expression for what stands between the quotes of any other JSON string.

    Nothing is escaped in it, so that no other spelling of one of the strings is in it either.
    """
    heads = sorted({string[0] for string in strings if string})
    parts = ['""'] if "" not in strings else []
    parts.append(f"{_raw_characters([(ord(head), ord(head)) for head in heads])} raw*")
    for head in heads:
        rest = other_strings([string[1:] for string in strings if string[:1] == head])
        parts.append(f"[{_code(ord(head))}] ({rest})")
    return " | ".join(parts)


def _raw_characters(excluded: _Ranges) -> str:
    """The class of the characters that JSON does not escape, but for the excluded; "" for none."""
    ranges = _others([*excluded, *_NOT_RAW])
    codes = ("-".join(_code(point) for point in sorted({*ends})) for ends in ranges)
    return f"[{''.join(codes)}]" if ranges else ""


def _code(point: int) -> str:
    """A code point in a class of a grammar."""
    character = chr(point)
    return character if character.isascii() and character.isalnum() else f"\\U{point:08X}"
