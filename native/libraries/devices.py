"""ggml's devices: their names, their memory, and the buffers in which they keep weights.

llama_cpp is imported at the first call, not with this module.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

from .prototypes import declare

_BASE = """
void * ggml_backend_dev_buffer_type(void * device);
void ggml_backend_dev_memory(void * device, size_t * free, size_t * total);
const char * ggml_backend_dev_name(void * device);
const char * ggml_backend_dev_description(void * device);
"""
_REGISTRY = """
size_t ggml_backend_dev_count(void);
void * ggml_backend_dev_get(size_t index);
void * ggml_backend_dev_by_name(const char * name);
"""


@dataclass(frozen=True)
class Device:
    """A device of ggml: its name, such as CUDA0, and the description that its driver gives."""

    name: str
    description: str


@cache
def _library() -> ctypes.CDLL:
    """Return the libggml-base that llama_cpp has loaded, with declared functions."""
    from ..runtime import loaded_library  # noqa: PLC0415  (loads the libraries)

    return declare(ctypes.CDLL(str(loaded_library("ggml-base"))), _BASE)


@cache
def _registry() -> ctypes.CDLL:
    """Return the libggml that llama_cpp has loaded, with declared functions."""
    from ..runtime import loaded_library  # noqa: PLC0415  (loads the libraries)

    return declare(ctypes.CDLL(str(loaded_library("ggml"))), _REGISTRY)


def buffer_type(device: str) -> int:
    """The address of the buffer type in which a device keeps weights; the device must exist."""
    found = _registry().ggml_backend_dev_by_name(device.encode())
    return int(_library().ggml_backend_dev_buffer_type(found))


def device_memory(device: str) -> tuple[int, int]:
    """Free and total bytes of a device's memory, as its driver says; the device must exist."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    found = _registry().ggml_backend_dev_by_name(device.encode())
    _library().ggml_backend_dev_memory(found, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def devices() -> list[Device]:
    """The devices of all backends that are loaded, in ggml's order."""
    base, registry = _library(), _registry()
    texts = (base.ggml_backend_dev_name, base.ggml_backend_dev_description)
    found = map(registry.ggml_backend_dev_get, range(registry.ggml_backend_dev_count()))
    return [Device(*(text(d).decode(errors="replace") for text in texts)) for d in found]
