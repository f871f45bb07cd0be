"""Quantized checkpoints: the table of schemes, and how their tensors form weights.

`weights_of` groups the tensors of a checkpoint into weights, named as in the model, for all
schemes. The supported schemes are those of llama.cpp's converter. Any other scheme is an error that
names it, but only if one of its tensors is needed: many quantized checkpoints keep the head in 16
bits, and it can then be converted from them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from mtp_gguf.gguf_tools.errors import CheckpointError

from .checkpoint import PlacedTensor, Quantization, canonical_name
from .config import is_whole
from .ways_out import way_out
from .weights import (
    PLAIN_DTYPES,
    GptqWeight,
    Mxfp4Weight,
    Nvfp4Weight,
    PackedWeight,
    PlainWeight,
    ScaledWeight,
    Weight,
)

Tensors: TypeAlias = Mapping[str, PlacedTensor]

# Scales of activations and of the KV cache, which are not part of any weight.
_ACTIVATIONS = (
    *(".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"),
    *(".activation_scale", "_activation_scale", ".k_scale", ".v_scale", ".q_scale"),
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
ACTIVATION_NOTE = "a scale of activations, which weights do not need"


@dataclass
class Weights:
    """The weights of a checkpoint by name, and unused tensors with the reason."""

    by_name: dict[str, Weight] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)


class _UnsupportedError(Exception):
    """A scheme, or a variant of one, that is not supported; the text names it."""


Finder: TypeAlias = Callable[[Tensors, str], Weight | None]
"""Returns the weight of a tensor, made from it and its companions, such as scales.

Called with all tensors of the checkpoint and the name of one; None if that tensor is a companion.
"""
Reader: TypeAlias = Callable[["_Config"], Finder]


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme.

    name: its name in messages. method: `quant_method` in config.json. format: `format` or
    `quant_algo` there, if it matters. reader: None if the scheme is not supported.
    """

    name: str
    method: str
    formats: tuple[str, ...] = ()
    reader: Reader | None = None


class _Config:
    """Access to an untrusted quantization_config, where anything may be missing or of any type."""

    def __init__(self, quantization: Quantization) -> None:
        self.where = quantization.where
        self.values = quantization.config

    def text(self, key: str) -> str:
        """A string in lower case; empty if the value is missing or of another type."""
        value = self.values.get(key)
        return value.lower() if isinstance(value, str) else ""

    def objects(self, key: str) -> list[Mapping[str, Any]]:
        """The objects among the values of the object under `key`."""
        value = self.values.get(key)
        return [v for v in value.values() if isinstance(v, dict)] if isinstance(value, dict) else []

    def fault(self, key: str, expected: str, found: object) -> CheckpointError:
        """An error about a key, for the caller to raise."""
        return CheckpointError(f"{self.where}: {key}: expected {expected}, found {found!r:.80}")


def weights_of(tensors: Tensors) -> Weights:
    """Group `tensors` into weights, each by the scheme of the checkpoint it comes from.

    Tensors of unsupported schemes are kept as plain weights; `check_schemes` reports those that
    are needed.
    """
    found = Weights()
    finders: dict[Quantization | None, Finder | None] = {None: None}
    for name, tensor in tensors.items():
        source = tensor.quantization
        if source is not None and source not in finders:
            unsupported = unsupported_reason(source)
            finders[source] = None if unsupported else _reader(_Config(source))
        finder = finders[source]
        if finder is None:
            found.by_name[name] = PlainWeight(name, tensor)
        elif name.endswith(_ACTIVATIONS):
            found.unused[name] = ACTIVATION_NOTE
        elif (weight := finder(tensors, name)) is not None:
            found.by_name[weight.name] = weight
    return found


