"""The llama.cpp libraries that this process has loaded, and the device they run a model on."""

import ctypes
from dataclasses import dataclass
from importlib.metadata import version

from .._bindings import library
from ..runtime import llama_cpp, runtime
from .exact import kernels


@dataclass(frozen=True)
class LoadedLibraries:
    """The libraries and device that run a model.

    device: ggml's device name, "CPU" without a GPU. kernels: one of
    `gguf_tools.machine.system.KERNELS`. folder: the folder of the libraries. llama_cpp_python: its
    version.
    """

    device: str
    kernels: str
    folder: str
    llama_cpp_python: str


def device_name(gpu_layers: int) -> str:
    """Return ggml's name of the device for models with `gpu_layers` GPU layers (-1: all)."""
    return str(library().mtp_gpu_name(0).decode()) if gpu_layers else "CPU"


def loaded_versions() -> str:
    """Return the versions of ggml and llama.cpp that this process has loaded."""
    texts = []
    for name in ("ggml_version", "ggml_commit", "llama_version"):
        function = getattr(llama_cpp.llama_cpp._lib, name, None)
        if function is None:  # before llama-cpp-python 0.3.34
            texts.append("unknown")
            continue
        function.restype = ctypes.c_char_p
        texts.append(function().decode())
    return "ggml {} ({}), llama.cpp {}".format(*texts)


def loaded_libraries(gpu_layers: int) -> LoadedLibraries:
    """Return the libraries and the device for models with `gpu_layers` GPU layers (-1: all)."""
    return LoadedLibraries(
        device_name(gpu_layers), kernels(), str(runtime.folder), version("llama-cpp-python")
    )


def has_gpu() -> bool:
    """Whether the loaded libraries found a GPU that they can use."""
    return bool(llama_cpp.llama_supports_gpu_offload())
