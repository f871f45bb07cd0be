"""The safetensors reader: golden bytes, malformed headers, and the reference reader."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.files.safetensors import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    SafetensorsFile,
    StoredTensor,
    open_safetensors,
    read_safetensors,
)
from support.byte_source import ByteSource
from support.golden_safetensors import (
    CASES,
    GOLDEN,
    GOLDEN_DATA,
    GOLDEN_HEADER,
    OVER,
    SOUND,
    Case,
    entry,
    with_entries,
    with_header,
)


def read(data: bytes) -> SafetensorsFile:
    return read_safetensors(ByteSource(data))


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
        "{" + "".join(f'"{i}":1,' for i in range(40_000)) + '"39999":1}',
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


@pytest.mark.parametrize("name", SOUND)
def test_takes_what_is_odd_but_sound(name: str) -> None:
    data = SOUND[name]
    theirs = {t: (d["dtype"], tuple(d["shape"])) for t, d in deserialize(data)}
    assert {t.name: (t.dtype, t.shape) for t in read(data).tensors.values()} == theirs


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


PIECES = [*rb'" { } [ ] , : 0 8 14 -1 1.0 null \ F32'.split(), b" "]


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
