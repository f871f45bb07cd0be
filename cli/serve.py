"""`mtp-gguf serve`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mtp_gguf.gguf_tools.profile import AUTO, find_profile
from mtp_gguf.server.address import check_free, check_rpc_servers, resolve
from mtp_gguf.server.command import ServerCommand, server_command
from mtp_gguf.server.find import VARIABLE, ask, find_server
from mtp_gguf.server.launch import RunningServer
from mtp_gguf.server.model import ServedModel, check_loads, choose_head, open_model

from .progress import printable, reports_errors, status_line


@reports_errors
def serve(
    model: Annotated[Path, typer.Argument(help="GGUF model; of a split one, any shard.")],
    passed: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- OPTIONS]", help="Options for llama-server itself, handed on as they are."
        ),
    ] = None,
    llama_server: Annotated[
        Path | None,
        typer.Option(
            help=f"The server to run. Without: that of {VARIABLE}, ours, the one on the PATH."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8080,
    allow_public: Annotated[
        bool, typer.Option("--allow-public", help="Let others reach it without an API key.")
    ] = False,
    head: Annotated[
        Path | None,
        typer.Option(help="GGUF with the head. Without: the model's, or one beside it."),
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(
            "--spec-draft-n-max",
            metavar="N|auto",
            help="Tokens to draft; auto: as many as pay at the moment. "
            "Without: as tuned, or auto where the server can, or by model size.",
        ),
    ] = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Serve without drafting.")] = False,
    rpc: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT,…", help="ggml RPC servers to spread the model over."),
    ] = None,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Print the command instead of running it.")
    ] = False,
) -> None:
    """Serve a model with llama-server, drafting with its MTP head.

    The server is asked what it can do and the model is looked at before anything starts. Ends with
    the server's exit code.

    **Examples**

    mtp-gguf serve model.gguf --port 8080

    mtp-gguf serve model.gguf --print-command -- --ctx-size 32768 --parallel 4
    """
    passed = passed or []
    if passed and not passed[0].startswith("-"):
        raise typer.BadParameter(f"expected llama-server's options after `--`, found {passed[0]!r}")
    if no_draft and (head or depth):
        raise typer.BadParameter("--no-draft and another option on drafting contradict each other")
    file = open_model(model)
    served = ServedModel(file, None) if no_draft else choose_head(file, head)
    check_loads(served)
    address = resolve(host, port)
    server = ask(find_server(llama_server))
    tuned, ignored = (None, None) if no_draft else find_profile(file.path, server.kernels, None)
    settings = tuned.settings if tuned else None
    wanted = None if depth is None else _depth(depth)
    command = server_command(server, served, address, wanted, settings, rpc, allow_public, passed)
    for note in (ignored, *command.notes) if ignored else command.notes:
        typer.echo(f"mtp-gguf: {printable(note)}", err=True)
    if print_command:
        typer.echo(shlex.join(command.words))
        return
    check_free(address)
    if rpc is not None:
        check_rpc_servers(rpc)
    typer.echo(shlex.join(command.words), err=True)
    raise typer.Exit(_run(command, model.name))


def _depth(text: str) -> int | Literal["auto"]:
    """The value of --spec-draft-n-max."""
    if text == AUTO:
        return AUTO
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise typer.BadParameter(
            f"expected a number from 1, or auto, found {text!r}", param_hint="--spec-draft-n-max"
        )
    return int(text)


def _run(command: ServerCommand, name: str) -> int:
    """Run the server until it ends; its exit code."""
    address = command.health.removesuffix("/health")
    title = f"loading {printable(name)}"
    with RunningServer(command.words, command.health, sys.stderr.buffer) as server:
        with status_line(title) as update:
            ready = server.wait_until_ready(lambda seconds: update(f"{title}: {seconds:.0f} s"))
        if ready:
            server.show_log()
            typer.echo(f"ready: {address}", err=True)
            return server.wait()
        code = server.wait()
        for line in server.last_lines():
            typer.echo(printable(line), err=True)
        if not server.signalled and code:
            typer.echo(
                f"mtp-gguf: llama-server ended with code {code} before it was ready", err=True
            )
        return code
