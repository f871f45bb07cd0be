"""llama.cpp's quantizer, with its log captured for the error message."""

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.tensor_types import TensorType
from mtp_gguf.native.checks.subprocesses import run_module


class QuantizeError(Exception):
    """llama.cpp's quantizer failed; the message is the last error in its log."""


def quantize_file(
    source: Path,
    target: Path,
    file_type: int,
    overrides: Sequence[tuple[str, TensorType]] = (),
    imatrix: Mapping[str, NDArray[np.float32]] | None = None,
) -> None:
    """Write `source` (GGUF in F32, F16 or BF16) to `target` at the llama_ftype `file_type`.

    overrides: regular expressions (C++ std::regex, searched) with the type of matching tensors.
    imatrix: importance by tensor name, with row length times experts values each.
    """
    from mtp_gguf.native.runtime import llama_cpp  # noqa: PLC0415  (loads the libraries)

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = file_type
    patterns = (llama_cpp.llama_cpp.llama_model_tensor_override * (len(overrides) + 1))()
    for slot, (pattern, kind) in zip(patterns, overrides, strict=False):
        slot.pattern, slot.type = pattern.encode(), kind.id
    params.tt_overrides = patterns
    entries = (llama_cpp.llama_cpp.llama_model_imatrix_data * (len(imatrix or {}) + 1))()
    arrays = []  # must outlive the call
    for slot, (name, weights) in zip(entries, (imatrix or {}).items(), strict=False):
        data = np.ascontiguousarray(weights, np.float32).reshape(-1)
        arrays.append(data)
        slot.name, slot.size = name.encode(), data.size
        slot.data = data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if imatrix:
        params.imatrix = entries
    with _captured_log() as log:
        status = llama_cpp.llama_model_quantize(
            os.fsencode(source), os.fsencode(target), ctypes.byref(params)
        )
    if status:
        lines = [line for line in "".join(log).splitlines() if "failed to quantize" in line]
        raise QuantizeError(
            lines[-1].partition("failed to quantize: ")[2] if lines else "no reason"
        )


def quantize_file_in_subprocess(source: Path, target: Path, file_type: int) -> None:
    """Run `quantize_file` in a subprocess, for files with unchecked metadata.

    llama.cpp aborts the process on some invalid metadata; that too raises a QuantizeError here.
    """
    words = (str(source.absolute()), str(target.absolute()), str(file_type))
    done = run_module("mtp_gguf.quantize.upstream", *words)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason"]
        failed = next((line for line in lines if "GGML_ASSERT" in line), lines[-1])
        raise QuantizeError(failed.strip())


@contextmanager
def _captured_log() -> Iterator[list[str]]:
    """Capture what llama.cpp logs inside `with`, instead of printing it to standard error."""
    from mtp_gguf.native.runtime import llama_cpp  # noqa: PLC0415

    log: list[str] = []

    def capture(_level: int, text: bytes, _data: ctypes.c_void_p) -> None:
        log.append(text.decode("utf-8", "replace"))

    callback = llama_cpp.llama_log_callback(capture)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        yield log
    finally:
        llama_cpp.llama_log_set(llama_cpp._logger.llama_log_callback, ctypes.c_void_p(0))


def main() -> None:
    """Run `quantize_file` with the command line's words; exit with the reason if it fails."""
    source, target, file_type = sys.argv[1:]
    try:
        quantize_file(Path(source), Path(target), int(file_type))
    except QuantizeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