def check_schemes(tensors: Iterable[PlacedTensor]) -> None:
    """Raise CheckpointError, naming the scheme, if any of `tensors` cannot be converted."""
    checked: set[Quantization] = set()
    for tensor in tensors:
        source, stored = tensor.quantization, tensor.stored
        if source in checked or stored.dtype in PLAIN_DTYPES:
            continue
        if source is None:
            raise CheckpointError(
                f"{tensor.source.name}: {stored.name}: dtype: expected one of "
                f"{', '.join(PLAIN_DTYPES)} without a quantization_config in config.json, found "
                f"{stored.dtype}"
            )
        checked.add(source)
        if (refusal := unsupported_reason(source)) is not None:
            raise CheckpointError(refusal)


def unsupported_reason(quantization: Quantization) -> str | None:
    """Why checkpoints of this scheme are not supported, in one sentence; None if they are."""
    config = _Config(quantization)
    try:
        _reader(config)
    except _UnsupportedError as error:
        refusal = (
            f"{quantization.where}: quantization_config: expected weights in 16 bits or in one of "
            f"FP8, INT8, GPTQ, W4A16 or NVFP4, found {error}"
        )
    except CheckpointError as error:
        refusal = str(error)
    else:
        return None
    return f"{refusal}; {way_out(Path(quantization.where).parent, config.text('quant_method'))}"


def wants_16_bit_inputs(weight: Nvfp4Weight) -> bool:
    """Whether an NVFP4 weight needs 16-bit activations (W4A16_NVFP4).

    ModelOpt states this for the whole checkpoint, or for modules by name.
    """
    assert weight.values.quantization is not None
    config = _Config(weight.values.quantization)
    layers = config.values.get("quantized_layers")
    by_module = {
        canonical_name(name): module_config.get("quant_algo")
        for name, module_config in (layers.items() if isinstance(layers, dict) else ())
        if isinstance(module_config, dict)
    }
    algorithm = config.values.get("quant_algo")
    # A stack of experts is listed under the name that they share.
    module = _EXPERT.sub(".experts.", canonical_name(weight.name).removesuffix(".weight"))
    while module:
        if module in by_module:
            algorithm = by_module[module]
            break
        module = module.rpartition(".")[0]
    return algorithm == "W4A16_NVFP4"


def _reader(config: _Config) -> Finder:
    """The function that finds the weights; _UnsupportedError or CheckpointError if none does."""
    method = config.text("quant_method")
    kind = config.text("quant_algo") if method == "modelopt" else config.text("format")
    for scheme in SCHEMES:
        if method == scheme.method and (not scheme.formats or kind in scheme.formats):
            if scheme.reader is None:
                raise _UnsupportedError(scheme.name)
            return scheme.reader(config)
    named = config.values.get("quant_method")
    same = next((s.name.rpartition(", ")[2] for s in SCHEMES if s.method == method), None)
    raise _UnsupportedError(
        f"{same}: {kind or 'no format'}" if same else f"quant_method {named!r:.60}"
    )


# --------------------------------------------------------------------------- the schemes


def _scaled(
    tensors: Tensors, name: str, suffix: str, block: tuple[int, int] | None
) -> Weight | None:
    """Pairs values with the scale named after them plus `suffix`; other tensors are plain."""
    if name.endswith(suffix) and name.removesuffix(suffix) in tensors:
        return None
    tensor, scale_name = tensors[name], name + suffix
    if scale_name not in tensors and tensor.stored.dtype in PLAIN_DTYPES:
        return PlainWeight(name, tensor)
    return ScaledWeight(name, tensor, tensors.get(scale_name), scale_name, block)


def _fp8(config: _Config) -> Finder:
    block = _block(config, "weight_block_size", config.values.get("weight_block_size"))
    if config.text("store_dtype") != "mxfp4":
        return lambda tensors, name: _scaled(tensors, name, "_scale_inv", block)

    def find(tensors: Tensors, name: str) -> Weight | None:
        if name.endswith("_scale") and name.removesuffix("_scale") in tensors:
            return None
        scale = tensors.get(name + "_scale")
        if scale is None or tensors[name].stored.dtype != "U8":
            return _scaled(tensors, name, "_scale_inv", block)
        return Mxfp4Weight(name, tensors[name], scale)

    return find


