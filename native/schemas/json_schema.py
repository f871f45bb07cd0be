"""GBNF grammars of JSON schemas: llama.cpp's sampler can then only generate JSON of the schema.

Every text of a grammar is JSON that the schema allows. The opposite does not hold: properties come
in the order of the schema, and those that it does not name only if it has `additionalProperties`.
`oneOf` is read as `anyOf`. A keyword that restricts a value in a way that a grammar cannot express
is refused; `format` and keywords that restrict nothing are read or ignored, as in llama.cpp.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from reprlib import repr as short
from typing import Any, Literal
from urllib.parse import unquote

from ..errors import NativeError
from .schema_numbers import beyond, integers, numbers
from .schema_pattern import UnsupportedPatternError, other_strings, string_content

_Schema = dict[str, Any]

__all__ = ["ANY_OBJECT", "response_schema", "schema_grammar"]

ANY_OBJECT = {"type": "object"}

# As in llama.cpp's grammars, except that an exponent never makes a number too large for a double,
# and that escapes never stand for half of a surrogate pair.
_RULES = {
    "space": r'| " " | "\n"{1,2} [ \t]{0,20}',
    "raw": r"[ !#-\[\]-\uD7FF\uE000-\U0010FFFF]",
    "hex": "[0-9a-fA-F]",
    "char": r'raw | "\\" (["\\bfnrt] | "u" code)',
    "code": r'[0-9a-cefA-CEF] hex{3} | [dD] [0-7] hex{2} | pair',
    "pair": r'[dD] [89abAB] hex{2} "\\u" [dD] [c-fC-F] hex{2}',
    "string": r'"\"" char* "\""',
    "whole": '"0" | [1-9] [0-9]{0,15}',
    "integer": '"-"? whole',
    "number": '"-"? whole ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "member": 'string ":" space value',
    "object": '"{" space (member ("," space member)* space)? "}"',
    "array": '"[" space (value ("," space value)* space)? "]"',
    "value": "object | array | string | number | boolean | null",
}  # fmt: skip
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_NUMBERS = ("number", "integer")
_MOST_REPETITIONS = 2000  # of a rule, in llama.cpp

_DAYS = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{3})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_DATE = f"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{{2}}|[1-9][0-9]{{3}})-{_DAYS}"
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}

# The keywords that a grammar can express for each type, by which a schema without a type is read.
_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
# Those that it cannot express. What only matters with one of these is not listed.
_REFUSED = {
    "object": (
        "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas",
        "dependencies",
    ),
    "array": ("contains", "uniqueItems"),
    "number": ("multipleOf",),
}  # fmt: skip
_ALWAYS_REFUSED = ("not", "if", "$dynamicRef", "$recursiveRef")
_RESTRICTING = {
    *("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", *_ALWAYS_REFUSED),
    *(word for words in (*_KEYWORDS.values(), *_REFUSED.values()) for word in words),
}
_SHAPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("$ref", "pattern", "format"), str),
    **dict.fromkeys(("enum", "allOf", "anyOf", "oneOf", "prefixItems", "required"), list),
    **dict.fromkeys(("items", "additionalItems"), (dict, bool, list)),
    "type": (str, list),
    "properties": dict,
    "additionalProperties": (dict, bool),
}
_FILLED = ("type", "enum", "allOf", "anyOf", "oneOf")  # an empty list is malformed
_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def schema_grammar(schema: Any) -> str:
    """Return a GBNF grammar, with the rule `root`, for JSON of a schema.

    schema: as `json.loads` returns it. References must be to parts of it (`#/$defs/name`).
    Raises NativeError, which names the place in the schema, if it is malformed, if no value
    satisfies it, or if a grammar cannot express it.
    """
    try:
        return _Grammar(schema).text()
    except RecursionError:
        raise _expected("#", "a schema that ends", "one that is nested too deeply") from None


def response_schema(response_format: Any) -> Any:
    """Return the schema that a `response_format` asks for; None for any text.

    Raises NativeError, in the words of llama-server, if it is none of OpenAI's API and of its own.
    """
    where = "response_format"
    if response_format is None:
        return None
    if not isinstance(response_format, dict):
        raise _expected(where, "an object", _as_json(response_format))
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema")
    elif kind == "json_schema" and isinstance(response_format.get("json_schema"), dict):
        schema = response_format["json_schema"].get("schema")
    else:
        formats = "type text, json_object, or json_schema with an object `json_schema`"
        raise _expected(where, formats, _as_json(response_format))
    if not isinstance(schema, dict | bool | None):
        raise _expected(where, "a JSON schema that is an object", _as_json(schema))
    return ANY_OBJECT if schema is None or schema == {} else schema


class _Grammar:
    """The rules for a schema and its parts; `where` is a place in it, as a JSON pointer."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._rules = dict(_RULES)
        self._names: dict[str, str] = {}  # of rules, by their expressions
        self._references: dict[str, str] = {}  # names of rules, by their pointers

    def text(self) -> str:
        self._rules["root"] = self._value(self._schema, "#")
        return "".join(f"{name} ::= {expression}\n" for name, expression in self._rules.items())

    def _rule(self, expression: str) -> str:
        """The name of the rule with this expression."""
        if expression not in self._names:
            self._names[expression] = f"r{len(self._names)}"
            self._rules[self._names[expression]] = expression
        return self._names[expression]

    def _repeated(self, rule: str, least: int, most: int | None) -> str:
        """The expression for a rule, least to most times; None stands for any number."""
        if max(least, most or 0) <= _MOST_REPETITIONS:
            return _times(rule, least, most)
        size = _MOST_REPETITIONS // 2
        block = self._rule(_times(rule, size, size))
        count, rest = divmod(least, size)
        parts = [_times(block, count, count), _times(rule, rest, rest)]
        if most is None:
            parts.append(_times(rule, 0, None))
        else:
            count = max((most - least) // size - 1, 0)
            rest = most - least - count * size
            parts += [_times(block, 0, count), _times(rule, 0, rest)]
        return " ".join(part for part in parts if part)

    def _any_of(self, rules: Sequence[str]) -> str:
        return rules[0] if len(rules) == 1 else self._rule(" | ".join(rules))

    def _value(self, schema: Any, where: str) -> str:
        """The name of the rule for a value of a schema."""
        schema = _plain(schema, where)
        if schema is False:
            raise _unsatisfiable(where)
        reference, others = _split(schema, "$ref")
        if reference is not None and not others:
            return self._reference(reference, where)
        if reference is not None or "allOf" in schema:
            return self._value(self._resolved(schema, where), where)
        choices, others = _split(schema, "anyOf")
        if choices is not None:
            merged = [self._merged(others, choice, where) for choice in choices]
            rules = [
                self._value(choice, f"{where}/anyOf/{i}")
                for i, choice in enumerate(merged)
                if choice is not False
            ]
            if not rules:
                raise _unsatisfiable(where)
            return self._any_of(rules)
        if "enum" in schema:
            return self._enum(schema, where)
        return self._typed(schema, where)

    # ------------------------------------------------------------------ combinations of schemas

    def _reference(self, pointer: str, where: str) -> str:
        """The name of the rule for the part of the schema that a pointer leads to."""
        if pointer not in self._references:
            name = self._references[pointer] = f"ref{len(self._references)}"
            self._rules[name] = self._value(self._target(pointer, where), pointer)
        return self._references[pointer]

    def _target(self, pointer: str, where: str) -> Any:
        found = self._schema
        if pointer != "#" and not pointer.startswith("#/"):
            raise _expected(where, "$ref to a part of this schema (#/…)", pointer)
        for word in pointer.split("/")[1:]:
            key = unquote(word).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key) if isinstance(found, list) else key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise _expected(where, "$ref to a part of this schema", pointer) from None
        return found

    def _resolved(self, schema: _Schema, where: str) -> _Schema | Literal[False]:
        """The schema with what its $ref and allOf say."""
        reference, others = _split(schema, "$ref")
        parts, others = _split(others, "allOf")
        targets = [] if reference is None else [self._target(reference, where)]
        merged: _Schema | Literal[False] = others
        for part in (*targets, *(parts or ())):
            merged = self._merged(merged, part, where)
        return merged

    def _merged(self, one: Any, other: Any, where: str) -> _Schema | Literal[False]:
        """A schema for the values that satisfy both; False if that is none."""
        first, second = _plain(one, where), _plain(other, where)
        if first is False or second is False:
            return False
        if not first or not second:
            return first or second
        one, other = self._resolved(first, where), self._resolved(second, where)
        if one is False or other is False:
            return False
        for first, second in ((one, other), (other, one)):
            choices, others = _split(first, "anyOf")
            if choices is not None:
                rest = self._merged(others, second, where)
                return {"anyOf": [self._merged(choice, rest, where) for choice in choices]}
        merged = {**one, **other}
        for word in one.keys() & other.keys():
            merged[word] = self._both(word, one[word], other[word], where)
        if "properties" in merged or "additionalProperties" in merged:
            merged |= self._members_of_both(one, other, where)
        if one.get("prefixItems") != other.get("prefixItems") and "items" in merged:
            raise _expected(where, "prefixItems in one schema", "items in another")
        satisfiable = merged.get("type") != [] and merged.get("enum") != []
        return merged if satisfiable else False

    def _both(self, word: str, one: Any, other: Any, where: str) -> Any:
        """The value of a keyword that says what two of them say."""
        if word == "enum":
            return [value for value in one if any(_same(value, found) for found in other)]
        if one == other or word in ("properties", "additionalProperties"):
            return one
        if word == "type":
            return [name for name in _with_integers(one) if name in _with_integers(other)]
        if word == "required":
            return [*one, *other]
        if word in _LARGER:
            return max(one, other)
        if word in _SMALLER:
            return min(one, other)
        if word == "items":
            return self._merged(one, other, where)
        raise _expected(where, f"one {word}", "several; write them as one")

    def _members_of_both(self, one: _Schema, other: _Schema, where: str) -> _Schema:
        """`properties` and `additionalProperties` of an object that satisfies both schemas."""
        parts = [(s.get("properties", {}), s.get("additionalProperties", {})) for s in (one, other)]
        (properties, additional), (more, more_additional) = parts
        merged: _Schema = {
            "properties": {
                name: self._merged(
                    properties.get(name, additional), more.get(name, more_additional), where
                )
                for name in {**properties, **more}
            }
        }
        if "additionalProperties" in one or "additionalProperties" in other:
            merged["additionalProperties"] = self._merged(additional, more_additional, where)
        return merged

    # ------------------------------------------------------------------------ values of a type

    def _enum(self, schema: _Schema, where: str) -> str:
        others = schema.keys() - {"enum", "type"}
        if others:
            raise _expected(where, "enum or const without other keywords", min(others))
        types = schema.get("type")
        values = [
            v for v in schema["enum"] if types is None or _type_of(v) in _with_integers(types)
        ]
        if not values:
            raise _unsatisfiable(where)
        return self._any_of([self._rule(_literal(value, where)) for value in values])

    def _typed(self, schema: _Schema, where: str) -> str:
        rules: dict[str, Callable[[_Schema, str], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda *_: "boolean",
            "null": lambda *_: "null",
        }
        types = schema.get("type")
        if types is None:
            types = [
                name
                for name in _KEYWORDS
                if schema.keys() & {*_KEYWORDS[name], *_REFUSED.get(name, ())}
            ]
        if not types:
            return "value"
        if "number" in types:
            types = [name for name in types if name != "integer"]
        for name in types:
            for word in _REFUSED.get("number" if name == "integer" else name, ()):
                if schema.get(word):
                    raise _refused(where, word)
        return self._any_of([rules[name](schema, where) for name in types])

    def _object(self, schema: _Schema, where: str) -> str:
        properties = dict(schema.get("properties", {}))
        additional = schema.get("additionalProperties", {} if not properties else None)
        required = schema.get("required", [])
        for name in required:
            properties.setdefault(name, {} if additional is None else additional)
        members = {}
        for name, value in properties.items():
            place = f"{where}/properties/{name.replace('~', '~0').replace('/', '~1')}"
            if _plain(value, place) is False:
                if name in required:
                    raise _unsatisfiable(place)
                continue
            members[name] = self._rule(
                f'{_literal(name, place)} ":" space {self._value(value, place)}'
            )
        after, first = "", [""]  # members after another one, and the first ones
        place = f"{where}/additionalProperties"
        if additional is not None and _plain(additional, place) is not False:
            key = self._rule(f'"\\"" ({other_strings([*properties])}) "\\""')
            member = self._rule(f'{key} ":" space {self._value(additional, place)}')
            after = self._rule(f'("," space {member})*')
            first = [f"{member} {after}", ""]
        for name, member in reversed(members.items()):
            if name in required:
                first = [f"{member} {after}"]
                after = self._rule(f'"," space {member} {after}')
            else:
                first = [f"{member} {after}", *first]
                after = self._rule(f'("," space {member})? {after}')
        least = _count(schema, "minProperties", where) or 0
        if least == 1 and first[-1] == "":
            first.pop()
        elif least > len({*required}):
            raise _refused(where, "minProperties")
        most = _count(schema, "maxProperties", where)
        if most is not None and (additional is not None or most < len(members)):
            raise _refused(where, "maxProperties")
        return self._rule(_enclosed("{", first, "}"))

    def _array(self, schema: _Schema, where: str) -> str:
        least = _count(schema, "minItems", where) or 0
        most = _count(schema, "maxItems", where)
        places = [
            (value, f"{where}/prefixItems/{i}")
            for i, value in enumerate(schema.get("prefixItems", ())[:most])
        ]
        first = [self._value(value, place) for value, place in places]
        more = schema.get("items", {} if least > len(first) or not first else False)
        if _plain(more, f"{where}/items") is False:
            most = len(first)
        if most is not None and most < least:
            raise _unsatisfiable(where)
        if most == len(first):
            return self._rule(_enclosed("[", [' "," space '.join(first)], "]"))
        item = self._value(more, f"{where}/items")
        if not first:
            optional, first, least = least == 0, [item], max(least, 1)
        else:
            optional = False
        rest = self._repeated(
            self._rule(f'"," space {item}'),
            max(least - len(first), 0),
            None if most is None else most - len(first),
        )
        items = ' "," space '.join(first) + f" {rest}"
        return self._rule(_enclosed("[", [items, ""] if optional else [items], "]"))

    def _string(self, schema: _Schema, where: str) -> str:
        least = _count(schema, "minLength", where) or 0
        most = _count(schema, "maxLength", where)
        pattern = schema.get("pattern")
        if least == 0 and most is None:
            pattern = _FORMATS.get(schema.get("format", "")) if pattern is None else pattern
        elif pattern is not None:
            raise _expected(where, "pattern or a length", "both; put the length into the pattern")
        elif most is not None and most < least:
            raise _unsatisfiable(where)
        else:
            return self._rule(f'"\\"" {self._repeated("char", least, most)} "\\""')
        if pattern is None:
            return "string"
        try:
            return self._rule(f'"\\"" {string_content(pattern, "char", self._rule)} "\\""')
        except UnsupportedPatternError as error:
            raise _expected(
                where, "a pattern that a grammar can express", f"{pattern!r} ({error})"
            ) from None

    def _integer(self, schema: _Schema, where: str) -> str:
        low, above, high, below = self._bounds(schema, where)
        least = [math.ceil(bound) for bound in low] + [math.floor(bound) + 1 for bound in above]
        most = [math.floor(bound) for bound in high] + [math.ceil(bound) - 1 for bound in below]
        if not least and not most:
            return "integer"
        found = integers(max(least, default=None), min(most, default=None))
        if found is None:
            raise _unsatisfiable(where)
        return self._rule(found)

    def _number(self, schema: _Schema, where: str) -> str:
        low, above, high, below = self._bounds(schema, where)
        least = low + [beyond(bound, 1) for bound in above]
        most = high + [beyond(bound, -1) for bound in below]
        if not least and not most:
            return "number"
        found = numbers(max(least, default=None), min(most, default=None))
        if found is None:
            raise _unsatisfiable(where)
        return self._rule(found)

    def _bounds(self, schema: _Schema, where: str) -> list[list[Decimal]]:
        """The (exclusive) minimum and the (exclusive) maximum, each in a list that may be empty."""
        bounds: list[list[Decimal]] = []
        for word in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            value = schema.get(word)
            if value is not None and (_type_of(value) not in _NUMBERS or not math.isfinite(value)):
                raise _expected(where, f"a number as {word}", short(value))
            bounds.append([] if value is None else [Decimal(str(value))])
        return bounds


def _plain(schema: Any, where: str) -> _Schema | Literal[False]:
    """The keywords of a schema that restrict a value, in one spelling; False if none is allowed.

    `const` becomes `enum`, `oneOf` becomes `anyOf`, `type` a list, and a list of `items`
    `prefixItems`.
    """
    if isinstance(schema, bool):
        return {} if schema else False
    if not isinstance(schema, dict):
        raise _expected(where, "a schema", short(schema))
    plain = {word: value for word, value in schema.items() if word in _RESTRICTING}
    for word, value in plain.items():
        if word in _ALWAYS_REFUSED:
            raise _refused(where, word)
        shapes = _SHAPES.get(word, object)
        if not isinstance(value, shapes) or (word in _FILLED and not value):
            raise _expected(where, f"another value of {word}", short(value))
    if plain.get("format") not in (None, *_FORMATS):
        del plain["format"]
    if isinstance(types := plain.get("type"), str):
        plain["type"] = [types]
    if unknown := [name for name in plain.get("type", ()) if name not in _TYPES]:
        raise _expected(where, f"types among {', '.join(_TYPES)}", short(unknown[0]))
    if "const" in plain:
        const = plain.pop("const")
        plain["enum"] = [v for v in plain.get("enum", [const]) if _same(v, const)]
    if "oneOf" in plain:
        choices = plain.pop("oneOf")
        if "anyOf" in plain:
            plain["allOf"] = [*plain.get("allOf", ()), {"anyOf": choices}]
        else:
            plain["anyOf"] = choices
    if isinstance(plain.get("items"), list):
        plain["prefixItems"] = plain.pop("items")
        if "additionalItems" in plain:
            plain["items"] = plain["additionalItems"]
    plain.pop("additionalItems", None)
    return plain


def _split(schema: _Schema, word: str) -> tuple[Any, _Schema]:
    """The value of a keyword, None if it is absent, and the schema without it."""
    return schema.get(word), {name: value for name, value in schema.items() if name != word}


def _type_of(value: Any) -> str:
    """The narrowest type of a value that `json.loads` returned."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _with_integers(types: list[str]) -> list[str]:
    return [*types, "integer"] if "number" in types else types


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, for which Python takes 1 and True, too."""
    return _type_of(one) == _type_of(other) and bool(one == other)


def _count(schema: _Schema, word: str, where: str) -> int | None:
    """The value of a keyword that counts something; None if it is absent."""
    value = schema.get(word)
    if value is None:
        return None
    if _type_of(value) != "integer" or value < 0:
        raise _expected(where, f"{word} of 0 or more", short(value))
    return int(value)


def _literal(value: Any, where: str) -> str:
    """The expression for the JSON text of a value."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        raise _expected(where, "a value that JSON can express", short(value)) from None
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _times(rule: str, least: int, most: int | None) -> str:
    return "" if most == 0 else f"{rule}{{{least},{'' if most is None else most}}}"


def _enclosed(opening: str, contents: Sequence[str], closing: str) -> str:
    """The expression for one of the contents in brackets; an empty one stands for nothing."""
    inside = " | ".join(content for content in contents if content)
    if inside:
        inside = f"(({inside}) space)" + ("?" if "" in contents else "")
    return f'"{opening}" space {inside} "{closing}"'


def _expected(where: str, expected: str, found: str) -> NativeError:
    place = f"the JSON schema at {where}" if where.startswith("#") else where
    return NativeError(f"{place}: expected {expected}, found {found}")


def _as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)[:80]


def _refused(where: str, word: str) -> NativeError:
    return _expected(where, "keywords that a grammar can express", f"{word}; leave it out")


def _unsatisfiable(where: str) -> NativeError:
    return _expected(where, "a schema that some value satisfies", "one that none satisfies")
