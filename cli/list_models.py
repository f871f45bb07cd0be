"""`mtp-gguf list`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.hub.local_models import LocalModel, models_in, models_in_hub_cache
from mtp_gguf.gguf_tools.hub.sources import what_is_at
from mtp_gguf.gguf_tools.machine.text import human_bytes, printable

from .options import AsJson
from .progress import reports_errors


@reports_errors
def list_models(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FOLDER",
            help="Look in these folders and their subfolders (default: the current one).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the GGUF models on this machine, and whether they can draft.

    Looks in folders and in huggingface_hub's cache, where downloaded models are. Each name can be
    passed to every command. Only headers are read; `mtp-gguf doctor` says more about one model.

    **Examples**

    mtp-gguf list

    mtp-gguf list ~/models --json
    """
    for folder in folders or ():
        if not folder.is_dir():
            raise RequestError(f"{folder}: expected a folder, found {what_is_at(folder)}")
    found = [model for folder in folders or [Path()] for model in models_in(folder)]
    found += models_in_hub_cache()
    if as_json:
        typer.echo(json.dumps({"models": [_fields(model) for model in found]}, indent=1))
        return
    if not found:
        typer.echo("no models found; `mtp-gguf list FOLDER` looks elsewhere", err=True)
        return
    typer.echo(f"{'size':>8}  drafts  model")
    for model in found:
        drafts = "yes" if model.can_draft else "no"
        typer.echo(f"{human_bytes(model.nbytes):>8}  {drafts:6}  {printable(model.name)}")


def _fields(model: LocalModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "bytes": model.nbytes,
        "can_draft": model.can_draft,
        "reason": model.reason,
    }
