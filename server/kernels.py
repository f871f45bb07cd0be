"""Our kernels (native/kernels) in programs that others built.

A program that is linked with libggml-cpu gets them by its environment (`environment`); one whose
ggml loads its CPU backend from a folder (GGML_BACKEND_DL), as in the release archives of llama.cpp,
by two files in that folder (`install`).
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from mtp_gguf.gguf_tools.errors import RequestError, ServerError
from mtp_gguf.gguf_tools.machine.system import shared_library

_PRELOAD = "LD_PRELOAD"
SWITCH = "MTP_GGUF_KERNELS"  # "0" turns the kernels off
_LIBRARY = shared_library("mtp_kernels")
_BACKEND = shared_library("ggml-cpu-mtp")  # ggml loads files of such names
_VARIANTS = shared_library("ggml-cpu-*")
_CPU = "libggml-cpu"
_LINKER_SECONDS = 30


def library() -> Path:
    """The path of the library; ServerError where this installation has none."""
    path = _installed(_LIBRARY)
    if not path.is_file():
        raise ServerError(f"{path}: expected the library of the kernels, found none")
    return path


def environment(program: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment that loads the kernels into `program`.

    RequestError, with the next step, if they cannot be loaded into the program.
    """
    if not sys.platform.startswith("linux"):
        raise RequestError(
            f"{program}: expected Linux, whose loader can add a library to a program, found "
            f"{sys.platform}; MTPLlama uses the kernels here, too"
        )
    found = _linked(program, variables)
    if found is not None and not any(name.startswith(_CPU) for name in found):
        if any(name.startswith("libggml") for name in found):
            raise RequestError(
                f"{program}: expected a program that is linked with {_CPU}, found one that loads "
                "it from a folder; mtp-gguf kernels install FOLDER puts the kernels there"
            )
        if _contains_ggml(program):
            raise RequestError(
                f"{program}: expected a program that is linked with {_CPU}, found ggml in the "
                "program itself; build llama.cpp with -DBUILD_SHARED_LIBS=ON"
            )
    before = variables.get(_PRELOAD, "")
    preloaded = ":".join(filter(None, (str(library()), before)))
    return {**variables, _PRELOAD: preloaded}


def default_environment(program: Path, variables: Mapping[str, str]) -> dict[str, str] | None:
    """The environment that loads the kernels into `program`; None where it is left as it is.

    It is left as it is if the kernels are turned off or cannot be loaded, and if its libraries are
    unknown, as those of scripts are.
    """
    linked = _linked(program, variables) or ()
    if variables.get(SWITCH) == "0" or not any(name.startswith(_CPU) for name in linked):
        return None
    try:
        return environment(program, variables)
    except (RequestError, ServerError):
        return None


def install(folder: Path) -> list[Path]:
    """Copy the library and a backend that loads it into `folder`; return the paths of the copies.

    RequestError if the folder has no CPU backends for several CPUs.
    """
    variants = [path for path in folder.glob(_VARIANTS) if path.name != _BACKEND]
    if not variants:
        raise RequestError(
            f"{folder}: expected {_VARIANTS}, as in llama.cpp's release archives, found none; for "
            f"a program that is linked with {_CPU}: mtp-gguf kernels -- PROGRAM"
        )
    copies = {_LIBRARY: library(), _BACKEND: _installed(shared_library("mtp_kernels_backend"))}
    for name, source in copies.items():
        unfinished = folder / f".{name}.new"
        shutil.copy2(source, unfinished)
        unfinished.replace(folder / name)  # a program that runs keeps the file that it has loaded
    return [folder / name for name in copies]


def uninstall(folder: Path) -> list[Path]:
    """Remove what `install` copied; return the paths of the removed files."""
    found = [path for name in (_BACKEND, _LIBRARY) if (path := folder / name).is_file()]
    for path in found:
        path.unlink()
    return found


def _installed(name: str) -> Path:
    return Path(str(resources.files("mtp_gguf.native").joinpath("lib").joinpath(name)))


def _linked(program: Path, variables: Mapping[str, str]) -> list[str] | None:
    """The names of the libraries that the system's loader loads with `program`; None if unknown.

    Unknown are those of scripts.
    """
    if _head(program) != b"\x7fELF":
        return None
    try:
        done = subprocess.run(
            [program],
            env={**variables, "LD_TRACE_LOADED_OBJECTS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LINKER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [line.split()[0].rpartition("/")[2] for line in done.stdout.splitlines() if line.split()]


def _head(program: Path) -> bytes:
    with program.open("rb") as file:
        return file.read(4)


def _contains_ggml(program: Path) -> bool:
    return b"ggml_backend_cpu" in program.read_bytes()
