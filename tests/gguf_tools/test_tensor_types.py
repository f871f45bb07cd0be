"""The table of tensor types against the linked libggml."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.files.tensor_types import BY_ID, BY_NAME, TensorType
from support.ggml_reader import ggml_base


def type_count() -> int:
    """GGML_TYPE_COUNT, from the headers that are installed beside the library."""
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    header = Path(spec.origin).parents[1] / "include" / "ggml.h"
    match = re.search(r"GGML_TYPE_COUNT\s*=\s*(\d+)", header.read_text())
    assert match is not None
    return int(match[1])


def ggml_type(number: int) -> TensorType | None:
    """What libggml says of a type; None for a number that has been retired."""
    library = ggml_base()
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_blck_size.restype = ctypes.c_int64
    library.ggml_type_size.restype = ctypes.c_size_t
    length, size = library.ggml_blck_size(number), library.ggml_type_size(number)
    if not length or not size:
        return None
    return TensorType(number, library.ggml_type_name(number).decode().upper(), length, size)


@pytest.mark.parametrize("number", range(type_count()))
def test_table_is_ggmls(number: int) -> None:
    assert BY_ID.get(number) == ggml_type(number)


def test_no_type_beyond_ggmls() -> None:
    assert max(BY_ID) < type_count()


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(BY_ID)


@pytest.mark.parametrize(
    ("name", "length", "size"),
    [("F32", 5, 20), ("BF16", 3, 6), ("Q8_0", 64, 68), ("Q4_K", 512, 288), ("I64", 1, 8)],
)
def test_row_bytes(name: str, length: int, size: int) -> None:
    assert BY_NAME[name].row_bytes(length) == size
    assert BY_NAME[name].is_quantized == (name in ("Q8_0", "Q4_K"))
