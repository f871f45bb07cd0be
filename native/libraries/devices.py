"""ggml's devices: their names, their memory, and the buffers in which they keep weights.

llama_cpp is imported at the first call, not with this module.
"""

import ctypes
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Device:
    """A device of ggml: its name, such as CUDA0, and the description that its driver gives."""

    name: str
    description: str


@cache
def _library() -> ctypes.CDLL:
    """Return the libggml-base that llama_cpp has loaded."""
    from ..runtime import loaded_library  # noqa: PLC0415  (loads the libraries)

    return ctypes.CDLL(str(loaded_library("ggml-base")))


@cache
def _registry() -> ctypes.CDLL:
    """Return the libggml that llama_cpp has loaded, with declared functions."""
    from ..runtime import loaded_library  # noqa: PLC0415  (loads the libraries)

    lib = ctypes.CDLL(str(loaded_library("ggml")))
    # size_t ggml_backend_dev_count(void);
    lib.ggml_backend_dev_count.restype = ctypes.c_size_t
    lib.ggml_backend_dev_count.argtypes = []
    # ggml_backend_dev_t ggml_backend_dev_get(size_t index);
    lib.ggml_backend_dev_get.restype = ctypes.c_void_p
    lib.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    # ggml_backend_dev_t ggml_backend_dev_by_name(const char * name);
    lib.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    lib.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    return lib


def buffer_type(device: str) -> int:
    """The address of the buffer type in which a device keeps weights; the device must exist."""
    # ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
    get = _library().ggml_backend_dev_buffer_type
    get.restype = ctypes.c_void_p
    get.argtypes = [ctypes.c_void_p]
    return int(get(_registry().ggml_backend_dev_by_name(device.encode())))


def device_memory(device: str) -> tuple[int, int]:
    """Free and total bytes of a device's memory, as its driver says; the device must exist."""
    # void ggml_backend_dev_memory(ggml_backend_dev_t device, size_t * free, size_t * total);
    get = _library().ggml_backend_dev_memory
    get.restype = None
    size_p = ctypes.POINTER(ctypes.c_size_t)
    get.argtypes = [ctypes.c_void_p, size_p, size_p]
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    found = _registry().ggml_backend_dev_by_name(device.encode())
    get(found, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def devices() -> list[Device]:
    """The devices of all backends that are loaded, in ggml's order."""
    base, registry = _library(), _registry()
    # const char * ggml_backend_dev_name(ggml_backend_dev_t device);  description likewise
    texts = (base.ggml_backend_dev_name, base.ggml_backend_dev_description)
    for function in texts:
        function.restype = ctypes.c_char_p
        function.argtypes = [ctypes.c_void_p]
    found = map(registry.ggml_backend_dev_get, range(registry.ggml_backend_dev_count()))
    return [Device(*(text(d).decode(errors="replace") for text in texts)) for d in found]
