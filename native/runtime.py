"""Chooses the llama.cpp libraries of this process and imports llama_cpp with them.

No other module imports llama_cpp; they use `from .runtime import llama_cpp`, so that the libraries
are chosen before they are loaded. The first of these that applies decides:

1. MTP_GGUF_LIBS: `stock`, `fast`, or a folder with llama.cpp's libraries;
2. LLAMA_CPP_LIB_PATH, llama_cpp's own variable: a folder;
3. an earlier import of llama_cpp by other code;
4. the fast libraries, which this package ships: llama.cpp with patches/;
5. the stock libraries of the installed llama_cpp, with a note that says why.

The fast libraries are only those that the patches change. ggml's registry and other GPU backends
are those of the installed llama_cpp, so every device that works with the stock libraries works with
these.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.machine.system import cpu_features, shared_library

from .errors import LibraryMismatchError
from .libraries.layouts import UNDERSTOOD, Sample, declare_what_is_there, fit_structs
from .libraries.plugged_kernels import PluggedKernels, plug_in

__all__ = [
    "LIBMTP_VARIABLE",
    "VARIABLE",
    "Runtime",
    "library_file",
    "llama_cpp",
    "load_libmtp",
    "loaded_library",
    "native_library",
    "plugged_kernels",
    "runtime",
]

VARIABLE = "MTP_GGUF_LIBS"
LIBMTP_VARIABLE = "MTP_GGUF_NATIVE_LIB"  # another build of libmtp, such as one with sanitizers
_LLAMA_CPP_VARIABLE = "LLAMA_CPP_LIB_PATH"
_REINSTALL = "install mtp-gguf again (pip install --force-reinstall --no-deps)"
_PROBE_SECONDS = 60.0
_MISMATCH = 3  # exit code of _PROBE
_MAX_STRUCT = 1024  # MTP_MAX_STRUCT

# Loads libraries in this order; the last one is libmtp, which checks the versions of the others.
_PROBE = f"""
import ctypes, sys
for path in sys.argv[1:]:
    library = ctypes.CDLL(path)
library.mtp_last_error.restype = ctypes.c_char_p
if library.mtp_check_runtime():
    print(library.mtp_last_error().decode(errors="replace"))
    sys.exit({_MISMATCH})
"""


@dataclass(frozen=True)
class Runtime:
    """The libraries of this process.

    kind: "fast", "stock", or "folder" if the user named a folder. folder: contains libllama.
    reason: why these were chosen. note: why stock libraries run although they were not requested,
    or which GPU backend is gone, and the next step; None otherwise.
    """

    kind: Literal["fast", "stock", "folder"]
    folder: Path
    reason: str
    note: str | None = None


def native_library(name: str) -> Path:
    """The path of one of this package's native libraries, such as `libmtp.so` for `mtp`.

    LibraryMismatchError if the file is not as it was installed.
    """
    path = library_file(name)
    if damage := _damage(path):
        raise LibraryMismatchError(damage)
    return path


def library_file(name: str) -> Path:
    """The path that one of this package's native libraries has, if it is installed."""
    return _own_folder() / shared_library(name)


def load_libmtp() -> ctypes.CDLL:
    """Load libmtp, whose functions `_bindings` declares; LibraryMismatchError if it cannot be.

    LIBMTP_VARIABLE names another build of it.
    """
    override = os.environ.get(LIBMTP_VARIABLE)
    path = Path(override) if override else native_library("mtp")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        why = str(error)
        advice = f"; {UNDERSTOOD}" if "undefined symbol" in why else ""
        raise LibraryMismatchError(f"{path}: cannot be loaded: {why}{advice}") from None


def loaded_library(name: str) -> Path:
    """The path of a llama.cpp library that this process uses, such as that of `ggml-base`."""
    own = runtime.folder / shared_library(name)
    return own if own.is_file() else _stock_folder() / shared_library(name)


def _stock_folder() -> Path:
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise LibraryMismatchError(
            "llama_cpp: expected the package, found none; pip install llama-cpp-python"
        )
    return Path(spec.origin).parent / "lib"


def _own_folder() -> Path:
    return Path(str(resources.files("mtp_gguf.native").joinpath("lib")))


@cache
def _installed_sizes() -> dict[Path, int]:
    """The size of each of this package's files, as pip noted it; empty if there is no such note."""
    with suppress(metadata.PackageNotFoundError, OSError, ValueError):
        files = metadata.files("mtp-gguf") or ()
        return {Path(str(file.locate())): file.size for file in files if file.size is not None}
    return {}


def _damage(path: Path) -> str | None:
    """How a library of this package differs from what was installed, with the next step; or None.

    The system's loader would crash on a file that ends too early.
    """
    installed = _installed_sizes().get(path)
    try:
        found = path.stat().st_size
    except OSError as error:
        return f"{path}: expected a library, found {error.strerror}; {_REINSTALL}"
    if installed in (None, found):
        return None
    return f"{path}: expected {installed} bytes, as installed, found {found}; {_REINSTALL}"


