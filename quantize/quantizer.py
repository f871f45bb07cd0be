"""Python functions over libmtp_quantize; include/mtp_quantize.h documents its contract.

All functions release the GIL while they run and may be called from several threads.
"""

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.tensor_types import BF16, F16, F32, TensorType

_API_VERSION = 1
_OK = 0
_REASONS = {
    1: "not a type that can be quantized",
    2: "the row length is not a multiple of the block size",
    3: "it needs importance weights (an imatrix), found none",
    4: "MTP_QUANTIZE_TARGET: expected one of {targets}",
    5: "out of memory",
}

_PROTOTYPES = """
int32_t mtp_quantize_api_version(void);
int mtp_quantize_rows(int32_t type, int32_t source_type, const void * rows, int64_t n_rows,
    int64_t row_length, const void * importance, void * out, int64_t * n_not_finite);
const char * mtp_quantize_kernel(int32_t type, bool with_importance);
const char * mtp_quantize_targets(void);
"""


@cache
def _library() -> ctypes.CDLL:
    """Load libmtp_quantize, linked to the ggml that llama_cpp has loaded."""
    from mtp_gguf.native.libraries.prototypes import declare  # noqa: PLC0415
    from mtp_gguf.native.runtime import native_library  # noqa: PLC0415  (loads the libraries)

    lib = declare(ctypes.CDLL(str(native_library("mtp_quantize"))), _PROTOTYPES)
    found = lib.mtp_quantize_api_version()
    if found != _API_VERSION:
        raise ImportError(f"libmtp_quantize: expected version {_API_VERSION}, found {found}")
    return lib


def targets() -> list[str]:
    """Return the instruction sets available here, best first; the last is always "ggml".

    The environment variable MTP_QUANTIZE_TARGET, read once, forces one of them.
    """
    return str(_library().mtp_quantize_targets().decode()).split()


def kernel(kind: TensorType, with_importance: bool) -> str:
    """Return what quantizes this type here: an instruction set, or "ggml" or "ggml: reason"."""
    return str(_library().mtp_quantize_kernel(kind.id, with_importance).decode())


def quantize_rows(
    kind: TensorType,
    rows: NDArray[Any],
    weights: NDArray[np.float32] | None = None,
    *,
    count_not_finite: bool = True,
) -> tuple[NDArray[np.uint8], int]:
    """Quantize F32, F16 or BF16 rows (n, row length) to `kind`; shape (n, bytes of a row).

    weights: importance of each column (row length), or None. The second result is the number of
    blocks that contain NaN or infinity, whose bytes are undefined; without `count_not_finite` it is
    0 and ggml quantizes such blocks. ValueError if shapes or types do not match.
    """
    source = {"float32": F32, "float16": F16, "bfloat16": BF16}.get(rows.dtype.name)
    if source is None or rows.ndim != 2:
        raise ValueError(f"expected rows of F32, F16 or BF16, found {rows.dtype} {rows.shape}")
    count, length = rows.shape
    rows = np.ascontiguousarray(rows)
    out = np.empty((count, kind.row_bytes(length)), np.uint8)
    if weights is not None:
        weights = np.ascontiguousarray(weights, np.float32)
        if weights.shape != (length,):
            raise ValueError(f"expected {length} importance weights, found {weights.shape}")
    not_finite = ctypes.c_int64(0)
    status = _library().mtp_quantize_rows(
        kind.id,
        source.id,
        rows.ctypes.data,
        count,
        length,
        None if weights is None else weights.ctypes.data,
        out.ctypes.data,
        ctypes.byref(not_finite) if count_not_finite else None,
    )
    if status != _OK:
        reason = _REASONS.get(status, f"status {status}").format(targets=", ".join(targets()))
        raise ValueError(f"{kind.name} from {source.name} {list(rows.shape)}: {reason}")
    return out, not_finite.value
