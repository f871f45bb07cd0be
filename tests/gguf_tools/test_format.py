"""The GGUF reader and writer: golden bytes, one broken field at a time, and other readers."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.files import format as gguf_format
from mtp_gguf.gguf_tools.files.format import (
    ALIGNMENT_KEY,
    ArrayRef,
    GgufFile,
    TensorSpec,
    Value,
    ValueType,
    lay_out,
    open_gguf,
)
from mtp_gguf.gguf_tools.files.tensor_types import BY_ID, F32, Q8_0, TensorType
from support.byte_source import ByteSource
from support.ggml_reader import Answer, describe
from support.gguf_files import laid_out
from support.golden_gguf import (
    CASES,
    FIELDS,
    IN_RANGE,
    SOUND,
    Case,
    assembled,
    mutant,
    start_of,
    u32,
    u64,
)

GOLDEN = assembled({})
GOLDEN_METADATA = {
    "general.architecture": Value(ValueType.STRING, "qwen35"),
    "general.alignment": Value(ValueType.U32, 64),
    "ids": Value(ValueType.I32, [7, -1]),
    "tokens": Value(ValueType.STRING, ["a", "é"]),
}
GOLDEN_TENSORS = [TensorSpec("norm", (4,), F32), TensorSpec("w", (32, 2), Q8_0)]


def read(data: bytes) -> GgufFile:
    return GgufFile(ByteSource(data))


def sentence(data: bytes) -> str:
    """The reader's error for an invalid file."""
    with pytest.raises(FormatError) as error:
        read(data)
    return str(error.value).removeprefix("bytes: ")


# ------------------------------------------------------------------------- golden bytes


def test_writes_the_golden_bytes() -> None:
    layout = lay_out(GOLDEN_METADATA, GOLDEN_TENSORS)
    assert laid_out(layout, [FIELDS["data 0"], FIELDS["data 1"]]) == GOLDEN
    assert layout.offsets == (start_of("data 0"), start_of("data 1"))


def test_reads_the_golden_bytes() -> None:
    file = read(GOLDEN)
    assert (file.version, file.alignment, file.data_offset) == (3, 64, start_of("data 0"))
    assert file.keys == {
        "general.architecture": "qwen35",
        "general.alignment": 64,
        "ids": ArrayRef(ValueType.I32, 2, start_of("elements 2"), 8),
        "tokens": ArrayRef(ValueType.STRING, 2, start_of("token 0 length"), 19),
    }
    assert {key: file.value(key) for key in file.keys} == GOLDEN_METADATA
    assert [(t.name, t.shape, t.type) for t in file.tensors] == [
        (t.name, t.shape, t.type) for t in GOLDEN_TENSORS
    ]
    assert [(t.offset, t.nbytes) for t in file.tensors] == [
        (start_of("data 0"), 16),
        (start_of("data 1"), 68),
    ]


# ------------------------------------------------------------------------ broken fields


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refuses(case: Case) -> None:
    assert sentence(case.data) == case.sentence


def test_refuses_big_endian_with_its_own_sentence() -> None:
    assert sentence(assembled({"version": b"\0\0\0\3"})) == (
        "version: this is a big-endian GGUF file, and only little-endian ones can be read"
    )


def test_refuses_the_golden_file_cut_short() -> None:
    for length in range(start_of("data 1") + 68):
        assert "found" in sentence(GOLDEN[:length]), length


@pytest.mark.parametrize("name", SOUND)
def test_takes_what_is_odd_but_sound(name: str) -> None:
    read(assembled(SOUND[name]))


