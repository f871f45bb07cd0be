"""Fits llama_cpp's declarations to libraries of another version of llama.cpp.

llama_cpp passes `llama_model_params` and `llama_context_params` by value, so that a field that a
version adds moves those behind it. `fit_structs` finds out which fields the loaded libraries have,
by what their `*_default_params` write, and gives llama_cpp's functions structs of that layout.
`declare_what_is_there` lets llama_cpp be imported on libraries without some of its functions.
"""

from __future__ import annotations

import ctypes
import sys
from _ctypes import CFuncPtr
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import LibraryMismatchError

UNDERSTOOD = "use llama-cpp-python 0.3.35 or 0.3.36, or libraries of llama.cpp b11312 to b11549"

# Each struct, with the function that returns its defaults.
STRUCTS = {
    "llama_context_params": "llama_context_default_params",
    "llama_model_params": "llama_model_default_params",
    "llama_model_quantize_params": "llama_model_quantize_default_params",
}

Field = tuple[str, Any]  # name and ctypes type


@dataclass(frozen=True)
class Sample:
    """The bytes that a function wrote, and which of them it wrote (1) or left as they were (0)."""

    data: bytes
    written: bytes


@dataclass(frozen=True)
class Added:
    """A field that some versions have behind another one."""

    name: str
    kind: Any
    after: str


# What may differ from the declarations: fields that versions of llama.cpp have added or removed.
_ADDED = {
    "llama_context_params": (
        Added("moe_cache_size", ctypes.c_size_t, "type_v"),  # in b11549
        Added("moe_cache_cpu_share", ctypes.c_float, "moe_cache_size"),  # in 1.0
    )
}
_REMOVED = {
    "llama_context_params": ("defrag_thold",),  # in 1.0
    "llama_model_params": ("lazy_mode",),  # not yet in 0.3.35's
}

# The defaults by which fields are recognized, in all versions; pointers are NULL.
_DEFAULTS: dict[str, tuple[float, ...]] = {
    "n_ctx": (512,),
    "n_batch": (2048,),
    "n_ubatch": (512,),
    "n_seq_max": (1,),
    "n_rs_seq": (0,),
    "n_outputs_max": (0,),
    "n_outputs_max_per_seq": (0, 1),
    "n_threads": (4,),
    "n_threads_batch": (4,),
    "ctx_type": (0,),
    "rope_scaling_type": (-1,),
    "pooling_type": (-1,),
    "attention_type": (-1,),
    "flash_attn_type": (-1,),
    "rope_freq_base": (0,),
    "rope_freq_scale": (0,),
    "yarn_ext_factor": (-1,),
    "yarn_orig_ctx": (0,),
    "defrag_thold": (-1,),
    "type_k": (1,),  # F16
    "type_v": (1,),
    "moe_cache_size": (0,),
    "embeddings": (0,),
    "offload_kqv": (1,),
    "no_perf": (1,),
    "op_offload": (1,),
    "swa_full": (1,),
    "kv_unified": (0,),
    "n_samplers": (0,),
    "split_mode": (1,),  # by layers
    "main_gpu": (0,),
    "load_mode": (-1, 1),
    "lazy_mode": (0, 1),
    "vocab_only": (0,),
    "use_mmap": (1,),
    "use_mlock": (0,),
    "check_tensors": (0,),
    "use_extra_bufts": (1,),
    "no_host": (0,),
    "no_alloc": (0,),
    "nthread": (0,),
    "allow_requantize": (0,),
    "quantize_output_tensor": (1,),
    "only_copy": (0,),
    "dry_run": (0,),
}


def fit_structs(bindings: ModuleType, sample: Callable[[Any], Sample]) -> None:
    """Make `bindings` (llama_cpp.llama_cpp) use the structs of the library that they have loaded.

    sample: calls a function of the library that returns a struct. LibraryMismatchError if the
    layout of a struct is not understood.
    """
    for name, function in STRUCTS.items():
        declared = getattr(bindings, name)
        found = fitting(declared, sample(getattr(bindings, function)))
        if found is None:
            raise LibraryMismatchError(
                f"{name}: expected the fields of a known version of llama.cpp, found others; "
                f"{UNDERSTOOD}"
            )
        if found is not declared:
            _replace(bindings, declared, found)


