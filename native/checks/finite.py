"""Finds what makes a model's logits NaN or infinite: a tensor of its file, or else a layer."""

import ctypes
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.files.tensor_types import TensorType
from mtp_gguf.gguf_tools.machine.processors import usable_cores
from mtp_gguf.gguf_tools.model import Model, open_model

from ..libraries.prototypes import declare

_CHUNK = 16 << 20  # bytes that a thread reads at a time
# llama.cpp's name of a layer's output, and the outputs that follow the last layer.
_LAYER = re.compile(r"l_out-(\d+)")
_AFTER = {
    "h_nextn": "the final norm",
    "result_norm": "the final norm",
    "result_output": "the logits",
}

_PROTOTYPES = """
const char * ggml_get_name(const struct ggml_tensor * tensor);
size_t ggml_nbytes(const struct ggml_tensor * tensor);
void ggml_backend_tensor_get(const struct ggml_tensor *, void *, size_t offset, size_t size);
bool ggml_validate_row_data(int type, const void * data, size_t nbytes);
"""


def check_weights(path: Path) -> None:
    """FormatError names the first tensor with NaN or infinity; this reads the whole file."""
    with open_model(path) as model, ThreadPoolExecutor(usable_cores()) as pool:
        names = list(model.tensors)
        for name, sound in zip(names, pool.map(partial(_is_finite, model), names), strict=True):
            if not sound:
                raise FormatError(
                    f"{path}: {name}: expected finite weights, found NaN or infinity; download or "
                    "convert the file again"
                )


def _is_finite(model: Model, name: str) -> bool:
    tensor = model.tensors[name]
    step = max(_CHUNK // tensor.type.block_bytes, 1) * tensor.type.block_bytes
    return all(
        _is_valid(tensor.type, model.read(name, start, min(step, tensor.nbytes - start)))
        for start in range(0, tensor.nbytes, step)
    )


def first_not_finite(path: Path, tokens: list[int], threads: int) -> str | None:
    """Decode tokens and return the first part of the trunk whose output is not finite, or None.

    None, too, if llama.cpp cannot load the model.
    """
    from ..runtime import llama_cpp  # noqa: PLC0415  (loads the libraries)

    found: list[str] = []

    def on_tensor(address: int, ask: bool, _: Any) -> bool:
        name = _tensor_name(address)
        layer = _LAYER.fullmatch(name)
        part = f"layer {layer[1]}" if layer else _AFTER.get(name)
        if ask:
            return part is not None
        if part is not None and not found and not np.isfinite(_tensor_values(address)).all():
            found.append(part)
        return True

    callback = llama_cpp.ggml_backend_sched_eval_callback(on_tensor)
    of_model = llama_cpp.llama_model_default_params()
    of_model.load_mtp = of_model.use_extra_bufts = False
    of_context = llama_cpp.llama_context_default_params()
    of_context.n_ctx = of_context.n_batch = of_context.n_ubatch = max(64, len(tokens))
    of_context.n_threads = of_context.n_threads_batch = threads
    of_context.cb_eval = callback
    with ExitStack() as stack:
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), of_model)
        if not model:
            return None
        stack.callback(llama_cpp.llama_model_free, model)
        context = llama_cpp.llama_init_from_model(model, of_context)
        if not context:
            return None
        stack.callback(llama_cpp.llama_free, context)
        batch = (ctypes.c_int32 * len(tokens))(*tokens)
        llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(batch, len(tokens)))
    return found[0] if found else None


@cache
def _library() -> ctypes.CDLL:
    """Return the libggml-base that llama_cpp has loaded, with declared functions."""
    from ..runtime import loaded_library  # noqa: PLC0415  (loads the libraries)

    return declare(ctypes.CDLL(str(loaded_library("ggml-base"))), _PROTOTYPES)


def _tensor_name(address: int) -> str:
    """The name of a ggml_tensor."""
    name: bytes = _library().ggml_get_name(address)
    return name.decode(errors="replace")


def _tensor_values(address: int) -> NDArray[np.float32]:
    """The values of a contiguous ggml_tensor in F32, copied from its device; no shape."""
    lib = _library()
    out = np.empty(lib.ggml_nbytes(address) // 4, np.float32)
    lib.ggml_backend_tensor_get(address, out.ctypes.data, 0, out.nbytes)
    return out


def _is_valid(kind: TensorType, data: bytes) -> bool:
    """Whether whole blocks of `kind` are free of NaN and infinity; ggml prints what it found."""
    source = np.frombuffer(data, np.uint8)
    return bool(_library().ggml_validate_row_data(kind.id, source.ctypes.data, source.nbytes))
