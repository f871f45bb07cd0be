"""Upstream's own two steps: convert_hf_to_gguf.py in a process of its own, then llama-quantize.

The first needs torch and transformers (converter_pool.py). The second is no program here:
llama-quantize parses its arguments and calls `llama_model_quantize` of libllama, so this calls the
same function of the libllama that llama_cpp ships, with arguments prepared as
tools/quantize/quantize.cpp does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, LlamaFileType

from mtp_gguf.native.runtime import llama_cpp

from .converter_pool import UpstreamError, pool
from .sdist import PIN

QUANTIZE_THREADS = 2


def convert(
    folder: Path,
    out: Path,
    outtype: str,
    flags: Sequence[str] = (),
    pre: str | None = "qwen35",
    base: str = PIN,
) -> Path:
    """Run convert_hf_to_gguf.py on a checkpoint: `--outtype f32|f16|bf16`, further flags as given.

    `pre` is the pre-tokenizer to claim for the vocabulary; None leaves upstream to recognise it.
    `base` is the version of llama.cpp. UpstreamError carries what was printed.
    """
    return pool(base).convert(folder, out, outtype, flags, pre)


def load_imatrix(path: Path) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Read a GGUF imatrix as llama-quantize does: sums over counts, or ones."""
    tensors = {t.name: np.array(t.data, np.float32) for t in GGUFReader(path).tensors}
    entries = {}
    for name in (n.removesuffix(".in_sum2") for n in tensors if n.endswith(".in_sum2")):
        counts = tensors[name + ".counts"].reshape(-1, 1)
        sums = tensors[name + ".in_sum2"].reshape(len(counts), -1)
        mean = np.where(counts > 0, sums / np.where(counts > 0, counts, np.float32(1)), 1)
        entries[name] = mean.astype(np.float32).reshape(-1)
    return entries


# What libllama says goes here, so that a failure can be explained and success stays silent.
_messages: list[str] = []


def _keep_message(_level: int, text: bytes, _user_data: object) -> None:
    _messages.append(text.decode(errors="replace"))


_LOG_CALLBACK = llama_cpp.llama_log_callback(_keep_message)


def quantize(
    source: Path,
    out: Path,
    ftype: str,
    tensor_types: Sequence[tuple[str, str]] = (),
    imatrix: Path | None = None,
) -> Path:
    """Quantize a GGUF file as `llama-quantize [--tensor-type REGEX=TYPE]... [--imatrix] ...` does.

    The name of the imatrix file goes into the metadata without its folder, as if called there.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = QUANTIZE_THREADS
    params.ftype = LlamaFileType["ALL_F32" if ftype == "F32" else f"MOSTLY_{ftype}"].value

    overrides = (llama_cpp.llama_model_tensor_override * (len(tensor_types) + 1))()
    for slot, (pattern, kind) in zip(overrides, tensor_types, strict=False):
        slot.pattern, slot.type = pattern.lower().encode(), GGMLQuantizationType[kind].value
    if tensor_types:
        params.tt_overrides = overrides

    entries = load_imatrix(imatrix) if imatrix else {}
    data = (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))()
    for entry, (name, values) in zip(data, entries.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    keys = (llama_cpp.llama_model_kv_override * 5)()  # the last one ends the list
    if imatrix:
        fields = {f.name: f for f in GGUFReader(imatrix).fields.values()}
        dataset = fields["imatrix.datasets"].contents()[0]
        chunks = int(fields["imatrix.chunk_count"].contents())
        text: dict[str, str] = {"file": imatrix.name, "dataset": dataset}
        number: dict[str, int] = {"entries_count": len(entries), "chunks_count": chunks}
        for slot, key in zip(keys, [*text, *number], strict=False):
            slot.key = f"quantize.imatrix.{key}".encode()
            if key in text:
                slot.tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR
                slot.value.val_str = text[key].encode()
            else:
                slot.tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT
                slot.value.val_i64 = number[key]
        params.imatrix, params.kv_overrides = data, keys

    _messages.clear()
    llama_cpp.llama_log_set(_LOG_CALLBACK, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), params)
    if code:
        raise UpstreamError(f"{source.name} to {ftype}: {''.join(_messages[-10:])}")
    return out
