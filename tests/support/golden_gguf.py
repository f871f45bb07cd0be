"""One tiny GGUF file, field by field as bytes, and malformed variants of it.

`FIELDS` is the file: its values, joined, are the bytes. `CASES` are malformed files, each with the
error that the reader must raise; `SOUND` are unusual but valid files. They represent faults that
have been found in the wild (CVE-2024-21802, -23605, CVE-2026-27940, -33298 and their like)
and for what llama.cpp tests its own reader with (the handcrafted files of tests/test-gguf.cpp).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FIELDS: dict[str, bytes] = {
    "magic": b"GGUF",
    "version": b"\3\0\0\0",
    "tensor count": b"\2\0\0\0\0\0\0\0",
    "metadata count": b"\4\0\0\0\0\0\0\0",
    "key 0 length": b"\x14\0\0\0\0\0\0\0",
    "key 0": b"general.architecture",
    "type 0": b"\x08\0\0\0",
    "string length": b"\6\0\0\0\0\0\0\0",
    "string": b"qwen35",
    "key 1 length": b"\x11\0\0\0\0\0\0\0",
    "key 1": b"general.alignment",
    "type 1": b"\4\0\0\0",
    "alignment": b"\x40\0\0\0",
    "key 2 length": b"\3\0\0\0\0\0\0\0",
    "key 2": b"ids",
    "type 2": b"\x09\0\0\0",
    "element type 2": b"\5\0\0\0",
    "count 2": b"\2\0\0\0\0\0\0\0",
    "elements 2": b"\7\0\0\0\xff\xff\xff\xff",
    "key 3 length": b"\6\0\0\0\0\0\0\0",
    "key 3": b"tokens",
    "type 3": b"\x09\0\0\0",
    "element type 3": b"\x08\0\0\0",
    "count 3": b"\2\0\0\0\0\0\0\0",
    "token 0 length": b"\1\0\0\0\0\0\0\0",
    "token 0": b"a",
    "token 1 length": b"\2\0\0\0\0\0\0\0",
    "token 1": b"\xc3\xa9",
    "name 0 length": b"\4\0\0\0\0\0\0\0",
    "name 0": b"norm",
    "dimension count 0": b"\1\0\0\0",
    "shape 0": b"\4\0\0\0\0\0\0\0",
    "tensor type 0": b"\0\0\0\0",
    "offset 0": b"\0\0\0\0\0\0\0\0",
    "name 1 length": b"\1\0\0\0\0\0\0\0",
    "name 1": b"w",
    "dimension count 1": b"\2\0\0\0",
    "shape 1": b"\x20\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0",
    "tensor type 1": b"\x08\0\0\0",
    "offset 1": b"\x40\0\0\0\0\0\0\0",
    "header padding": bytes(56),
    "data 0": b"\0\0\x80\x3f" * 4,
    "padding 0": bytes(48),
    "data 1": bytes(range(68)),
    "padding 1": bytes(60),
}


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def u64(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def start_of(name: str) -> int:
    """Where a field of the unbroken file begins."""
    names = list(FIELDS)
    return sum(len(FIELDS[n]) for n in names[: names.index(name)])


def cut_at(name: str, keep: int = 0) -> dict[str, bytes]:
    """The file ends in a field, of which `keep` bytes are left."""
    names = list(FIELDS)
    rest = names[names.index(name) + 1 :]
    return {name: FIELDS[name][:keep], **dict.fromkeys(rest, b"")}


@dataclass(frozen=True)
class Case:
    """A broken file: the changed fields, and what the reader must say of it.

    `at` is the field whose first byte the message names: the first changed one unless told
    otherwise, none when empty. `ggml` says whether ggml refuses the file too.
    """

    name: str
    changes: dict[str, bytes]
    field: str
    expected: str
    found: str
    at: str | None = None
    ggml: bool = True

    @property
    def data(self) -> bytes:
        return assembled(self.changes)

    @property
    def sentence(self) -> str:
        at = next(iter(self.changes)) if self.at is None else self.at
        place = f" at byte {start_of(at)}" if at else ""
        where = f"{self.field}{place}: " if self.field else ""
        return f"{where}expected {self.expected}, found {self.found}"


def assembled(changes: dict[str, bytes]) -> bytes:
    """The golden file with some fields replaced."""
    assert changes.keys() <= FIELDS.keys()
    return b"".join({**FIELDS, **changes}.values())


def padded_header(changes: dict[str, bytes], alignment: int = 64) -> dict[str, bytes]:
    """Changes with the header's padding recomputed."""
    names = list(FIELDS)
    fields = {**FIELDS, **changes}
    length = sum(len(fields[n]) for n in names[: names.index("header padding")])
    return {**changes, "header padding": bytes(-length % alignment)}


