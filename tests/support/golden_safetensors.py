"""One tiny safetensors file, and variants that represent faults found in the wild.

`CASES` are malformed files, each with the error that the reader must raise; `SOUND` are unusual
but valid files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

GOLDEN_HEADER = (
    b'{"__metadata__":{"format":"pt"},'
    b'"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
    b'"b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}}  '
)
GOLDEN_DATA = bytes(range(14))
GOLDEN = b"\x90\0\0\0\0\0\0\0" + GOLDEN_HEADER + GOLDEN_DATA


def with_header(header: bytes | str, data: bytes = b"") -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + data


def with_entries(entries: dict[str, Any], data: bytes = b"") -> bytes:
    return with_header(json.dumps(entries), data)


def entry(dtype: Any = "U8", shape: Any = (2,), data_offsets: Any = (0, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


OVER = 100_000_001  # of the reference's limit
LAST = (1 << 64) - 1
TWO = {"a": entry(), "b": entry(data_offsets=[2, 4])}
HALF_PAIR = '{"\\ud800":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
NO_SIZES = "shape: expected whole numbers from 0"
NO_OFFSETS = "data_offsets: expected [begin, end]"
NO_ENTRY = "tensor 'a': expected dtype, shape and data_offsets"


@dataclass(frozen=True)
class Case:
    """A malformed file and what must be said of it; `reference`: whether the reference takes it."""

    name: str
    data: bytes
    says: str
    reference: bool = False


def bad_entry(
    name: str, bad: Any, says: str, *, data: bytes = b"12", reference: bool = False
) -> Case:
    """A file whose only tensor has a faulty entry."""
    return Case(name, with_entries({"a": bad}, data), f"tensor 'a': {says}", reference)


def misplaced(name: str, entries: dict[str, Any], tensor: str, expected: int, found: str) -> Case:
    """Tensors that do not follow one another."""
    last = max(e["data_offsets"][1] for e in entries.values())
    says = f"data_offsets of '{tensor}': expected to begin at {expected}, found {found}"
    return Case(name, with_entries(entries, bytes(last % (1 << 40))), says)


CASES = [
    Case("empty file", b"", "header length: expected 8 bytes, found a file of 0"),
    Case("seven bytes", bytes(7), "header length: expected 8 bytes, found a file of 7"),
    *(
        Case(
            f"header length {label}",
            length.to_bytes(8, "little") + GOLDEN[8:],
            f"header length: expected 2 to {len(GOLDEN) - 8} bytes, found {length}",
        )
        for label, length in {
            "0": 0,
            "1": 1,
            "past the end": len(GOLDEN) - 7,
            "over the limit": OVER,
            "2^63": 1 << 63,
            "2^64 - 1": LAST,
        }.items()
    ),
    Case("header too short", (142 - 1).to_bytes(8, "little") + GOLDEN[8:], "header: expected JSON"),
    Case("no JSON", with_header("{]"), "header: expected JSON, found: Expecting property name"),
    Case("a list", with_header("[1]"), "header: expected '{' first, found b'['"),
    Case("space first", with_header(" {}"), "header: expected '{' first, found b' '", True),
    Case("byte order mark", with_header("\ufeff{}"), "header: expected '{' first, found b'\\xef'"),
    Case("not UTF-8", with_header(b'{"\xff":1}'), "header: expected JSON, found: 'utf-8' codec"),
    Case("two values", with_header("{} {}"), "header: expected JSON, found: Extra data"),
    Case("deep nesting", with_header('{"a":' + "[" * 100_000), "header: expected JSON, found: "),
    Case(
        "deep nesting, closed",
        with_header('{"a":' + "[" * 500 + "]" * 500 + "}"),
        f"{NO_ENTRY}, found [[[[",
    ),
    Case("long number", with_header('{"a":' + "9" * 5000 + "}"), "header: expected JSON, found: "),
    Case("name twice", with_header('{"a":1,"b":1,"a":1}'), "header: 'a' occurs twice"),
    Case(
        "same tensor twice",
        with_header("{" + ",".join([f'"a":{json.dumps(entry())}'] * 2) + "}", b"12"),
        "header: 'a' occurs twice",
        reference=True,  # which takes the last
    ),
    Case(
        "field twice",
        with_header('{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"12"),
        "header: 'dtype' occurs twice",
    ),
    Case("metadata a list", with_header('{"__metadata__":[]}'), "__metadata__: expected strings"),
    Case(
        "metadata of numbers",
        with_header('{"__metadata__":{"a":1}}'),
        "__metadata__: expected strings by name, found {'a': 1}",
    ),
    *(
        Case(
            f"metadata with half a surrogate pair as {label}",
            with_header(f'{{"__metadata__":{{{pair}}}}}'),
            f"__metadata__: expected strings by name, found {{{pair}}}".replace('"', "'"),
        )
        for label, pair in {"key": r'"\udc00": "a"', "value": r'"a": "\udc00"'}.items()
    ),
    Case(
        "half a surrogate pair",
        with_header(HALF_PAIR, b"12"),
        "tensor '\\ud800': expected a name in UTF-8, found half a surrogate pair",
    ),
    Case("entry a number", with_entries({"a": 1}), f"{NO_ENTRY}, found 1"),
    Case("entry a list", with_entries({"a": ["U8", [2], [0, 2]]}, b"12"), NO_ENTRY, reference=True),
    *(
        Case(
            f"without {field}",
            with_entries({"a": {k: v for k, v in entry().items() if k != field}}, b"12"),
            NO_ENTRY,
        )
        for field in entry()
    ),
    Case(
        "unknown field",
        with_entries({"a": {**entry(), "strides": [1]}}, b"12"),
        NO_ENTRY,
        reference=True,
    ),
    bad_entry("unknown dtype", entry("F128"), "dtype: expected one of F4, F6_E2M3, "),
    bad_entry("dtype a number", entry(8), "dtype: expected one of F4, F6_E2M3, "),
    bad_entry("dtype a list", entry(["U8"]), "dtype: expected one of F4, F6_E2M3, "),
    bad_entry("wrong dtype", entry("F32"), "data_offsets: expected 8 bytes for F32 [2], found 2"),
    bad_entry(
        "wrong shape", entry(shape=[3]), "data_offsets: expected 3 bytes for U8 [3], found 2"
    ),
    bad_entry("shape a number", entry(shape=2), f"{NO_SIZES}, found 2"),
    bad_entry("negative dimension", entry(shape=[-2]), f"{NO_SIZES}, found [-2]"),
    bad_entry("fraction of a dimension", entry(shape=[2.0]), f"{NO_SIZES}, found [2.0]"),
    bad_entry("true for 1", entry(shape=[2, True]), f"{NO_SIZES}, found [2, True]"),
    bad_entry(
        "dimension 2^64", entry(shape=[1 << 64]), f"{NO_SIZES}, found [18446744073709551616]"
    ),
    bad_entry(
        "shape overflows",
        entry(shape=[4194305, 4194305, 211106198978564]),
        "shape: expected fewer than 2^64 bits, found [4194305, 4194305, 211106198978564]",
    ),
    bad_entry(
        "shape overflows before its zero",
        entry(shape=[1 << 62, 1 << 62, 0], data_offsets=[0, 0]),
        "shape: expected fewer than 2^64 bits, found",
        data=b"",
    ),
    bad_entry("half a byte", entry("F4", [3]), "shape: expected whole bytes, found [3] of F4"),
    bad_entry("reversed offsets", entry(data_offsets=[2, 0]), f"{NO_OFFSETS}, found [2, 0]"),
    bad_entry("one offset", entry(data_offsets=[2]), f"{NO_OFFSETS}, found [2]"),
    bad_entry("three offsets", entry(data_offsets=[0, 1, 2]), f"{NO_OFFSETS}, found [0, 1, 2]"),
    bad_entry("negative offset", entry(data_offsets=[-1, 1]), f"{NO_OFFSETS}, found [-1, 1]"),
    bad_entry("offset 2^63", entry(data_offsets=[1 << 63, (1 << 63) + 2]), f"{NO_OFFSETS}, found"),
    misplaced("hole at the start", {"a": entry(data_offsets=[1, 3])}, "a", 0, "1 (hole)"),
    misplaced("hole", {**TWO, "b": entry(data_offsets=[3, 5])}, "b", 2, "3 (hole)"),
    misplaced("overlap", {**TWO, "b": entry(data_offsets=[1, 3])}, "b", 2, "1 (overlap)"),
    misplaced("same place", {"a": entry(), "b": entry()}, "b", 2, "0 (overlap)"),
    misplaced(
        "past the end",
        {"a": entry(data_offsets=[1 << 40, (1 << 40) + 2])},
        "a",
        0,
        "1099511627776 (hole)",
    ),
    Case(
        "truncated",
        GOLDEN[:-1],
        "expected a file of 166 bytes by its header, found 165 bytes (truncated, "
        "as by a download that was cut; fetch it again)",
    ),
    Case(
        "extra data",
        GOLDEN + b"x",
        "expected a file of 166 bytes by its header, found 167 bytes (extra data)",
    ),
]


SOUND = {
    "no tensors": with_header("{}"),
    "padded with spaces": with_header("{}" + " " * 30),
    "scalar": with_entries({"a": entry("F32", [], [0, 4])}, b"1234"),
    "no elements": with_entries({"a": entry(shape=[0, 7], data_offsets=[0, 0])}),
    "no elements, between others": with_entries(
        {"b": entry(), "a": entry(shape=[0], data_offsets=[2, 2]), "c": entry(data_offsets=[2, 4])},
        b"1234",
    ),
    "no elements, named after its neighbour": with_entries(
        {"a": entry(), "c": entry(data_offsets=[2, 4]), "b": entry(shape=[0], data_offsets=[2, 2])},
        b"1234",
    ),
    "zero before what would overflow": with_entries(
        {"a": entry(shape=[0, 1 << 62, 1 << 62], data_offsets=[0, 0])}
    ),
    "empty name": with_entries({"": entry()}, b"12"),
    "another order": with_entries({"b": entry(data_offsets=[2, 4]), "a": entry()}, b"1234"),
    "metadata alone": with_header('{"__metadata__":{}}'),
    "escaped name": with_entries({'a"\\\n\0é': entry()}, b"12"),
}
