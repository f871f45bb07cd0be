"""The few functions of ggml that the converter calls, from the library that llama_cpp has loaded.

All take contiguous NumPy arrays and release the GIL while they work. llama_cpp is imported at the
first call, not with this module.
"""

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.tensor_types import BF16, F16, TensorType


class GgmlError(Exception):
    """ggml refused its input; the text says what it was given."""


@cache
def _library() -> ctypes.CDLL:
    """libggml-base as llama_cpp loaded it, with typed functions."""
    import llama_cpp  # noqa: PLC0415  (loads the libraries)

    folder = Path(getattr(llama_cpp.llama_cpp, "_base_path", Path(llama_cpp.__file__).parent / "lib"))
    names = {"darwin": "libggml-base.dylib", "win32": "ggml-base.dll"}
    lib = ctypes.CDLL(str(folder / names.get(sys.platform, "libggml-base.so")))
    # size_t ggml_quantize_chunk(enum ggml_type type, const float * src, void * dst,
    #     int64_t start, int64_t nrows, int64_t n_per_row, const float * imatrix);
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    # void ggml_quantize_init(enum ggml_type type);
    lib.ggml_quantize_init.restype = None
    lib.ggml_quantize_init.argtypes = [ctypes.c_int]
    # bool ggml_quantize_requires_imatrix(enum ggml_type type);
    lib.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    lib.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    # bool ggml_validate_row_data(enum ggml_type type, const void * data, size_t nbytes);
    lib.ggml_validate_row_data.restype = ctypes.c_bool
    lib.ggml_validate_row_data.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    # void ggml_fp16_to_fp32_row(const ggml_fp16_t *, float *, int64_t);  bf16 likewise
    for name in ("ggml_fp16_to_fp32_row", "ggml_bf16_to_fp32_row"):
        function = getattr(lib, name)
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return lib


def prepare(kind: TensorType) -> None:
    """Build ggml's tables for a type; call once before quantizing from several threads."""
    _library().ggml_quantize_init(kind.id)


def to_f32(rows: NDArray[Any]) -> NDArray[np.float32]:
    """F32, F16 or BF16 rows as F32; F32 rows come back as they are."""
    if rows.dtype == np.float32:
        return rows
    function = "ggml_fp16_to_fp32_row" if rows.dtype == np.float16 else "ggml_bf16_to_fp32_row"
    rows = np.ascontiguousarray(rows)
    out = np.empty(rows.shape, np.float32)
    getattr(_library(), function)(rows.ctypes.data, out.ctypes.data, rows.size)
    return out


def quantize(
    kind: TensorType, rows: NDArray[np.float32], weights: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Rows (n, row length) in the blocks of `kind`, shape (n, bytes of a row).

    weights: importance of each column (row length), or None. GgmlError when the result holds
    values that ggml calls invalid, which NaN or infinity in the input causes.
    """
    lib = _library()
    count, length = rows.shape
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.empty((count, kind.row_bytes(length)), np.uint8)
    importance = None
    if weights is not None and kind not in (F16, BF16):
        weights = np.ascontiguousarray(weights, np.float32)
        if weights.shape != (length,):
            raise GgmlError(f"expected {length} importance weights, found {weights.shape}")
        importance = weights.ctypes.data
    elif lib.ggml_quantize_requires_imatrix(kind.id):
        raise GgmlError(f"{kind.name} needs importance weights (an imatrix), found none")
    if kind.is_quantized and not np.isfinite(rows).all():
        raise GgmlError("expected finite weights, found NaN or infinity")
    lib.ggml_quantize_chunk(
        kind.id, rows.ctypes.data, out.ctypes.data, 0, count, length, importance
    )
    if not lib.ggml_validate_row_data(kind.id, out.ctypes.data, out.nbytes):
        raise GgmlError(f"expected valid {kind.name} blocks, found NaN or infinity in them")
    return out