LAST = (1 << 64) - 1
LAST_32 = (1 << 32) - 1
BEFORE = "a name that occurred before:"
TYPES = "a value type of 0 to 12"
CUT = "; the file is cut off or damaged: fetch it again"
END = f"before the end{CUT}"
NEW_KEY = "a new name of 1 to 65535 bytes"
NEW_NAME = "a new name of 1 to 63 bytes"
IN_RANGE = "dimensions from 0 and fewer than 2^63 elements"


def counts(key: str, name: str, most: int, expected: str) -> list[Case]:
    """A count or length of -1, 2^63 and 2^40, and of one more than there is room for."""
    values = {"-1": LAST, "2^63": 1 << 63, "2^40": 1 << 40, "one too many": most + 1}
    return [
        Case(f"{key}: {label}", {key: u64(value)}, name, expected.format(most), f"{value}{CUT}")
        for label, value in values.items()
    ]


def rest_after(name: str) -> int:
    """Bytes of the unbroken file behind a field."""
    return len(assembled({})) - start_of(name) - len(FIELDS[name])


def bad_count(key: str, name: str, least_bytes: int) -> list[Case]:
    """Counts that the rest of the file cannot hold, when an entry takes `least_bytes` or more."""
    return counts(key, name, rest_after(key) // least_bytes, "at most {} (by the file's size)")


def bad_length(key: str, name: str) -> list[Case]:
    """Lengths of a string that the rest of the file cannot hold."""
    return counts(key, name, rest_after(key), "a length of at most {} bytes")


def bad_key(label: str, key: bytes, found: str, ggml: bool, expected: str = NEW_KEY) -> Case:
    """A faulty metadata key 2."""
    changes = {"key 2 length": u64(len(key)), "key 2": key}
    return Case(f"key: {label}", changes, "metadata key 2", expected, found, ggml=ggml)


def bad_name(label: str, name: bytes, found: str, ggml: bool, expected: str = NEW_NAME) -> Case:
    """A faulty name of tensor 1."""
    changes = {"name 1 length": u64(len(name)), "name 1": name}
    return Case(f"tensor name: {label}", changes, "name of tensor 1", expected, found, ggml=ggml)


def bad_alignment(label: str, changes: dict[str, bytes], expected: str, found: str) -> Case:
    return Case(f"alignment {label}", changes, "general.alignment", expected, found, at="")


def bad_shape(label: str, *shape: int) -> Case:
    """A shape of tensor 1 that ggml's integers cannot hold."""
    changes = {"shape 1": u64(*shape), "dimension count 1": u32(len(shape))}
    return Case(f"shape: {label}", changes, "shape of tensor 'w'", IN_RANGE, str(list(shape)))


HEADER_CASES = [
    Case("empty file", cut_at("magic"), "", "a GGUF file", "an empty one", at=""),
    Case(
        "other magic",
        {"magic": b"FUGG"},
        "",
        "a GGUF file, which begins with b'GGUF'",
        "b'FUGG' there",
        at="",
    ),
    Case("magic alone", cut_at("version"), "version", "4 bytes", f"0 {END}"),
    *(
        Case(f"version {n}", {"version": u32(n)}, "version", "2 or 3", str(n), at="")
        for n in (0, 1, 4, 0x10000, LAST_32)
    ),
    Case("ends in a count", cut_at("tensor count", 4), "tensor count", "8 bytes", f"4 {END}"),
    *bad_count("tensor count", "tensor count", least_bytes=33),
    *bad_count("metadata count", "metadata count", least_bytes=14),
    Case(
        "tensor count: one more than there are",
        {"tensor count": u64(3)},
        "name of tensor 2",
        NEW_NAME,
        "an empty one",
        at="header padding",
    ),
    Case(
        "metadata count: one fewer than there are",
        {"metadata count": u64(3)},
        "dimension count of tensor 'tokens'",
        "1 to 4",
        "9",
        at="type 3",
    ),
]

# Of a field that is a number: what it is in the error, what is expected of it, and other values.
NUMBERS = {
    "type 2": ("type of 'ids'", TYPES, (13, LAST_32)),
    "element type 2": ("element type of 'ids'", TYPES, (13, LAST_32)),
    "dimension count 1": ("dimension count of tensor 'w'", "1 to 4", (5, LAST_32)),
    "tensor type 1": (
        "type of tensor 'w'",
        "a known tensor type",
        (4, 5, 31, 36, 43, LAST_32 >> 1, LAST_32),
    ),
}
NUMBER_CASES = [
    Case(f"{field}: {n}", {field: u32(n)}, name, expected, str(n))
    for field, (name, expected, values) in NUMBERS.items()
    for n in values
]

METADATA_CASES = [
    *bad_length("key 2 length", "metadata key 2"),
    bad_key("empty", b"", "an empty one", ggml=True),
    bad_key("twice", b"general.alignment", f"{BEFORE} 'general.alignment'", ggml=True),
    bad_key("zero byte", b"i\0s", "a zero byte in 'i\\x00s'", ggml=False),
    bad_key("over 2^16 bytes", b"k" * 65536, f"65536 bytes: '{'k' * 80}…'", ggml=False),
    bad_key("not UTF-8", b"i\xffs", "b'i\\xffs'", False, "UTF-8 text"),
    Case(
        "nested arrays",
        {"element type 2": u32(9)},
        "element type of 'ids'",
        "scalars or strings",
        "nested arrays",
    ),
    *bad_length("string length", "'general.architecture'"),
    *bad_count("count 2", "length of 'ids'", least_bytes=4),
    *bad_count("count 3", "length of 'tokens'", least_bytes=8),
    *bad_length("token 0 length", "'tokens'"),
    *bad_length("token 1 length", "'tokens'"),
    Case("ends in a scalar", cut_at("alignment", 3), "'general.alignment'", "4 bytes", f"3 {END}"),
    Case(
        "ends in a string",
        cut_at("token 1", 1),
        "'tokens'",
        "a length of at most 1 bytes",
        f"2{CUT}",
        at="token 1 length",
    ),
    *(
        bad_alignment(str(n), {"alignment": u32(n)}, "a power of two", str(n))
        for n in (0, 3, 13, LAST_32)
    ),
    *(
        bad_alignment(f"as {name}", {"type 1": u32(n), "alignment": value}, "type U32", name)
        for name, n, value in (
            ("I32", 5, u32(64)),
            ("F32", 6, u32(0x42800000)),
            ("U64", 10, u64(64)),
            ("STRING", 8, u64(2) + b"64"),
            ("ARRAY", 9, u32(4) + u64(1) + u32(64)),
        )
    ),
]

TENSOR_CASES = [
    *bad_length("name 1 length", "name of tensor 1"),
    bad_name("empty", b"", "an empty one", ggml=False),
    bad_name("twice", b"norm", f"{BEFORE} 'norm'", ggml=True),
    bad_name("64 bytes", b"n" * 64, f"64 bytes: '{'n' * 64}'", ggml=True),
    bad_name("64 bytes of 32 letters", "é".encode() * 32, f"64 bytes: '{'é' * 32}'", ggml=True),
    bad_name("zero byte", b"w\0x", "a zero byte in 'w\\x00x'", ggml=False),
    bad_name("not UTF-8", b"\x80", "b'\\x80'", False, "UTF-8 text"),
    Case(
        "dimension count 0",
        {"dimension count 1": u32(0), "shape 1": b"", "tensor type 1": u32(0)},
        "dimension count of tensor 'w'",
        "1 to 4",
        "0",
        ggml=False,  # takes it for a scalar
    ),
    bad_shape("-1", 32, LAST),
    bad_shape("2^63", 1 << 63),
    bad_shape("two of 2^33 - 4", 0x1FFFFFFFC, 0x1FFFFFFFC),
    bad_shape("product wraps to a small number", 4194305, 4194305, 211106198978564),
    bad_shape("product of 2^64", 1 << 32, 1 << 32),
    bad_shape("overflows before its zero", 1 << 32, 1 << 32, 0),
    Case(
        "row of no whole blocks",
        {"shape 1": u64(33, 2)},
        "row length of tensor 'w'",
        "a multiple of 32 for Q8_0",
        "33",
        at="tensor type 1",
    ),
    Case(
        "row of half a block",
        {"tensor type 1": u32(12)},
        "row length of tensor 'w'",
        "a multiple of 256 for Q4_K",
        "32",
    ),
    *(
        Case(f"offset: {label}", {"offset 1": u64(n)}, "offset of tensor 'w'", "64", str(n))
        for label, n in {
            "unaligned": 65,
            "unaligned, overlapping": 16,
            "overlapping": 0,
            "with a hole": 128,
            "past the end": 1 << 20,
            "-1": LAST,
        }.items()
    ),
    Case(
        "offset: decreasing",
        {"offset 0": u64(128), "offset 1": u64(0)},
        "offset of tensor 'norm'",
        "0",
        "128",
    ),
    Case(
        "offset: of another alignment",
        {"alignment": u32(32)},
        "offset of tensor 'w'",
        "32",
        "64",
        at="offset 1",
    ),
    Case("ends in an entry", cut_at("offset 1", 7), "offset of tensor 'w'", "8 bytes", f"7 {END}"),
    Case("ends in a shape", cut_at("shape 1", 9), "shape of tensor 'w'", "16 bytes", f"9 {END}"),
]


def bad_data(
    label: str, changes: dict[str, bytes], tensor: str, end: int, size: int, ggml: bool
) -> Case:
    """A file of `size` bytes that is too short for a tensor, which ends at byte `end`.

    ggml does not look there unless it is asked for the data; llama.cpp does when it loads a model.
    """
    expected = f"data up to byte {end}"
    found = (
        f"a file of {size} bytes: it is truncated, as by a download that was cut; fetch it again"
    )
    return Case(f"data: {label}", changes, f"tensor '{tensor}'", expected, found, "", ggml)


def bad_size(label: str, tensor_type: int, shape: Sequence[int], nbytes: int, ggml: bool) -> Case:
    """Tensor 1 with more bytes than the file has."""
    changes = {
        "shape 1": u64(*shape),
        "dimension count 1": u32(len(shape)),
        "tensor type 1": u32(tensor_type),
    }
    changes = padded_header(changes)
    size = len(assembled(changes))
    own = len(FIELDS["data 1"] + FIELDS["padding 1"])
    return bad_data(label, changes, "w", size - own + nbytes, size, ggml)


DATA_CASES = [
    bad_data("none", cut_at("data 0"), "norm", 336, 320, ggml=False),
    bad_data("last byte missing", cut_at("data 1", 67), "w", 452, 451, ggml=False),
    bad_data("header padding cut", cut_at("header padding", 55), "norm", 336, 319, ggml=True),
    bad_data(
        "alignment 2^31",
        {"alignment": u32(1 << 31), "offset 1": u64(1 << 31)},
        "norm",
        (1 << 31) + 16,
        512,
        ggml=True,
    ),
    bad_size("more rows than there are", 8, (32, 1 << 40), 34 << 40, ggml=False),
    bad_size("2^63 - 64 bytes", 24, ((1 << 63) - 64,), (1 << 63) - 64, ggml=False),
    bad_size("2^65 bytes", 27, (1 << 62,), 1 << 65, ggml=True),
    bad_size(
        "2^64 - 16 bytes, 0 when padded",
        0,
        (4, (1 << 30) - 1, (1 << 30) + 1),
        (1 << 64) - 16,
        ggml=True,
    ),
]

CASES = [*HEADER_CASES, *NUMBER_CASES, *METADATA_CASES, *TENSOR_CASES, *DATA_CASES]


BEHIND_METADATA = list(FIELDS)[list(FIELDS).index("name 0 length") :]
NO_TENSORS = {"tensor count": u64(0), **dict.fromkeys(BEHIND_METADATA, b"")}
TOKENS = ("token 0 length", "token 0", "token 1 length", "token 1")
NO_DATA = {"data 0": b"", "padding 0": b""}

SOUND: dict[str, dict[str, bytes]] = {
    "as it is": {},
    "version 2": {"version": u32(2)},
    "last padding missing": {"padding 1": b""},
    "bytes after the end": {"padding 1": bytes(100)},
    "padding of ones": {"header padding": b"\xff" * 56, "padding 0": b"\xff" * 48},
    "no tensors": NO_TENSORS,
    "no tensors, alignment 2^31": {"alignment": u32(1 << 31), **NO_TENSORS},
    "alignment 1": {
        "alignment": u32(1),
        "offset 1": u64(16),
        "header padding": b"",
        "padding 0": b"",
        "padding 1": b"",
    },
    "tensor without elements": {"shape 0": u64(0), "offset 1": u64(0), **NO_DATA},
    "rows without elements": {"shape 1": u64(0, 1 << 40), "data 1": b"", "padding 1": b""},
    "name of 63 bytes": padded_header({"name 1 length": u64(63), "name 1": b"n" * 63}),
    "four dimensions": padded_header({"dimension count 1": u32(4), "shape 1": u64(32, 1, 2, 1)}),
    "empty array": padded_header({"count 2": u64(0), "elements 2": b""}),
    "empty array of strings": padded_header({"count 3": u64(0), **dict.fromkeys(TOKENS, b"")}),
    "string that is not UTF-8": {"token 1": b"\xff\xfe"},
    "bool of 2": padded_header(
        {
            "key 1": b"general.alignmenT",
            "type 1": u32(7),
            "alignment": b"\2",
            "offset 1": u64(32),
            "padding 0": bytes(16),
        },
        alignment=32,
    ),
}

INTERESTING = (0, 1, 2, 8, 9, 63, 64, 255, 1 << 31, 1 << 40, 1 << 63, LAST)


def mutant(data: bytes, source: random.Random) -> bytes:
    """A copy with one to three small changes: bytes, numbers, cuts and repetitions."""
    result = bytearray(data)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        at = source.randrange(len(result) or 1)
        length = source.choice((1, 4, 8))
        match source.randrange(5):
            case 0:
                result[at : at + 1] = bytes(
                    b ^ 1 << source.randrange(8) for b in result[at : at + 1]
                )
            case 1:
                result[at : at + 1] = source.randbytes(1)
            case 2:
                value = source.choice(INTERESTING) & ((1 << 8 * length) - 1)
                result[at : at + length] = value.to_bytes(length, "little")
            case 3:
                del result[at : at + length]
            case _:
                result[at:at] = result[at : at + length]
    return bytes(result)