def _block(config: _Config, key: str, value: Any) -> tuple[int, int] | None:
    """Rows and columns of a block; None if there are no blocks."""
    if value is None:
        return None
    whole = isinstance(value, list) and all(is_whole(n) and n > 0 for n in value)
    if not whole or len(value) != 2:
        raise config.fault(key, "[rows, columns] or null", value)
    return value[0], value[1]


def _weights_config(config: _Config) -> Mapping[str, Any]:
    """The settings for weights in the only group of a compressed-tensors config."""
    groups = config.objects("config_groups")
    if len(groups) != 1:
        raise _UnsupportedError(f"compressed-tensors with {len(groups)} groups of layers")
    weights = groups[0].get("weights")
    if not isinstance(weights, dict):
        raise config.fault("config_groups", "an object under weights", weights)
    _check_uncompressed(config)
    return weights


def _check_uncompressed(config: _Config) -> None:
    """Raise _UnsupportedError for features of compressed-tensors other than quantization."""
    sparsity = config.values.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise _UnsupportedError(f"compressed-tensors, sparse ({sparsity['format']!r:.60})")
    transforms = config.values.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise _UnsupportedError("compressed-tensors with transforms (transform_config)")


def _compressed_8_bit(config: _Config) -> Finder:
    weights = _weights_config(config)
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block") or weights.get("symmetric") is False:
        raise _UnsupportedError(
            f"compressed-tensors in 8 bits, strategy {strategy!r:.60}"
            f"{', with zero points' if weights.get('symmetric') is False else ''}"
        )
    block = None
    if strategy == "block":
        block = _block(config, "block_structure", weights.get("block_structure"))
    return lambda tensors, name: _scaled(tensors, name, "_scale", block)


def _compressed_packed(config: _Config) -> Finder:
    weights = _weights_config(config)
    bits, size, strategy = (weights.get(key) for key in ("num_bits", "group_size", "strategy"))
    if strategy not in ("group", "channel") or weights.get("type", "int") != "int":
        raise _UnsupportedError(f"compressed-tensors, packed, strategy {strategy!r:.60}")
    if weights.get("actorder") in ("group", True):
        raise _UnsupportedError("compressed-tensors, packed in the order of activations (actorder)")
    if not is_whole(bits) or not 2 <= bits <= 8:
        raise config.fault("num_bits", "a whole number from 2 to 8", bits)
    if strategy == "channel":
        size = None
    elif not is_whole(size) or size < 1:
        raise config.fault("group_size", "a whole number from 1", size)

    def find(tensors: Tensors, name: str) -> Weight | None:
        base = name.removesuffix("_packed")
        if base == name:
            part = name.rpartition("_")[0].removesuffix("_zero") + "_packed"
            return None if part in tensors else PlainWeight(name, tensors[name])
        words, scale, shape = (_part(tensors, base, s) for s in ("_packed", "_scale", "_shape"))
        point = tensors.get(base + "_zero_point")
        return PackedWeight(base, words, scale, point, shape, bits, size)

    return find


def _gptq(config: _Config) -> Finder:
    bits = config.values.get("bits")
    form = config.text("checkpoint_format") or "gptq"
    if bits not in (2, 4, 8) or not is_whole(bits):
        raise _UnsupportedError(f"GPTQ in {bits!r:.60} bits")
    if form not in ("gptq", "gptq_v2"):
        raise _UnsupportedError(f"GPTQ in the layout {form!r:.60}")

    def find(tensors: Tensors, name: str) -> Weight | None:
        base, _, kind = name.rpartition(".")
        if kind != "qweight":
            known = kind in ("g_idx", "qzeros", "scales") and base + ".qweight" in tensors
            return None if known else PlainWeight(name, tensors[name])
        return GptqWeight(
            base + ".weight",
            tensors[name],
            _part(tensors, base, ".qzeros"),
            _part(tensors, base, ".scales"),
            _part(tensors, base, ".g_idx"),
            bits,
            offset=1 if form == "gptq" else 0,
        )

    return find


