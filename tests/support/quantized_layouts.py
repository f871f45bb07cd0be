"""Matrices in the storage layouts of common quantizers, the same bytes on every machine.

Each entry of `LAYOUTS` gives the tensors that store one matrix, and the configs that describe
them. Values are rounded plainly; the tests are about where numbers are stored. `real_tools/`
compares with what the quantizers themselves write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F32 = NDArray[np.float32]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@dataclass(frozen=True)
class Layout:
    """store: the tensors of a matrix by the suffix behind the module's name (`….q_proj`).

    config: the quantization_config. beside: hf_quant_config.json. head: whether that of the model
    is quantized too.
    """

    store: Callable[[F32], dict[str, Array]]
    config: dict[str, Any]
    beside: dict[str, Any] = field(default_factory=dict)
    head: bool = False
    kept: bool = False  # the blocks go into the GGUF as they are


def _largest(values: F32, axis: int) -> F32:
    found: F32 = np.maximum(np.abs(values).max(axis=axis, keepdims=True), np.float32(1e-6))
    return found


def _packed(values: Array, bits: int) -> Array:
    """Values of `bits` bits in words of 32 along the last dimension, the lowest first."""
    per_word = 32 // bits
    padding = -values.shape[-1] % per_word
    padded = np.pad(values.astype(np.uint32), [*[(0, 0)] * (values.ndim - 1), (0, padding)])
    words = padded.reshape(*values.shape[:-1], -1, per_word)
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(words << shifts, axis=-1).view(np.int32)


def _fp8(
    scales: Callable[[F32], F32], suffix: str, dtype: Any
) -> Callable[[F32], dict[str, Array]]:
    def store(weight: F32) -> dict[str, Array]:
        scale = (scales(weight) / np.float32(448)).astype(dtype)
        values = (weight / scale.astype(np.float32)).clip(-448, 448).astype(E4M3)
        return {".weight": values, suffix: scale}

    return store


def _tensor_scale(weight: F32) -> F32:
    found: F32 = _largest(weight.reshape(1, -1), 1).reshape(())
    return found


def _int8(weight: F32) -> dict[str, Array]:
    scale = (_largest(weight, 1) / np.float32(127)).astype(BF16)
    values = np.rint(weight / scale.astype(np.float32)).clip(-128, 127).astype(np.int8)
    return {".weight": values, ".weight_scale": scale}


def _grouped(
    weight: F32, size: int, bits: int, symmetric: bool, dtype: Any
) -> tuple[Array, Array, Array]:
    """Values from 0, scales and zero points [rows, groups] of groups along the row."""
    groups = weight.reshape(len(weight), -1, size)
    top = (1 << bits) - 1
    low, high = groups.min(axis=2), groups.max(axis=2)
    if symmetric:
        high = np.maximum(np.abs(low), np.abs(high))
        low = -high
    scale = ((high - low) / np.float32(top)).astype(dtype)
    step = scale.astype(np.float32)
    zeros = (
        np.rint(-low / step).clip(0, top) if not symmetric else np.full_like(step, (top + 1) / 2)
    )
    values = np.rint(groups / step[:, :, None] + zeros[:, :, None]).clip(0, top)
    return values.astype(np.uint32).reshape(weight.shape), scale, zeros.astype(np.uint32)


def _pack_quantized(size: int, symmetric: bool) -> Callable[[F32], dict[str, Array]]:
    def store(weight: F32) -> dict[str, Array]:
        values, scale, zeros = _grouped(weight, size, 4, symmetric, BF16)
        tensors = {
            ".weight_packed": _packed(values, 4),
            ".weight_scale": scale,
            ".weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            points = np.ascontiguousarray(_packed(np.ascontiguousarray(zeros.T), 4).T)
            tensors[".weight_zero_point"] = points
        return tensors

    return store


def _gptq(bits: int, size: int, offset: int, act_order: bool) -> Callable[[F32], dict[str, Array]]:
    def store(weight: F32) -> dict[str, Array]:
        inputs = weight.shape[1]
        order = np.arange(inputs)
        if act_order:  # groups of inputs that are no neighbours
            order = (order * 37 + 11) % inputs if inputs % 37 else order[::-1]
        groups = np.empty(inputs, np.int32)
        groups[order] = np.arange(inputs) // size
        sorted_values, scale, zeros = _grouped(weight[:, order], size, bits, False, np.float16)
        values = np.empty_like(sorted_values)
        values[:, order] = sorted_values
        zeros = np.maximum(zeros, offset) - offset  # stored less one in the first version
        return {
            ".qweight": np.ascontiguousarray(_packed(values, bits).T),
            ".qzeros": _packed(np.ascontiguousarray(zeros.T), bits),
            ".scales": np.ascontiguousarray(scale.T),
            ".g_idx": groups,
        }

    return store


def _nvfp4(names: tuple[str, str, str, str], inverted: bool) -> Callable[[F32], dict[str, Array]]:
    def store(weight: F32) -> dict[str, Array]:
        second = np.float32(_tensor_scale(weight) / np.float32(6 * 448))
        groups = weight.reshape(len(weight), -1, 16)
        scale = (_largest(groups, 2)[..., 0] / np.float32(6) / second).clip(0, 448).astype(E4M3)
        step = scale.astype(np.float32)[..., None] * second
        scaled = np.abs(groups) / np.where(step > 0, step, np.float32(1))
        codes = np.abs(scaled[..., None] - E2M1).argmin(axis=-1).astype(np.uint8)
        codes |= (np.signbit(groups).astype(np.uint8) << 3).astype(np.uint8)
        pairs = codes.reshape(len(weight), -1, 2)
        one = np.float32(1) / second if inverted else second
        inputs = np.array([768 if inverted else 0.0125], np.float32)
        return {
            names[0]: (pairs[..., 0] | (pairs[..., 1] << 4)).astype(np.uint8),
            names[1]: scale,
            names[2]: np.array([one], np.float32) if inverted else np.array(one, np.float32),
            names[3]: inputs if inverted else inputs.reshape(()),
        }

    return store


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"observer": "minmax", **weights}}
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _gptq_config(bits: int, size: int, form: str) -> dict[str, Any]:
    return {
        "bits": bits,
        "checkpoint_format": form,
        "desc_act": True,
        "group_size": size,
        "lm_head": False,
        "quant_method": "gptq",
        "sym": False,
    }


LAYOUTS: dict[str, Layout] = {
    "fp8-tensor": Layout(
        _fp8(_tensor_scale, ".weight_scale_inv", np.float32),
        {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": None},
        head=True,
    ),
    "compressed-fp8": Layout(
        _fp8(lambda weight: _largest(weight, 1), ".weight_scale", BF16),
        _compressed("float-quantized", num_bits=8, strategy="channel", type="float"),
        head=True,
    ),
    "compressed-int8": Layout(
        _int8, _compressed("int-quantized", num_bits=8, strategy="channel", type="int")
    ),
    "compressed-w4a16": Layout(
        _pack_quantized(64, symmetric=True),
        _compressed("pack-quantized", num_bits=4, group_size=64, strategy="group", type="int"),
    ),
    "compressed-w4a16-asymmetric": Layout(
        _pack_quantized(32, symmetric=False),
        _compressed(
            "pack-quantized",
            num_bits=4,
            group_size=32,
            strategy="group",
            symmetric=False,
            type="int",
        ),
        head=True,
    ),
    "gptq-4": Layout(_gptq(4, 64, 1, act_order=True), _gptq_config(4, 64, "gptq")),
    "gptq-8-v2": Layout(
        _gptq(8, 32, 0, act_order=False), _gptq_config(8, 32, "gptq_v2"), head=True
    ),
    "modelopt-fp8": Layout(
        _fp8(_tensor_scale, ".weight_scale", np.float32),
        {"quant_algo": "FP8", "quant_method": "modelopt"},
    ),
    "modelopt-nvfp4": Layout(
        _nvfp4((".weight", ".weight_scale", ".weight_scale_2", ".input_scale"), inverted=False),
        {},
        beside={
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["mtp*"]},
        },
        kept=True,
    ),
    "modelopt-w4a16-nvfp4": Layout(
        _nvfp4((".weight", ".weight_scale", ".weight_scale_2", ".input_scale"), inverted=False),
        {"quant_algo": "W4A16_NVFP4", "quant_method": "modelopt"},
        kept=True,
    ),
    "compressed-nvfp4": Layout(
        _nvfp4(
            (
                *(".weight_packed", ".weight_scale"),
                *(".weight_global_scale", ".input_global_scale"),
            ),
            inverted=True,
        ),
        _compressed(
            "nvfp4-pack-quantized", num_bits=4, group_size=16, strategy="tensor_group", type="float"
        ),
        kept=True,
    ),
}