def _choose() -> Runtime:
    """The libraries to use; LibraryMismatchError if the requested ones cannot be used."""
    asked, stated = os.environ.get(VARIABLE), os.environ.get(_LLAMA_CPP_VARIABLE)
    fast, stock = _own_folder() / "fast", _stock_folder()
    if "llama_cpp" in sys.modules:
        return _imported(asked, fast, stock)
    if asked == "stock":
        return Runtime("stock", stock, f"{VARIABLE}=stock")
    if asked and asked != "fast":
        return Runtime("folder", _checked(Path(asked), VARIABLE, stock), VARIABLE)
    if stated and not asked:
        folder = _checked(Path(stated), _LLAMA_CPP_VARIABLE, stock)
        return Runtime("folder", folder, _LLAMA_CPP_VARIABLE)
    obstacle = _obstacle(fast, stock)
    if obstacle is None:
        reason = f"{VARIABLE}=fast" if asked else "the fast libraries, which the package ships"
        return Runtime("fast", fast, reason, _lost_backends(fast.parent, stock))
    if asked:
        raise LibraryMismatchError(f"{VARIABLE}=fast: {obstacle}")
    note = f"llama.cpp runs without the fast kernels: {obstacle} ({VARIABLE}=stock hides this)"
    return Runtime("stock", stock, "the fast libraries cannot be used", note)


def _imported(asked: str | None, fast: Path, stock: Path) -> Runtime:
    """The libraries that an earlier import of llama_cpp has loaded."""
    module = getattr(sys.modules["llama_cpp"], "llama_cpp", None)
    folder = Path(getattr(module, "_base_path", stock))
    kind: Literal["fast", "stock", "folder"] = (
        "fast" if folder == fast else "stock" if folder == stock else "folder"
    )
    advice = "import mtp_gguf.native before llama_cpp"
    if asked and asked != kind and Path(asked) != folder:
        raise LibraryMismatchError(
            f"{VARIABLE}={asked}: llama_cpp was imported earlier, with the libraries of {folder}; "
            f"{advice}"
        )
    if kind == "stock" and not asked and _obstacle(fast, stock) is None:
        warnings.warn(
            f"llama_cpp was imported earlier, with its stock libraries; for the fast ones {advice}",
            stacklevel=2,
        )
    return Runtime(kind, folder, "llama_cpp was imported earlier")