def _modelopt(config: _Config) -> Finder:
    def find(tensors: Tensors, name: str) -> Weight | None:
        base = next((name.removesuffix(s) for s in ("_scale_2", "_scale") if name.endswith(s)), "")
        if base in tensors:
            return None
        scale = tensors.get(name + "_scale")
        if scale is None or tensors[name].stored.dtype != "U8":
            return _scaled(tensors, name, "_scale", None)
        inputs = tensors.get(name.removesuffix("weight") + "input_scale")
        second = tensors.get(name + "_scale_2")
        return Nvfp4Weight(name, tensors[name], scale, second, inputs, inverted=False)

    return find


def _compressed_nvfp4(config: _Config) -> Finder:
    _check_uncompressed(config)

    def find(tensors: Tensors, name: str) -> Weight | None:
        base = name.removesuffix("_packed")
        if base == name:
            stem = name.removesuffix("_scale").removesuffix("_global").removesuffix("weight")
            stem = stem.removesuffix("input")
            known = name.endswith("_scale") and stem + "weight_packed" in tensors
            return None if known else PlainWeight(name, tensors[name])
        scale = _part(tensors, base, "_scale")
        inputs = tensors.get(base.removesuffix("weight") + "input_global_scale")
        second = tensors.get(base + "_global_scale")
        return Nvfp4Weight(base, tensors[name], scale, second, inputs, inverted=True)

    return find


def _compressed_mixed(config: _Config) -> Finder:
    formats = {str(group.get("format")) for group in config.objects("config_groups")}
    if formats != {"nvfp4-pack-quantized"}:
        raise _UnsupportedError(
            f"compressed-tensors of several kinds ({', '.join(sorted(formats))})"
        )
    return _compressed_nvfp4(config)


def _part(tensors: Tensors, base: str, suffix: str) -> PlacedTensor:
    """A companion tensor that must exist."""
    found = tensors.get(base + suffix)
    if found is None:
        companion = next(name for name in tensors if name.startswith(base))
        raise CheckpointError(
            f"{tensors[companion].source.name}: {base + suffix}: expected it beside {companion}, "
            "found no such tensor"
        )
    return found


_COMPRESSED = "compressed-tensors"
SCHEMES: tuple[Scheme, ...] = (
    Scheme("FP8", "fp8", reader=_fp8),
    Scheme("GPTQ", "gptq", reader=_gptq),
    Scheme(
        "FP8 or INT8, compressed-tensors",
        _COMPRESSED,
        ("float-quantized", "int-quantized", "naive-quantized"),
        _compressed_8_bit,
    ),
    Scheme("W4A16, compressed-tensors", _COMPRESSED, ("pack-quantized",), _compressed_packed),
    Scheme("NVFP4, compressed-tensors", _COMPRESSED, ("nvfp4-pack-quantized",), _compressed_nvfp4),
    Scheme("NVFP4, compressed-tensors", _COMPRESSED, ("mixed-precision",), _compressed_mixed),
    Scheme(
        "FP8 or NVFP4, ModelOpt",
        "modelopt",
        ("fp8", "fp8_per_channel_per_token", "nvfp4", "w4a16_nvfp4", "mixed_precision"),
        _modelopt,
    ),
    Scheme("MXFP4, compressed-tensors", _COMPRESSED, ("mxfp4-pack-quantized",)),
    Scheme("AQLM", "aqlm"),
    Scheme("AutoRound", "auto-round"),
    Scheme("AWQ", "awq"),
    Scheme("BitNet", "bitnet"),
    Scheme("bitsandbytes", "bitsandbytes"),
    Scheme("EETQ", "eetq"),
    Scheme("FBGEMM FP8", "fbgemm_fp8"),
    Scheme("FP-Quant", "fp_quant"),
    Scheme("HIGGS", "higgs"),
    Scheme("HQQ", "hqq"),
    Scheme("MXFP4", "mxfp4"),
    Scheme("Quanto", "quanto"),
    Scheme("Quark", "quark"),
    Scheme("SpQR", "spqr"),
    Scheme("torchao", "torchao"),
    Scheme("VPTQ", "vptq"),
)
