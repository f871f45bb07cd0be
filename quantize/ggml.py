"""The ggml functions that the converter calls, from the library that llama_cpp has loaded.

All take contiguous NumPy arrays and release the GIL while they run. llama_cpp is imported at the
first call, not with this module.
"""

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.tensor_types import BF16, F16, F32, TensorType

from .quantizer import quantize_rows


class GgmlError(Exception):
    """ggml rejected its input; the message says what the input was."""


class _TypeTraits(ctypes.Structure):
    """struct ggml_type_traits of ggml.h."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        # void (*)(const void * x, float * y, int64_t k);
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    )


_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)

_PROTOTYPES = """
void ggml_quantize_init(int type);
bool ggml_quantize_requires_imatrix(int type);
bool ggml_validate_row_data(int type, const void * data, size_t nbytes);
void ggml_fp16_to_fp32_row(const void * x, void * y, int64_t n);
void ggml_bf16_to_fp32_row(const void * x, void * y, int64_t n);
const ggml_type_traits * ggml_get_type_traits(int type);
"""


@cache
def _library() -> ctypes.CDLL:
    """Return the libggml-base that llama_cpp has loaded, with declared functions."""
    from mtp_gguf.native.libraries.prototypes import declare  # noqa: PLC0415
    from mtp_gguf.native.runtime import loaded_library  # noqa: PLC0415  (loads the libraries)

    library = ctypes.CDLL(str(loaded_library("ggml-base")))
    return declare(library, _PROTOTYPES, {"ggml_type_traits": _TypeTraits})


def prepare(kind: TensorType) -> None:
    """Build ggml's tables for a type; call once before quantizing from several threads."""
    _library().ggml_quantize_init(kind.id)


def needs_importance(kind: TensorType) -> bool:
    """Whether ggml requires importance weights to quantize to this type."""
    return bool(_library().ggml_quantize_requires_imatrix(kind.id))


def to_f32(rows: NDArray[Any]) -> NDArray[np.float32]:
    """Convert F32, F16 or BF16 rows to F32; F32 rows are returned unchanged."""
    if rows.dtype == np.float32:
        return rows
    function = "ggml_fp16_to_fp32_row" if rows.dtype == np.float16 else "ggml_bf16_to_fp32_row"
    rows = np.ascontiguousarray(rows)
    out = np.empty(rows.shape, np.float32)
    getattr(_library(), function)(rows.ctypes.data, out.ctypes.data, rows.size)
    return out


def is_finite(rows: NDArray[Any]) -> bool:
    """Whether F32, F16 or BF16 rows are free of NaN and infinity."""
    if rows.dtype == np.float32:
        return bool(np.isfinite(rows).all())
    exponent = np.uint16(0x7C00 if rows.dtype == np.float16 else 0x7F80)
    bits = rows.view(np.uint16)
    return not ((bits & exponent) == exponent).any()


def quantize(
    kind: TensorType, rows: NDArray[Any], weights: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Quantize F32, F16 or BF16 rows (n, row length) to `kind`; shape (n, bytes of a row).

    The bytes equal those of ggml_quantize_chunk; quantizer.py computes them faster. weights:
    importance of each column (row length), or None. GgmlError if the rows contain NaN, infinity or
    values too large for the type.
    """
    lib = _library()
    if kind in (F16, BF16):
        weights = None
    elif weights is None and lib.ggml_quantize_requires_imatrix(kind.id):
        raise GgmlError(f"{kind.name} needs importance weights (an imatrix), found none")
    try:
        out, not_finite = quantize_rows(kind, rows, weights)
    except ValueError as error:
        raise GgmlError(str(error)) from None
    if not_finite:
        raise GgmlError("expected finite weights, found NaN or infinity")
    if not lib.ggml_validate_row_data(kind.id, out.ctypes.data, out.nbytes):
        if not is_finite(rows):
            raise GgmlError("expected finite weights, found NaN or infinity")
        largest = float(np.abs(to_f32(rows)).max())
        raise GgmlError(f"values of up to {largest:g} are too large for {kind.name}")
    return out


def dequantize(kind: TensorType, data: bytes) -> NDArray[np.float32]:
    """Decode whole blocks of `kind` with ggml.

    GgmlError for types that ggml does not decode, such as integers.
    """
    if len(data) % kind.block_bytes:
        raise GgmlError(
            f"expected whole blocks of {kind.block_bytes} bytes for {kind.name}, found {len(data)}"
        )
    if kind is F32:
        return np.frombuffer(data, "<f4").astype(np.float32)
    count = len(data) // kind.block_bytes * kind.block_length
    decode = _decoder(kind)
    out = np.empty(count, np.float32)
    source = np.frombuffer(data, np.uint8)
    decode(source.ctypes.data, out.ctypes.data, count)
    return out


@cache
def _decoder(kind: TensorType) -> Any:
    traits = _library().ggml_get_type_traits(kind.id).contents
    sizes = (traits.blck_size, traits.type_size)
    if not traits.to_float or sizes != (kind.block_length, kind.block_bytes):
        raise GgmlError(f"ggml does not decode {kind.name}")
    return _ToFloat(traits.to_float)
