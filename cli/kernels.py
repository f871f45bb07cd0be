"""`mtp-gguf kernels`: our CPU kernels in programs that others built."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.machine.processors import computing_threads
from mtp_gguf.gguf_tools.machine.text import printable
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.server import kernels

from .local_model import local_model
from .options import AsJson, Command, ModelName, Threads
from .progress import reports_errors, status_line

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

    mtp-gguf kernels measure model.gguf
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
        bool, typer.Option("--json", help="Print program and variables as JSON; run nothing.")
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


@app.command("measure", cls=Command)
@reports_errors
def measure(
    model: ModelName,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure which kernels multiply the weights of a model fastest here.

    Each model does so while it runs: what is found is kept in the user's cache, and used by every
    program with these kernels. This command measures anew, and prints what was found: of each type
    of weights and number of columns (tokens of a batch) the fastest kernel, the weights that a
    thread reads with it, and how many times as fast it is as the one that is used without
    measuring, and as the next best one.

    **Examples**

    mtp-gguf kernels measure model.gguf
    """
    os.environ[kernels.SWITCH] = "anew"  # before the kernels are loaded
    from mtp_gguf.bench.kernel_choices import BATCHES, measure_choices  # noqa: PLC0415

    file = local_model(model, drafts=False).path
    # open_model says in a sentence what is no GGUF.
    with open_model(file), status_line("measuring kernels") as report:
        choices = measure_choices(file, threads or computing_threads(), report)
    if not choices:
        raise RequestError(
            f"{model}: expected products with a choice of kernels, found none; see `mtp-gguf info`"
        )
    if as_json:
        typer.echo(json.dumps([asdict(choice) for choice in choices], indent=1))
        return
    head = ("type", "columns", "rows", "threads", "kernel", "GB/s", "to unmeasured", "to next")
    rows = [
        (
            choice.type + (" experts" if choice.experts else ""),
            f"{choice.columns}{'+' if choice.columns > BATCHES[-2] else ''}",
            choice.rows,
            str(choice.threads),
            choice.kernel or "not decided",
            f"{choice.gigabytes:.1f}",
            f"{choice.over_first:.2f}",
            f"{choice.over_next:.2f}",
        )
        for choice in choices
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        typer.echo("  ".join(map(str.ljust, row, widths)).rstrip())


def _print(done: str, paths: Sequence[Path], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({done: [str(path) for path in paths]}))
        return
    for path in paths:
        typer.echo(f"{done} {printable(str(path))}")
