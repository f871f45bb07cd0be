"""`mtp-gguf kernels`: our CPU kernels in programs that others built."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.text import printable
from mtp_gguf.server import kernels

from .options import AsJson, Command
from .progress import reports_errors

_RUN = "run"


class _ProgramOrCommand(TyperGroup):
    """A group for which the name of a program means the command that runs it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            args = [_RUN, *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_ProgramOrCommand,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Use this package's CPU kernels in other builds of llama.cpp.

    MTPLlama uses them by itself. MTP_GGUF_KERNELS=0 turns them off, MTP_GGUF_KERNELS=MUL_MAT,…
    names the operations that they compute.

    **Examples**

    mtp-gguf kernels -- llama-server -m model.gguf

    mtp-gguf kernels -- python program.py

    mtp-gguf kernels install ~/llama.cpp/bin
    """,
)

_Folder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="The folder with llama.cpp's libggml-cpu-*.so.",
    ),
]


@app.command(
    _RUN,
    cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@reports_errors
def run(
    words: Annotated[
        list[str],
        typer.Argument(metavar="-- PROGRAM [ARGUMENTS]", help="The program and its arguments."),
    ],
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print program and variables as JSON; run nothing."),
    ] = False,
) -> None:
    """Run a program that is linked with libggml-cpu, with the kernels.

    **Examples**

    mtp-gguf kernels -- llama-bench -m model.gguf -p 512
    """
    program = shutil.which(words[0])
    if program is None:
        raise RequestError(f"{words[0]}: expected a program, found none of this name")
    variables = kernels.environment(Path(program), os.environ)
    if as_json:
        new = {k: v for k, v in variables.items() if os.environ.get(k) != v}
        typer.echo(json.dumps({"program": program, "arguments": words[1:], "variables": new}))
        return
    os.execve(program, words, variables)


@app.command("install", cls=Command)
@reports_errors
def install(folder: _Folder, as_json: AsJson = False) -> None:
    """Install the kernels in a folder with CPU backends.

    Release archives of llama.cpp and other programs with files like libggml-cpu-haswell.so load
    the best of these; with the kernels installed, they load it with our kernels.

    **Examples**

    mtp-gguf kernels install ~/llama.cpp/bin
    """
    _print("installed", kernels.install(folder), as_json)


@app.command("uninstall", cls=Command)
@reports_errors
def uninstall(folder: _Folder, as_json: AsJson = False) -> None:
    """Remove the kernels from a folder.

    **Examples**

    mtp-gguf kernels uninstall ~/llama.cpp/bin
    """
    removed = kernels.uninstall(folder)
    _print("removed", removed, as_json)
    if not (removed or as_json):
        typer.echo(f"{printable(str(folder))}: the kernels are not installed there")


def _print(done: str, paths: Sequence[Path], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({done: [str(path) for path in paths]}))
        return
    for path in paths:
        typer.echo(f"{done} {printable(str(path))}")