def fitting(declared: type[ctypes.Structure], sample: Sample) -> type[ctypes.Structure] | None:
    """`declared` if the sample has its layout, else a struct with known changes; None if none fits.

    None, too, if several changes explain the sample.
    """
    if _fits(declared, sample):
        return declared
    fields = [(str(field[0]), field[1]) for field in declared._fields_]
    found = []
    for changed in _variants(declared.__name__, fields):
        variant = type(declared.__name__, (ctypes.Structure,), {"_fields_": changed})
        if _fits(variant, sample):
            found.append(variant)
    return found[0] if len(found) == 1 else None


def _variants(name: str, fields: Sequence[Field]) -> Iterator[list[Field]]:
    """The fields of a struct with each set of known changes."""
    there = {field for field, _ in fields}
    changes: list[Added | str] = [
        *(added for added in _ADDED.get(name, ()) if added.name not in there),
        *(removed for removed in _REMOVED.get(name, ()) if removed in there),
    ]
    for count in range(1, len(changes) + 1):
        for chosen in combinations(changes, count):
            out = list(fields)
            for change in chosen:
                names = [field for field, _ in out]
                if isinstance(change, str):
                    del out[names.index(change)]
                elif change.after in names:
                    out.insert(names.index(change.after) + 1, (change.name, change.kind))
            if len(out) == len(fields) + sum(1 if isinstance(c, Added) else -1 for c in chosen):
                yield out


def _fits(struct: type[ctypes.Structure], sample: Sample) -> bool:
    """Whether all fields of a struct were written, with their defaults, and nothing else.

    Padding may have been zeroed.
    """
    others = bytearray(sample.written)  # will be: the bytes that were written and are no field
    values = struct.from_buffer_copy(sample.data)
    for name, kind, *_ in struct._fields_:
        place = getattr(struct, name)
        part = slice(place.offset, place.offset + place.size)
        if not all(sample.written[part]):
            return False
        others[part] = bytes(place.size)
        if kind is ctypes.c_bool and sample.data[place.offset] > 1:
            return False
        if _is_pointer(kind):
            if any(sample.data[part]):
                return False
        elif name in _DEFAULTS and getattr(values, name) not in _DEFAULTS[name]:
            return False
    size = ctypes.sizeof(struct)
    return not any(others[size:]) and not any(
        byte for byte, other in zip(sample.data[:size], others, strict=False) if other
    )


def _is_pointer(kind: Any) -> bool:
    return kind is ctypes.c_void_p or issubclass(kind, (ctypes._Pointer, CFuncPtr))


def _replace(
    bindings: ModuleType, declared: type[ctypes.Structure], found: type[ctypes.Structure]
) -> None:
    """Replace a struct in the module and in the signatures of its functions."""
    new: dict[Any, Any] = {declared: found, ctypes.POINTER(declared): ctypes.POINTER(found)}
    for function in vars(bindings).values():
        if isinstance(function, CFuncPtr):
            function.restype = new.get(function.restype, function.restype)
            function.argtypes = [new.get(kind, kind) for kind in function.argtypes or ()]
    for module in (bindings, sys.modules[bindings.__name__.rpartition(".")[0]]):
        setattr(module, declared.__name__, found)


def declare_what_is_there(package: ModuleSpec) -> None:
    """Let an import of llama_cpp succeed if its libraries lack functions.

    package: llama_cpp's. A call of such a function raises LibraryMismatchError.
    """
    name = f"{package.name}._ctypes_extensions"
    spec = spec_from_file_location(
        name, Path(str(package.origin)).with_name("_ctypes_extensions.py")
    )
    if spec is None or spec.loader is None or name in sys.modules:
        return
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    declare_in = module.ctypes_function_for_shared_library

    def tolerant(library: ctypes.CDLL) -> Any:
        declare = declare_in(library)

        def declared(function: str, argtypes: Any, restype: Any, enabled: bool = True) -> Any:
            if hasattr(library, function):
                return declare(function, argtypes, restype, enabled)
            return lambda _: _missing(function)

        return declared

    module.ctypes_function_for_shared_library = tolerant
    sys.modules[name] = module


def _missing(function: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise LibraryMismatchError(
            f"llama.cpp: expected the function {function}, found none; {UNDERSTOOD}"
        )

    return refuse
