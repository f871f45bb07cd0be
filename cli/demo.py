"""`mtp-gguf demo`."""

import tempfile
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from .progress import reports_errors

PROMPT = "def is_prime(n):\n"


@reports_errors
def demo(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Keep the GGUF under this name.")
    ] = None,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="Text to continue.")] = PROMPT,
    tokens: Annotated[int, typer.Option("-n", min=1, max=400, help="Tokens to generate.")] = 96,
) -> None:
    """Convert the bundled model, look at its head, let it draft: the whole way in seconds.

    The model is a Qwen3.5 of a few million weights, trained on the Python standard library. It
    knows what Python looks like and little else.
    """
    model = resources.files("mtp_gguf.gguf_tools") / "demo_model"
    with tempfile.TemporaryDirectory(prefix="mtp-gguf-") as folder, resources.as_file(model) as hf:
        file = output or Path(folder) / "demo.gguf"
        # The commands a user would type, run as they stand.
        _run("convert", str(hf), "-o", str(file), "--mtp-f16", "--fastmtp")
        _run("list-tensors", str(file), "--mtp")
        further = ("--ctx", "512", "--depth", "3", "--stats")
        _run("generate", str(file), "-p", prompt, "-n", str(tokens), *further)
    if output:
        typer.echo(f"\nkept: {output}")


def _run(*command: str) -> None:
    from .app import app  # noqa: PLC0415  (the app holds this command, too)

    shown = [Path(word).name if word.startswith("/") else word for word in command]
    quoted = [word if word.isprintable() else repr(word) for word in shown]
    typer.echo(f"\n$ mtp-gguf {' '.join(quoted)}")
    code = app(list(command), standalone_mode=False)
    if code:
        raise typer.Exit(code)
