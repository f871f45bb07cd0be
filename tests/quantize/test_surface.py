"""The C API of the quantizer: refused arguments, and reports of NaN and infinity."""

from __future__ import annotations

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME, TensorType
from mtp_gguf.quantize import ggml, quantizer
from support.quantize.cases import KINDS, SOURCES, rows_of, weights_of

Q4_K = BY_NAME["Q4_K"]


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "text"),
    [
        (
            "Q4_K",
            (1, 255),
            np.float32,
            r"Q4_K from F32 \[1, 255\]: the row length is not a multiple",
        ),
        ("Q4_K", (256,), np.float32, "expected rows of F32, F16 or BF16, found float32"),
        ("Q4_K", (1, 256), np.float64, "expected rows of F32, F16 or BF16, found float64"),
        ("Q8_K", (1, 256), np.float32, "not a type that can be quantized"),
        ("I32", (1, 256), np.float32, "not a type that can be quantized"),
        ("IQ2_XXS", (1, 256), np.float32, "it needs importance weights"),
    ],
)
def test_refusals(kind: str, shape: tuple[int, ...], dtype: type, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        quantizer.quantize_rows(BY_NAME[kind], np.zeros(shape, dtype))


def test_number_of_weights() -> None:
    with pytest.raises(ValueError, match="expected 256 importance weights, found"):
        quantizer.quantize_rows(Q4_K, np.zeros((1, 256), np.float32), weights_of(512))


@pytest.mark.parametrize("shape", [(0, 256), (3, 0)])
def test_nothing_to_do(shape: tuple[int, int]) -> None:
    out, count = quantizer.quantize_rows(Q4_K, np.zeros(shape, np.float32))
    assert out.size == count == 0


@pytest.mark.parametrize("kind", [*KINDS, BY_NAME["Q5_0"]], ids=lambda kind: kind.name)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite(kind: TensorType, source: str, value: float) -> None:
    """Blocks with such values are counted wherever the value lies, and ggml.quantize() refuses."""
    rows = rows_of("normal", source, (40, 1024))
    assert quantizer.quantize_rows(kind, rows)[1] == 0
    for block, place in [(0, 0), (7, kind.block_length - 1), (9, 13)]:
        rows.reshape(-1)[block * kind.block_length + place] = value
    assert quantizer.quantize_rows(kind, rows)[1] == 3
    with pytest.raises(ggml.GgmlError, match="NaN or infinity"):
        ggml.quantize(kind, rows)


def test_too_large() -> None:
    """A scale beyond F16 is infinite in the block, which ggml calls invalid."""
    rows = np.full((1, 256), 1e30, np.float32)
    with pytest.raises(ggml.GgmlError, match=r"up to 1e\+30 are too large"):
        ggml.quantize(Q4_K, rows)
