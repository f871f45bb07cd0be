"""`mtp-gguf demo`."""

import io
import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_gguf.gguf_tools.files.json_text import parse_json

from .options import AsJson, Command, Overwrite, output_option
from .progress import reports_errors

PROMPT = "def is_prime(n):\n"
_GENERATE = ("--ctx", "512", "--depth", "3", "--stats")


class CommandClass(Command):
    """Leaves arguments to the command, which says what to pass instead."""

    allow_extra_args = True


@reports_errors
def demo(
    ctx: typer.Context,
    output: Annotated[
        Path | None, output_option("Keep the GGUF in this file (default: remove it).")
    ] = None,
    prompt: Annotated[
        str, typer.Option("-p", "--prompt", help="Continue this text.", show_default=False)
    ] = PROMPT,
    tokens: Annotated[
        int, typer.Option("-n", "--tokens", min=1, max=400, help="Generate at most N tokens.")
    ] = 96,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Convert a bundled model, list its head and generate text, in seconds.

    The model is a Qwen3.5 of a few million weights, trained on the Python standard library. It
    knows what Python looks like and little else.
    """
    if ctx.args:
        raise typer.BadParameter(
            f"expected no argument, found {ctx.args[0]!r}; -o FILE.gguf keeps the model"
        )
    model = resources.files("mtp_gguf.gguf_tools") / "demo_model"
    with resources.as_file(model) as hf, nullcontext() if output else _temporary_folder():
        file = output or Path("demo.gguf")
        replace = ["--overwrite"] if overwrite else []
        # The commands are run exactly as a user would type them.
        commands = (
            ["convert", str(hf), "-o", str(file), "--mtp-f16", "--fastmtp", *replace],
            ["list-tensors", str(file), "--mtp"],
            ["generate", str(file), "-p", prompt, "-n", str(tokens), *_GENERATE],
        )
        if as_json:
            results = [{"command": words, "result": _result(words)} for words in commands]
            typer.echo(json.dumps({"commands": results}, indent=1))
            return
        for words in commands:
            shown = [Path(word).name if Path(word).is_absolute() else word for word in words]
            typer.echo(f"\n$ mtp-gguf {' '.join(map(shell_word, shown))}")
            _run(words)
    if output:
        typer.echo(f"\nkept: {output}")
    else:
        typer.echo("\nThe file is removed again; `mtp-gguf demo -o demo.gguf` keeps it.")


@contextmanager
def _temporary_folder() -> Iterator[None]:
    """Work in a folder that is removed in the end."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="mtp-gguf-") as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def shell_word(text: str) -> str:
    """Quote a word for bash and zsh, including control characters."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(c if c.isprintable() else repr(c)[1:-1] for c in escaped) + "'"


def _result(words: list[str]) -> Any:
    """Return what a command prints with --json."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        _run([word for word in words if word != "--stats"] + ["--json"])
    return parse_json(printed.getvalue())


def _run(words: list[str]) -> None:
    from .app import app  # noqa: PLC0415  (the app imports this command)

    code = app(words, standalone_mode=False)
    if code:
        raise typer.Exit(code)
