"""Name, write and report the output of commands that rewrite a GGUF."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from mtp_gguf.gguf_tools.files.new_file import head_warnings, local_files, write_file
from mtp_gguf.gguf_tools.files.rewrite import OutputSpec
from mtp_gguf.gguf_tools.heads.acceptance import read_stored
from mtp_gguf.gguf_tools.heads.drafters import Drafter
from mtp_gguf.gguf_tools.heads.head import HeadReport
from mtp_gguf.gguf_tools.machine.interrupted import leaves_nothing
from mtp_gguf.gguf_tools.machine.shell import quoted
from mtp_gguf.gguf_tools.machine.text import count_types, human_bytes, printable
from mtp_gguf.gguf_tools.model import Model, open_model
from mtp_gguf.gguf_tools.model import list_tensors as read_listing
from mtp_gguf.gguf_tools.vision import VisionTower

from .console import CONSOLE


def write_copy(
    title: str,
    target: Path,
    model: Model,
    make: Callable[[Model], OutputSpec],
    overwrite: bool,
    *sources: Path,
) -> None:
    """Write what `make` plans of a model; an interruption leaves no file.

    sources: further files that the output must not replace.
    """
    with leaves_nothing(target):
        write_file(title, make(model), target, [*local_files(model), *sources], overwrite, CONSOLE)


def can_draft(path: Path) -> bool:
    """Whether a GGUF has a head that can draft."""
    with open_model(path) as model:
        return model.head.report.ready


def head_of(output: Path) -> HeadReport:
    """Return whether the written GGUF can draft."""
    report = read_listing(output).head
    assert report is not None
    return report


def file_fields(output: Path) -> dict[str, Any]:
    """Return path, size, head and warnings of a written GGUF for --json, in all commands."""
    return {
        "path": str(output),
        "bytes": output.stat().st_size,
        "head": asdict(head_of(output)),
        "warnings": head_warnings(output),
    }


def report_file(output: Path, next_command: str | None = None, *, as_json: bool = False) -> None:
    """Print a description of `output`, and a possible next command.

    next_command: a pattern with `{}` in place of the file's name, or None.
    """
    if as_json:
        typer.echo(json.dumps(file_fields(output), indent=1))
        return
    typer.echo(f"{output}: {human_bytes(output.stat().st_size)}")
    typer.echo(describe_head(head_of(output)))
    with open_model(output) as model:
        stored = read_stored(model)
    if stored.fault:  # of keys that were left in a file whose draft vocabulary was changed
        typer.echo(f"acceptance: {stored.text}")
    for warning in head_warnings(output):
        typer.echo(f"warning: {warning}")
    if next_command:
        typer.echo(f"next: {next_command.format(quoted(output))}")


def describe_tower(tower: VisionTower) -> str:
    """Return one line that says what an mmproj file contains, and whether it can be used."""
    faults = "".join(f"; cannot be used: {fault}" for fault in tower.faults)
    return printable(f"{tower.text} ({count_types(tower.types)}){faults}")


def describe_drafter(drafter: Drafter) -> str:
    """Return one line that says what drafter a file contains, and how it is used."""
    if drafter.faults:
        return printable(f"{drafter.text}; cannot be used: {'; '.join(drafter.faults)}")
    return (
        f"{drafter.text}; serve MODEL --head FILE drafts with it (--spec-type {drafter.spec_type})"
    )


def describe_head(report: HeadReport) -> str:
    """Return one line that says whether a GGUF can draft, and how."""
    if not report.ready:
        return f"cannot draft: {printable(report.reason)}"
    draft = "full vocabulary"
    if report.in_use:
        draft = f"{'FastMTP' if report.draft else 'draft vocabulary of'} {report.in_use.text}"
    if report.draft and report.draft.coverage is not None:
        draft += f", covers {report.draft.coverage:.1%} of its corpus"
    where = "" if report.stock else "; stock llama.cpp cannot load this layout"
    return f"can draft: {report.reason} ({count_types(report.types)}), {draft}{where}"