def _obstacle(fast: Path, stock: Path) -> str | None:
    """Why the fast libraries cannot be used here, with the next step; None if they can."""
    marker = fast / "build.json"
    if not fast.is_dir():
        way = "none are made on Windows" if sys.platform == "win32" else _REINSTALL
        return f"this installation has no fast libraries; {way}"
    try:
        made_from = parse_json(marker.read_text(encoding="utf-8"))
        machine, version = made_from["machine"], made_from["llama-cpp-python"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{marker}: expected what the libraries were made from, found {error}; {_REINSTALL}"
    own = map(fast.joinpath, map(shared_library, ("ggml-base", "llama")))
    for path in (*own, _cpu_backend(fast)):
        if not path.is_file():
            return f"{path.parent}: expected {path.name}, found no such file; {_REINSTALL}"
        if damage := _damage(path):
            return damage
    if machine != platform.machine():
        return f"{fast}: expected libraries for {platform.machine()}, found {machine}; {_REINSTALL}"
    try:
        found = metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != version:
        return (
            f"expected llama-cpp-python {version}, found {found}; "
            f"pip install llama-cpp-python=={version}"
        )
    # A ggml that loads its backends itself (GGML_BACKEND_DL) would not use our CPU backend.
    for name in ("ggml", "ggml-cpu"):
        if not (stock / shared_library(name)).is_file():
            return (
                f"{stock}: expected {shared_library(name)}, found no such file; install "
                f"llama-cpp-python=={version} without GGML_BACKEND_DL"
            )
    return None


def _lost_backends(own: Path, stock: Path) -> str | None:
    """Which GPU backends this package was installed with that llama-cpp-python lacks; or None."""
    try:
        built = (own / "backends.txt").read_text(encoding="utf-8").split()
    except OSError:
        return None
    lost = [
        option
        for option in built
        if not (stock / shared_library(option.lower().replace("_", "-"))).is_file()
    ]
    if not lost:
        return None
    options = " ".join(f"-D{option}=on" for option in lost)
    return (
        f"mtp-gguf was installed with {' and '.join(lost)}, but the installed llama-cpp-python "
        f'lacks it; CMAKE_ARGS="{options}" pip install --force-reinstall --no-deps --no-cache-dir '
        f"--no-binary llama-cpp-python llama-cpp-python=={metadata.version('llama-cpp-python')}"
    )


def _load_order(folder: Path, stock: Path) -> list[Path]:
    """The libraries to load before libllama; none if `folder` has all of llama.cpp's libraries.

    Otherwise the ggml of the installed llama_cpp, after our base and those of our backends that it
    has, too: the loader reuses a library that is already loaded under the same name.
    """
    if (folder / shared_library("ggml")).is_file():
        return []
    own = [folder / shared_library("ggml-base"), _cpu_backend(folder)]
    if (stock / shared_library("ggml-vulkan")).is_file():
        own.append(folder / shared_library("ggml-vulkan"))
    return [*(path for path in own if path.is_file()), stock / shared_library("ggml")]


def _cpu_backend(folder: Path) -> Path:
    """The libggml-cpu of `folder` for this CPU; portable libraries have several."""
    backend = shared_library("ggml-cpu")
    with suppress(OSError, ValueError, AttributeError, TypeError):
        made_from = parse_json((folder / "build.json").read_text(encoding="utf-8"))
        features = set(cpu_features().split())
        for name, needs in made_from.get("cpu variants", {}).items():
            if features.issuperset(needs):
                return folder / str(name) / backend
    return folder / backend


def _checked(folder: Path, variable: str, stock: Path) -> Path:
    """Return `folder`, named by `variable`, after loading its libraries in a subprocess.

    LibraryMismatchError if that fails or crashes.
    """
    place = f"{variable}: {folder}"
    advice = (
        f"unset {variable}, or name a folder as in the last line of `mtp-gguf build-server --where`"
    )
    llama = folder / shared_library("llama")
    try:
        is_there = llama.is_file() or llama.with_suffix(".so").is_file()
    except OSError as error:
        raise LibraryMismatchError(f"{place}: {error.strerror}; {advice}") from None
    if not is_there:
        raise LibraryMismatchError(
            f"{place}: expected a folder with {llama.name}, found none; {advice}"
        )
    paths = [*_load_order(folder, stock), llama, native_library("mtp")]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, *map(str, paths)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibraryMismatchError(f"{place}: its libraries cannot be tried: {error}") from None
    if done.returncode == 0:
        return folder.absolute()
    if done.returncode == _MISMATCH:
        reason = done.stdout.strip()
    elif done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        reason = f"loading its libraries ends with {name}: incomplete, or for another CPU"
    else:
        last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = f"its libraries cannot be loaded: {last[-1].removeprefix('OSError: ')}"
    raise LibraryMismatchError(f"{place}: {reason}; {advice}")


@contextmanager
def _selected(chosen: Runtime) -> Iterator[None]:
    """Make an import of llama_cpp load these libraries; subprocesses inherit nothing of it."""
    before = os.environ.pop(_LLAMA_CPP_VARIABLE, None)
    try:
        if chosen.kind != "stock":
            for path in _load_order(chosen.folder, _stock_folder()):
                ctypes.CDLL(str(path))
            os.environ[_LLAMA_CPP_VARIABLE] = str(chosen.folder)
        if chosen.kind == "folder" and (package := find_spec("llama_cpp")):
            declare_what_is_there(package)
        yield
    except (OSError, RuntimeError, AttributeError) as error:
        if chosen.kind == "stock":
            raise
        raise LibraryMismatchError(
            f"{chosen.folder}: its libraries cannot be loaded: {error}; {VARIABLE}=stock runs "
            "without them"
        ) from None
    finally:
        os.environ.pop(_LLAMA_CPP_VARIABLE, None)
        if before is not None:
            os.environ[_LLAMA_CPP_VARIABLE] = before


def _plug_in_kernels() -> PluggedKernels:
    """Plug in our kernels: those beside the libraries, loaded by them already, or the package's."""
    name = shared_library("mtp_kernels")
    beside = runtime.folder / name
    library = beside if beside.is_file() else _own_folder() / name
    if not library.is_file():
        return PluggedKernels(None, "this installation has no kernels to plug in")
    if damage := _damage(library):
        return PluggedKernels(None, damage)
    return plug_in(library, llama_cpp.llama_cpp._lib)


def _sample(function: Any) -> Sample:
    """Call a function of llama.cpp that returns a struct."""
    libmtp = load_libmtp()
    libmtp.mtp_call_for_struct.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    address = ctypes.cast(function, ctypes.c_void_p)
    seen = []
    for filling in (0x5A, 0xA5):
        out = (ctypes.c_uint8 * _MAX_STRUCT)(*[filling] * _MAX_STRUCT)
        libmtp.mtp_call_for_struct(address, out)
        seen.append(bytes(out))
    return Sample(seen[0], bytes(a == b for a, b in zip(*seen, strict=True)))


runtime = _choose()
with _selected(runtime):
    import llama_cpp

if runtime.kind != "fast":  # those are of llama_cpp's own version
    try:
        fit_structs(llama_cpp.llama_cpp, _sample)
    except LibraryMismatchError as _error:
        raise LibraryMismatchError(f"{runtime.folder}: {_error}") from None

plugged_kernels = _plug_in_kernels()

# llama_cpp never closes these files; Python would print a ResourceWarning about them at exit.
for _file in (llama_cpp._utils.outnull_file, llama_cpp._utils.errnull_file):
    atexit.register(_file.close)
