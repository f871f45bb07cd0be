"""`mtp-gguf`: the commands under one name.

A command's module is imported only when the command is called, so that a quick command does not
wait for the imports of others.
"""

import logging
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, NamedTuple

import typer

from .options import Command, Group
from .out_of_memory import OUT_OF_MEMORY, is_out_of_memory


class _Place(NamedTuple):
    """The place of a command's function or group: module (relative to this package) and name."""

    module: str
    name: str


# In the order of the help: convert, inspect, repair, run.
_COMMANDS = {
    "convert": _Place(".convert", "convert"),
    "publish": _Place(".publish", "publish"),
    "demo": _Place(".demo", "demo"),
    "list": _Place(".list_models", "list_models"),
    "list-tensors": _Place(".list_tensors", "list_tensors"),
    "doctor": _Place(".doctor", "doctor"),
    "compare": _Place(".compare", "compare"),
    "graft": _Place(".graft", "graft"),
    "extract": _Place(".extract", "extract"),
    "strip": _Place(".strip", "strip"),
    "carry": _Place(".carry", "carry"),
    "imatrix": _Place(".imatrix", "imatrix"),
    "quality": _Place(".quality", "quality"),
    "train-head": _Place(".train_head", "train_head"),
    "fastmtp": _Place(".fastmtp", "app"),
    "up": _Place(".up", "up"),
    "generate": _Place(".generate", "generate"),
    "chat": _Place(".chat", "chat"),
    "bench": _Place(".bench", "bench"),
    "tune": _Place(".tune", "tune"),
    "serve": _Place(".serve", "serve"),
    "build-server": _Place(".build_server", "build_server"),
    "kernels": _Place(".kernels", "app"),
    "info": _Place(".info", "info"),
}


class _Commands(Group):
    """The group of all commands, each loaded on demand."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        place = _COMMANDS.get(cmd_name)
        return None if place is None else _load(cmd_name, place)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the named command; for an unknown name, suggest similar ones."""
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = get_close_matches(args[0], _COMMANDS)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


def _load(name: str, place: _Place) -> Any:
    module = import_module(place.module, __package__)
    found: typer.Typer | Callable[..., None] = getattr(module, place.name)
    if isinstance(found, typer.Typer):
        group = typer.main.get_command(found)
        group.name = name
        return group
    single = typer.Typer(rich_markup_mode="markdown", add_completion=False)
    single.command(name, cls=getattr(module, "CommandClass", Command))(found)
    return typer.main.get_command(single)


app = typer.Typer(
    name="mtp-gguf",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415  (slow to import)

        typer.echo(f"mtp-gguf {version('mtp-gguf')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Convert, inspect and run Qwen3.5 / 3.6 / 3.8 GGUFs with their MTP head."""


def _address_space_is_limited() -> bool:
    """Whether `ulimit -v` or its like applies to this process."""
    try:
        import resource  # noqa: PLC0415  (not on Windows)
    except ImportError:
        return False
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def main() -> None:
    """Run the command line; expected errors end in one sentence and an exit code."""
    for name in ("stdout", "stderr"):  # closed by the shell (`>&-`)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):  # file names need not be valid text
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")
    if _address_space_is_limited():  # importing NumPy takes 32 MB for each thread of OpenBLAS
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not sys.stderr.isatty():  # huggingface_hub's bars are for terminals
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    console = logging.StreamHandler()
    console.setFormatter(logging.Formatter("mtp-gguf: %(message)s"))
    logging.getLogger("mtp_gguf").addHandler(console)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except Exception as error:
        if is_out_of_memory(error):  # a command could not be loaded
            typer.echo(f"mtp-gguf: {OUT_OF_MEMORY}", err=True)
            sys.exit(1)
        if not isinstance(error, OSError):
            raise
        # Output could not be written: the disk is full, or the pipe was closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        told = isinstance(error.__context__, SystemExit) and error.__context__.code
        if not told:
            typer.echo(f"mtp-gguf: standard output: {error.strerror}", err=True)
        sys.exit(1)
