"""The safetensors reader: golden bytes, every malformed header, and the reference beside it."""

from __future__ import annotations

import json
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from byte_source import ByteSource
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import save

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.safetensors import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    SafetensorsFile,
    StoredTensor,
    open_safetensors,
    read_safetensors,
)

GOLDEN_HEADER = (
    b'{"__metadata__":{"format":"pt"},'
    b'"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
    b'"b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}}  '
)
GOLDEN_DATA = bytes(range(14))
GOLDEN = b"\x90\0\0\0\0\0\0\0" + GOLDEN_HEADER + GOLDEN_DATA


def read(data: bytes) -> SafetensorsFile:
    return read_safetensors(ByteSource(data))


def with_header(header: bytes | str, data: bytes = b"") -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + data


def with_entries(entries: dict[str, Any], data: bytes = b"") -> bytes:
    return with_header(json.dumps(entries), data)


def entry(dtype: Any = "U8", shape: Any = (2,), data_offsets: Any = (0, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


def deserialize(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """What the reference reads: names with dtype, shape and data."""
    tensors: list[tuple[str, dict[str, Any]]]
    tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    return tensors


def reference_takes(data: bytes) -> bool:
    try:
        deserialize(data)
    except SafetensorError:
        return False
    return True


# ------------------------------------------------------------------------- golden bytes


def test_reads_the_golden_bytes() -> None:
    file = read(GOLDEN)
    start = 8 + len(GOLDEN_HEADER)
    assert file.tensors == {
        "w": StoredTensor("w", "F32", (1, 2), start, 8),
        "b": StoredTensor("b", "BF16", (3,), start + 8, 6),
    }
    assert file.metadata == {"format": "pt"}


def test_the_reference_reads_the_golden_bytes() -> None:
    assert {
        name: (tensor["dtype"], tensor["shape"], bytes(tensor["data"]))
        for name, tensor in deserialize(GOLDEN)
    } == {"w": ("F32", [1, 2], GOLDEN_DATA[:8]), "b": ("BF16", [3], GOLDEN_DATA[8:])}


def test_reads_what_the_reference_writes(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
        "scalar": np.array(1.5, np.float32),
        "empty": np.zeros((0, 3), np.int64),
        "f16": np.arange(6, dtype=np.float16).reshape(2, 3),
        "bf16": np.arange(4).astype(ml_dtypes.bfloat16),
        "bool": np.array([True, False]),
        "u8": np.arange(3, dtype=np.uint8),
        "名": np.arange(2, dtype=np.float64),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(save(arrays, metadata={"format": "np"}))
    file = open_safetensors(path)
    try:
        assert file.metadata == {"format": "np"}
        assert {name: (t.shape, t.nbytes) for name, t in file.tensors.items()} == {
            name: (array.shape, array.nbytes) for name, array in arrays.items()
        }
        assert {name: file.source.read(t.offset, t.nbytes) for name, t in file.tensors.items()} == {
            name: array.tobytes() for name, array in arrays.items()
        }
        offsets = [t.offset for t in file.tensors.values()]
        assert offsets == sorted(offsets)
    finally:
        file.source.close()


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_type_has_the_size_that_the_reference_gives_it(dtype: str) -> None:
    nbytes = 8 * DTYPE_BITS[dtype] // 8
    data = with_entries({"t": entry(dtype, [8], [0, nbytes])}, bytes(nbytes))
    assert reference_takes(data)
    assert read(data).tensors["t"].nbytes == nbytes


def test_knows_every_type_of_the_reference() -> None:
    with pytest.raises(SafetensorError) as error:
        deserialize(with_entries({"t": entry("?")}, b"12"))
    named = {part for part in str(error.value).split("`") if part.isupper() or "_" in part}
    assert named - {"?"} == set(DTYPE_BITS)


# --------------------------------------------------------------------- malformed headers

OVER = MAX_HEADER_BYTES + 1
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
    Case(
        "name twice",
        with_header('{"a":1,"b":1,"a":1}'),
        "header: 'a' occurs twice",
    ),
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
    Case(
        "hole at the start",
        with_entries({"a": entry(data_offsets=[1, 3])}, b"123"),
        "data_offsets of 'a': expected to begin at 0, found 1 (hole)",
    ),
    Case(
        "hole",
        with_entries({**TWO, "b": entry(data_offsets=[3, 5])}, b"12345"),
        "data_offsets of 'b': expected to begin at 2, found 3 (hole)",
    ),
    Case(
        "overlap",
        with_entries({**TWO, "b": entry(data_offsets=[1, 3])}, b"123"),
        "data_offsets of 'b': expected to begin at 2, found 1 (overlap)",
    ),
    Case(
        "same place",
        with_entries({"a": entry(), "b": entry()}, b"12"),
        "data_offsets of 'b': expected to begin at 2, found 0 (overlap)",
    ),
    Case(
        "past the end",
        with_entries({"a": entry(data_offsets=[1 << 40, (1 << 40) + 2])}, b"12"),
        "data_offsets of 'a': expected to begin at 0, found 1099511627776 (hole)",
    ),
    Case(
        "truncated",
        GOLDEN[:-1],
        "expected a file of 166 bytes by its header, found 165 bytes (truncated)",
    ),
    Case(
        "extra data",
        GOLDEN + b"x",
        "expected a file of 166 bytes by its header, found 167 bytes (extra data)",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refuses(case: Case) -> None:
    with pytest.raises(FormatError) as error:
        read(case.data)
    assert str(error.value).startswith(f"bytes: {case.says}")
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_refuses_the_same(case: Case) -> None:
    """A case that the reference takes is marked: there we are stricter on purpose."""
    assert reference_takes(case.data) == case.reference


def test_refuses_the_golden_file_cut_short() -> None:
    for length in range(len(GOLDEN)):
        with pytest.raises(FormatError, match="found"):
            read(GOLDEN[:length])


def test_a_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    with path.open("wb") as out:  # sparse
        out.write(OVER.to_bytes(8, "little") + b"{")
        out.truncate(8 + OVER)
    tracemalloc.start()
    try:
        with pytest.raises(
            FormatError, match=f"expected 2 to {MAX_HEADER_BYTES} bytes, found {OVER}"
        ):
            open_safetensors(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"U8","data_offsets":[0,0],"shape":['
        + "9223372036854775807," * 200_000
        + "1]}}",
        "{" + "".join(f'"{i}":1,' for i in range(200_000)) + '"199999":1}',
    ],
    ids=["long shape", "many names, the last one twice"],
)
def test_time_is_bounded_by_the_header(header: str) -> None:
    """Both take time that grows with the square of the header where one is careless."""
    data = with_header(header)
    began = time.process_time()
    with pytest.raises(FormatError):
        read(data)
    assert time.process_time() - began < 5


# ----------------------------------------------------------------------------- odd, sound

SOUND = {
    "no tensors": with_header("{}"),
    "padded with spaces": with_header("{}" + " " * 30),
    "scalar": with_entries({"a": entry("F32", [], [0, 4])}, b"1234"),
    "no elements": with_entries({"a": entry(shape=[0, 7], data_offsets=[0, 0])}),
    "no elements, between others": with_entries(
        {"b": entry(), "a": entry(shape=[0], data_offsets=[2, 2]), "c": entry(data_offsets=[2, 4])},
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


@pytest.mark.parametrize("name", SOUND)
def test_takes_what_is_odd_but_sound(name: str) -> None:
    data = SOUND[name]
    theirs = {t: (d["dtype"], tuple(d["shape"])) for t, d in deserialize(data)}
    assert {t.name: (t.dtype, t.shape) for t in read(data).tensors.values()} == theirs


# ------------------------------------------------------------------------ random headers

SHAPES = st.lists(st.integers(0, 4), max_size=3)
NAMES = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda n: n != "__metadata__")


@settings(deadline=None)
@given(
    st.dictionaries(NAMES, st.tuples(st.sampled_from(["F32", "BF16", "U8", "F8_E4M3"]), SHAPES)),
    st.dictionaries(NAMES, st.text(st.characters(codec="utf-8"))),
    st.randoms(use_true_random=False),
)
def test_round_trip(
    tensors: dict[str, tuple[str, list[int]]], notes: dict[str, str], source: Any
) -> None:
    data = b""
    header: dict[str, Any] = {"__metadata__": notes}
    contents = {}
    for name, (dtype, shape) in tensors.items():
        nbytes = int(np.prod(shape, dtype=int)) * DTYPE_BITS[dtype] // 8
        contents[name] = source.randbytes(nbytes)
        header[name] = entry(dtype, shape, [len(data), len(data) + nbytes])
        data += contents[name]
    content = with_entries(header, data)
    file = read(content)
    assert file.metadata == notes
    assert {t.name: (t.dtype, list(t.shape)) for t in file.tensors.values()} == tensors
    assert {
        t.name: content[t.offset : t.offset + t.nbytes] for t in file.tensors.values()
    } == contents
    assert reference_takes(content)


PIECES = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"0",
    b"8",
    b"14",
    b"-1",
    b"1.0",
    b"null",
    b"\\",
    b"F32",
    b" ",
]


@settings(deadline=None, max_examples=500)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(GOLDEN_HEADER) - 1), st.integers(0, 3), st.sampled_from(PIECES)
        ),
        min_size=1,
        max_size=3,
    )
)
def test_the_reference_takes_every_mutant_we_take(edits: list[tuple[int, int, bytes]]) -> None:
    header = bytearray(GOLDEN_HEADER)
    for at, length, piece in edits:
        header[at : at + length] = piece
    data = with_header(bytes(header), GOLDEN_DATA)
    try:
        file = read(data)
    except FormatError:
        return
    assert reference_takes(data)
    assert {name: (d["dtype"], d["shape"]) for name, d in deserialize(data)} == {
        t.name: (t.dtype, list(t.shape)) for t in file.tensors.values()
    }
