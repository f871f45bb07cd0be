"""`mtp-gguf build-server`."""

from pathlib import Path
from typing import Annotated

import typer

from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.server.build import (
    Build,
    BuildError,
    build,
    clean,
    cmake_options,
    find_build,
    split_options,
)

from .progress import printable, reports_errors, status_line


@reports_errors
def build_server(
    where: Annotated[
        bool, typer.Option("--where", help="Say where the newest build is, and build nothing.")
    ] = False,
    clean_all: Annotated[
        bool, typer.Option("--clean", help="Remove all builds, finished or not, and build nothing.")
    ] = False,
    cmake_args: Annotated[
        str, typer.Option(help="Further options for cmake, such as '-DGGML_CUDA=ON'.")
    ] = "",
    sdist: Annotated[
        Path | None, typer.Option(help="llama-cpp-python's source distribution, if pip has no way.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("-j", "--jobs", min=1, help="Compilers to run at once.")
    ] = None,
) -> None:
    """Build llama.cpp with the patches of this project, once.

    pip fetches the pinned sources; nothing else is downloaded. Made are llama-server,
    llama-quantize, llama-bench, ggml-rpc-server and the shared libraries. CMAKE_ARGS is heeded.

    **Examples**

    mtp-gguf build-server

    CMAKE_ARGS="-DGGML_CUDA=ON" mtp-gguf build-server

    LLAMA_CPP_LIB_PATH=$(mtp-gguf build-server --where | tail -n 1) python script.py
    """
    if where and clean_all:
        raise typer.BadParameter("--where and --clean are two different wishes")
    if clean_all:
        n = clean()
        typer.echo(f"removed {n} {'build' if n == 1 else 'builds'}" if n else "nothing to remove")
        return
    if where:
        found = find_build()
        if found is None:
            raise ServerError("nothing is built yet: `mtp-gguf build-server` does it")
        _say(found)
        return
    further = split_options(cmake_args, "--cmake-args")
    try:
        with status_line("starting") as update:
            done = build(cmake_options(further), sdist, jobs, update)
    except BuildError as error:
        for line in error.log:
            typer.echo(printable(line), err=True)
        raise
    except KeyboardInterrupt:
        raise ServerError("interrupted; the next call goes on from here") from None
    _say(done)


def _say(made: Build) -> None:
    """The server, and the folder for LLAMA_CPP_LIB_PATH: one line each."""
    typer.echo(f"{made.server}\n{made.libraries}")