@pytest.mark.parametrize("window", [1, 9, 64, 300])
def test_the_window_does_not_matter(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields that cross the edge of what is read at once give the same values and sentences."""
    monkeypatch.setattr(gguf_format, "_WINDOW_BYTES", window)
    test_reads_the_golden_bytes()
    for case in CASES:
        test_refuses(case)
    for name in SOUND:
        test_takes_what_is_odd_but_sound(name)


def header(n_tensors: int, n_kv: int, rest: bytes) -> bytes:
    """A file of 100 bytes."""
    return (b"GGUF" + u32(3) + u64(n_tensors, n_kv) + rest).ljust(100, b"\0")


HUGE = {
    "tensors": header(1 << 40, 0, b""),
    "keys": header(0, 1 << 40, b""),
    "key": header(0, 1, u64(1 << 40)),
    "string": header(0, 1, u64(1) + b"k" + u32(8) + u64(1 << 40)),
    **{
        f"array of {name}": header(0, 1, u64(1) + b"k" + u32(9) + u32(kind) + u64(1 << 40))
        for name, kind in {"u8": 0, "bool": 7, "strings": 8, "f64": 12}.items()
    },
    "string in an array": header(0, 1, u64(1) + b"k" + u32(9) + u32(8) + u64(1, 1 << 40)),
    "tensor name": header(1, 0, u64(1 << 40)),
    "dimensions": header(1, 0, u64(1) + b"t" + u32(0xFFFFFFFF)),
    "elements": header(1, 0, u64(1) + b"t" + u32(1) + u64(1 << 40) + u32(0)),
}


@pytest.mark.parametrize("data", HUGE.values(), ids=HUGE)
def test_a_small_file_takes_little_memory(data: bytes) -> None:
    """100 bytes that claim 2^40 of something."""
    read(GOLDEN)  # so that lazy imports are not counted
    tracemalloc.start()
    try:
        assert "found" in sentence(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_arrays_are_skipped_and_not_read(tmp_path: Path) -> None:
    """An array of numbers and one long string of 256 MiB each cost a few windows of memory."""
    length = 1 << 28
    path = tmp_path / "large.gguf"
    numbers = u64(1) + b"n" + u32(9) + u32(0) + u64(length)
    strings = u64(1) + b"s" + u32(9) + u32(8) + u64(2, 1) + b"x" + u64(length)
    start = b"GGUF" + u32(3) + u64(0, 2) + numbers
    with path.open("wb") as out:  # sparse
        out.write(start)
        out.seek(len(start) + length)
        out.write(strings)
        out.truncate(out.tell() + length)
    tracemalloc.start()
    try:
        with open_gguf(path) as file:
            numbers_ref, strings_ref = file.keys["n"], file.keys["s"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(numbers_ref, ArrayRef)
    assert isinstance(strings_ref, ArrayRef)
    assert numbers_ref.length == length
    assert strings_ref.length == 9 + 8 + length
    assert peak < 8 << 20


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "shrinking.gguf"
    path.write_bytes(GOLDEN)
    with open_gguf(path) as file:
        path.write_bytes(GOLDEN[: start_of("token 1")])
        with pytest.raises(FormatError, match="data is missing"):
            file.array("tokens")


# ---------------------------------------------------------------------- asking for keys


def test_absent_keys_are_none() -> None:
    file = read(GOLDEN)
    assert (file.scalar("x"), file.integer("x"), file.array("x")) == (None, None, None)


@pytest.mark.parametrize(
    ("getter", "key", "says"),
    [
        ("scalar", "ids", "expected one value, found an array"),
        ("integer", "ids", "expected one value, found an array"),
        ("integer", "general.architecture", "expected a whole number, found type STRING"),
        ("array", "general.architecture", "expected an array, found one value"),
    ],
)
def test_keys_of_another_kind_are_refused(getter: str, key: str, says: str) -> None:
    with pytest.raises(FormatError) as error:
        getattr(read(GOLDEN), getter)(key)
    assert str(error.value) == f"bytes: {key}: {says}"


# ----------------------------------------------------------------- the writer's refusals

NAME = "key: expected a name of 1 to 65535 bytes, found"
TENSOR_NAME = "name of a tensor: expected a new one of 1 to 63 bytes, found"
BAD_NAMES = {
    "": "an empty one",
    "a\0": "a zero byte in 'a\\x00'",
    "a\ud800": "invalid UTF-8: 'a\\ud800'",
}
BAD_VALUES = (
    Value(ValueType.U8, 256),
    Value(ValueType.U64, -1),
    Value(ValueType.F32, 1e39),
    Value(ValueType.I32, "1"),
    Value(ValueType.STRING, 1),
    Value(ValueType.U32, [1, 1.5]),
    Value(ValueType.STRING, "\ud800"),
)
BAD_ALIGNMENTS = (
    *(Value(ValueType.U32, n) for n in (0, 3, -32)),
    *(Value(ValueType.U64, 32), Value(ValueType.U32, [32])),
)
BAD_SHAPES = ((), (1, 1, 1, 1, 1), (-1,), (1 << 32, 1 << 32), (1 << 63,))


def spec(name: str = "t", shape: tuple[int, ...] = (1,), kind: TensorType = F32) -> TensorSpec:
    return TensorSpec(name, shape, kind)


def array(value: Value) -> str:
    return "an array of " if isinstance(value.data, list) else ""


REFUSED: list[tuple[dict[str, Value], list[TensorSpec], str]] = [
    *(({n: Value(ValueType.U8, 1)}, [], f"{NAME} {found}") for n, found in BAD_NAMES.items()),
    *(({}, [spec(n)], f"{TENSOR_NAME} {found}") for n, found in BAD_NAMES.items()),
    ({}, [spec("n" * 64)], f"{TENSOR_NAME} 64 bytes: '{'n' * 64}'"),
    ({}, [spec(), spec()], f"{TENSOR_NAME} a name that occurred before: 't'"),
    *(
        ({"key": v}, [], f"key: expected {array(v)}{v.type.name}, found {v.data!s}")
        for v in BAD_VALUES
    ),
    *(
        ({ALIGNMENT_KEY: v}, [], f"{ALIGNMENT_KEY}: expected a power of two as U32, found {v}")
        for v in BAD_ALIGNMENTS
    ),
    *(
        ({}, [spec(shape=s)], f"shape of tensor 't': expected 1 to 4 {IN_RANGE}, found {[*s]}")
        for s in BAD_SHAPES
    ),
    (
        {},
        [spec(shape=(33,), kind=Q8_0)],
        "row length of tensor 't': expected a multiple of 32 for Q8_0, found 33",
    ),
]


@pytest.mark.parametrize(("metadata", "specs", "says"), REFUSED, ids=lambda value: repr(value)[:60])
def test_writer_refuses(metadata: dict[str, Value], specs: list[TensorSpec], says: str) -> None:
    with pytest.raises(FormatError) as error:
        lay_out(metadata, specs)
    assert str(error.value) == says


def test_writer_pads_nothing_without_tensors() -> None:
    """Else an alignment of 2^31, which is allowed, would take 2 GiB."""
    layout = lay_out({"general.alignment": Value(ValueType.U32, 1 << 31)}, [])
    assert layout.size == len(layout.header) == 24 + 8 + 17 + 4 + 4


# ---------------------------------------------------------------------------- round trip

KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
SCALARS: dict[ValueType, st.SearchStrategy[Any]] = {
    **{
        ValueType[f"{sign}{bits}"]: st.integers(low, high)
        for bits in (8, 16, 32, 64)
        for sign, low, high in (
            ("U", 0, (1 << bits) - 1),
            ("I", -(1 << (bits - 1)), (1 << (bits - 1)) - 1),
        )
    },
    ValueType.F32: st.floats(width=32, allow_nan=False),
    ValueType.F64: st.floats(allow_nan=False),
    ValueType.BOOL: st.booleans(),
    ValueType.STRING: st.text(st.characters(codec="utf-8")),
}


@st.composite
def values(draw: st.DrawFn) -> Value:
    kind = draw(st.sampled_from(list(SCALARS)))
    return Value(kind, draw(SCALARS[kind] | st.lists(SCALARS[kind], max_size=5)))


@st.composite
def tensor_specs(draw: st.DrawFn) -> TensorSpec:
    kind = draw(st.sampled_from(list(BY_ID.values())))
    blocks, *rest = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    return TensorSpec(draw(KEYS), (blocks * kind.block_length, *rest), kind)


@settings(deadline=None)
@given(
    st.dictionaries(KEYS.filter(lambda key: key != ALIGNMENT_KEY), values(), max_size=6),
    st.lists(tensor_specs(), max_size=5, unique_by=lambda t: t.name),
    st.sampled_from([None, 1, 8, 32, 256]),
    st.randoms(use_true_random=False),
)
def test_round_trip(
    metadata: dict[str, Value],
    tensors: list[TensorSpec],
    alignment: int | None,
    source: random.Random,
) -> None:
    if alignment is not None:
        metadata["general.alignment"] = Value(ValueType.U32, alignment)
    layout = lay_out(metadata, tensors)
    data = [source.randbytes(t.nbytes) for t in tensors]
    content = laid_out(layout, data)
    file = read(content)
    assert {key: file.value(key) for key in file.keys} == metadata
    assert list(file.keys) == list(metadata)
    assert file.alignment == (alignment or 32)
    assert [TensorSpec(t.name, t.shape, t.type) for t in file.tensors] == tensors
    assert tuple(t.offset for t in file.tensors) == layout.offsets
    assert all(t.offset % file.alignment == 0 for t in file.tensors)
    assert [content[t.offset : t.offset + t.nbytes] for t in file.tensors] == data
    assert lay_out({key: file.value(key) for key in file.keys}, tensors) == layout


# ----------------------------------------------------------------------- second opinions

NUMBERS: dict[ValueType, list[int | float | bool]] = {
    ValueType.U8: [0, 255],
    ValueType.I8: [-128, 127],
    ValueType.U16: [0, 65535],
    ValueType.I16: [-32768, 32767],
    ValueType.U32: [0, (1 << 32) - 1],
    ValueType.I32: [-(1 << 31), (1 << 31) - 1],
    ValueType.F32: [-0.5, 3.4028234663852886e38],
    ValueType.BOOL: [True, False],
    ValueType.U64: [0, (1 << 64) - 1],
    ValueType.I64: [-(1 << 63), (1 << 63) - 1],
    ValueType.F64: [5e-324, -1.5],
}
EVERY_VALUE: dict[str, Value] = {
    "general.architecture": Value(ValueType.STRING, "qwen35"),
    "general.alignment": Value(ValueType.U32, 64),
    "empty.text": Value(ValueType.STRING, ""),
    "texts": Value(ValueType.STRING, ["", "Ünï", "模型", "a" * 300]),
    **{f"one.{t.name}": Value(t, numbers[0]) for t, numbers in NUMBERS.items()},
    **{f"many.{t.name}": Value(t, numbers * 3) for t, numbers in NUMBERS.items()},
}
EVERY_TYPE = [
    TensorSpec(f"blk.{t.id}.{t.name}", (t.block_length * 2, 3, 2, 2)[: 1 + t.id % 4], t)
    for t in BY_ID.values()
]


def everything(tensors: Sequence[TensorSpec]) -> bytes:
    """A file with every type of value and of array, and random tensors."""
    source = random.Random(1)
    return laid_out(lay_out(EVERY_VALUE, tensors), [source.randbytes(t.nbytes) for t in tensors])


def ours_described(file: GgufFile) -> dict[str, Any]:
    """Describes a file like `ggml_reader.describe`."""

    def told(kind: ValueType, data: Any) -> Any:
        if kind is ValueType.STRING:  # ggml gives C's strings, which end at a zero byte
            return str(data).encode("utf-8", "surrogateescape").split(b"\0")[0].hex()
        return float(data) if kind in (ValueType.F32, ValueType.F64) else data

    keys = []
    for key in file.keys:
        value, kind = file.value(key), file.types[key]
        if isinstance(value.data, list):
            told_values = [told(value.type, v) for v in value.data]
            keys.append([key.encode().hex(), kind, value.type, told_values])
        else:
            keys.append([key.encode().hex(), kind, None, told(kind, value.data)])
    return {
        "version": file.version,
        "alignment": file.alignment,
        "data_offset": file.data_offset,
        "keys": keys,
        "tensors": [
            [
                t.name.encode().hex(),
                [*t.shape, 1, 1, 1][:4],
                t.type.id,
                t.offset - file.data_offset,
                t.nbytes,
            ]
            for t in file.tensors
        ],
    }


def ask_ggml(folder: Path, files: dict[str, bytes]) -> dict[str, Answer]:
    """What ggml says of each file."""
    paths = [folder / f"{index}.gguf" for index in range(len(files))]
    for path, data in zip(paths, files.values(), strict=True):
        path.write_bytes(data)
    return dict(zip(files, describe(paths), strict=True))


def test_ggml_refuses_the_same_files(tmp_path: Path) -> None:
    """Cases that ggml accepts are marked, to document the difference."""
    answers = ask_ggml(tmp_path, {case.name: case.data for case in CASES})
    refused = {name: answer is None for name, answer in answers.items()}
    assert refused == {case.name: case.ggml for case in CASES}


def test_ggml_reads_the_same_in_sound_files(tmp_path: Path) -> None:
    files = {name: assembled(changes) for name, changes in SOUND.items()}
    files["everything"] = everything(EVERY_TYPE)
    for name, answer in ask_ggml(tmp_path, files).items():
        assert answer == ours_described(read(files[name])), name


@pytest.mark.thorough
def test_ggml_agrees_on_every_mutant_we_take(tmp_path: Path) -> None:
    """We reject all that ggml rejects, and read accepted mutants like ggml."""
    taken = {}
    refused = 0
    source = random.Random(5)
    for index in range(3000):
        data = mutant(GOLDEN[: start_of("data 1") + 68], source)
        try:
            read(data)
        except FormatError:
            refused += 1
        else:
            taken[str(index)] = data
    assert refused > 1000
    assert len(taken) > 200
    for name, answer in ask_ggml(tmp_path, taken).items():
        assert answer == ours_described(read(taken[name])), name
