"""The kernels' library (native/kernels), plugged into the ggml-cpu that this process has loaded.

It computes operations of libraries with and without our patches. `MTP_GGUF_KERNELS=0` turns it off;
the other values of that variable are in native/kernels/include/mtp_kernels.h.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .prototypes import declare

# With this function of patches/ they fuse operations and prefetch weights, too.
_HOOKS = "ggml_cpu_set_graph_hooks"

_PROTOTYPES = """
int mtp_kernels_plug_in(const char * path);
const char * mtp_kernels_reason(void);
const char * mtp_kernels_name(void);
size_t mtp_kernels_report(char * text, size_t size);
size_t mtp_kernels_types(char * text, size_t size);
size_t mtp_kernels_choices(char * text, size_t size);
double mtp_kernels_read_limit(const void * data, size_t size, int n_threads, double seconds);
double mtp_kernels_product_limit(int n_threads, double seconds);
long mtp_kernels_computed(const char * operation);
"""


@dataclass(frozen=True)
class KernelChoice:
    """What multiplies one kind of product.

    type: of the weights, such as "q4_K". columns: the most of a class of numbers of columns; 64:
    any more. rows: "long" if the columns leave no room for them in an L1 cache, else "short".
    threads: that compute together. kernel: an instruction set, with "+hint", "+two_streams" or
    "+panels"; None while it is being measured. gigabytes: of weights, a second and thread.
    over_first, over_next: how many times as fast it is as the kernel that is used where nothing was
    measured, and as the next best one.
    """

    type: str
    columns: int
    rows: str
    experts: bool
    threads: int
    kernel: str | None = None
    gigabytes: float = 0.0
    over_first: float = 0.0
    over_next: float = 0.0


@dataclass(frozen=True)
class PluggedKernels:
    """What became of the library.

    instructions: the instruction set that it uses, such as "AVX512_VNNI"; None if it is not plugged
    in. reason: why not; "" if it is. patched: whether the libraries have our patches, which let it
    fuse operations and prefetch weights.
    """

    instructions: str | None
    reason: str
    patched: bool = False

    def operations(self) -> list[str]:
        """Return the operations of ggml that the library computes; none if not plugged in."""
        return [name for name in _report()[0].split(",") if name] if self.instructions else []

    def left_to_ggml(self) -> list[str]:
        """Return a sentence for each kind of operation whose results differed from ggml's."""
        return _report()[1:] if self.instructions else []

    def types(self) -> frozenset[str]:
        """Return the types of weights, such as "Q4_K", whose products the library computes."""
        if "MUL_MAT" not in self.operations():
            return frozenset()
        return frozenset(_text(_library.mtp_kernels_types).upper().split(","))

    def choices(self) -> list[KernelChoice]:
        """Return what multiplies each kind of product that is, or was, measured."""
        if not self.instructions:
            return []
        return [_choice(line.split()) for line in _text(_library.mtp_kernels_choices).splitlines()]

    def read_limit(self, data: NDArray[np.uint8], threads: int, seconds: float) -> float:
        """Return the bytes of `data` that so many threads read a second, at most.

        It takes about so many seconds. 0 if the library is not plugged in.
        """
        if not self.instructions:
            return 0.0
        return float(_library.mtp_kernels_read_limit(data.ctypes.data, data.size, threads, seconds))

    def product_limit(self, threads: int, seconds: float) -> float:
        """Return how many products of two 8-bit integers so many threads compute a second."""
        if not self.instructions:
            return 0.0
        return float(_library.mtp_kernels_product_limit(threads, seconds))

    def computed(self, operation: str) -> int:
        """Return how many operations of this name the library has computed."""
        return int(_library.mtp_kernels_computed(operation.encode())) if self.instructions else 0


_library: ctypes.CDLL


def plug_in(library: Path, loaded: ctypes.CDLL) -> PluggedKernels:
    """Plug the library at `library` into ggml-cpu.

    loaded: ggml-cpu or a library that is linked with it, such as libllama. Call it before a graph
    is computed.
    """
    global _library  # noqa: PLW0603  (a process has one)
    try:
        _library = declare(ctypes.CDLL(str(library)), _PROTOTYPES)
    except (OSError, AttributeError) as error:  # AttributeError: the library of another version
        return PluggedKernels(None, str(error))
    if _library.mtp_kernels_plug_in(loaded._name.encode()):
        return PluggedKernels(None, _library.mtp_kernels_reason().decode(errors="replace"))
    return PluggedKernels(_library.mtp_kernels_name().decode(), "", hasattr(loaded, _HOOKS))


def _choice(words: list[str]) -> KernelChoice:
    """Return a line of mtp_kernels_choices, which its header describes."""
    kind, columns, rows, experts, threads, *measured = words
    product = (kind, int(columns), rows, experts == "experts", int(threads))
    if len(measured) == 1:
        return KernelChoice(*product)
    kernel, ns, over_first, over_next = measured
    gigabytes = 2**20 / max(float(ns), 1.0)
    return KernelChoice(*product, kernel, gigabytes, float(over_first), float(over_next))


def _report() -> list[str]:
    """Return the lines of mtp_kernels_report."""
    return _text(_library.mtp_kernels_report).splitlines()


def _text(function: Any) -> str:
    """Return what a function writes that takes a buffer and its size."""
    size = function(None, 0) + 1
    text = ctypes.create_string_buffer(size)
    function(text, size)
    return text.value.decode(errors="replace")
