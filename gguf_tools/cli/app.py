"""`mtp-gguf`: the commands under one name."""

from importlib.metadata import version
from typing import Annotated

import typer

from mtp_gguf.native.generate_command import generate

from .build_server import build_server
from .compare import compare
from .console import reports_errors
from .convert import ConvertCommand, convert
from .demo import demo
from .doctor import doctor
from .extract import extract
from .fastmtp import app as fastmtp
from .graft import graft
from .list_tensors import list_tensors
from .serve import serve
from .strip import strip

app = typer.Typer(
    name="mtp-gguf",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
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
    """Make and inspect GGUF files of Qwen3.5 / 3.6 / 3.8 with their Multi-Token Prediction head."""


app.command("convert", cls=ConvertCommand)(convert)
app.command("list-tensors")(list_tensors)
app.command("graft", cls=ConvertCommand)(graft)
app.command("extract")(extract)
app.command("strip")(strip)
app.add_typer(fastmtp, name="fastmtp")
app.command("doctor")(doctor)
app.command("compare")(compare)
app.command("generate")(reports_errors(generate))
app.command("demo")(demo)
app.command("serve")(serve)
app.command("build-server")(build_server)


def main() -> None:
    """Run the command line; what is expected to go wrong ends in a sentence and an exit code."""
    app()
