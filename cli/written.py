"""Name, write and report the output of commands that rewrite a GGUF."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import typer

from mtp_gguf.gguf_tools.doctor import value_findings
from mtp_gguf.gguf_tools.head import HeadReport
from mtp_gguf.gguf_tools.model import Model, open_model, whole_name
from mtp_gguf.gguf_tools.model import list_tensors as read_listing
from mtp_gguf.gguf_tools.output import check_output
from mtp_gguf.gguf_tools.remote import is_remote
from mtp_gguf.gguf_tools.rewrite import OutputSpec, write
from mtp_gguf.gguf_tools.shell import quoted
from mtp_gguf.gguf_tools.sources import StreamedSource
from mtp_gguf.gguf_tools.vision import VisionTower

from .progress import byte_progress, count_types, human_bytes, printable


def output_path(output: Path | None, source: Path | Model, pattern: str) -> Path:
    """Return the file to write: `output`, or a default name in that folder or the current one.

    pattern: the default name, with `{}` in place of the source's name without suffix.
    """
    if output is not None and not output.is_dir():
        return output
    if isinstance(source, Model):
        text = str(source.path)
        source = Path(unquote(text)) if is_remote(text) else Path(text)
    return (output or Path()) / f"{pattern.format(Path(whole_name(source)).stem)}.gguf"


def local_files(*models: Model) -> list[Path]:
    """Return the local files of some models; those of remote models are left out."""
    return [path for model in models if not is_remote(str(model.path)) for path in model.paths]


def write_file(
    title: str, spec: OutputSpec, output: Path, sources: Sequence[Path], overwrite: bool
) -> None:
    """Check that `output` may be written, then write it and show progress.

    sources: the local files that the output must not replace.
    """
    check_output(output, list(sources), overwrite)
    if any(isinstance(tensor.source, StreamedSource) for tensor in spec.tensors):
        title = f"download and {title}"
    with byte_progress(title, spec.nbytes) as progress:
        write(output, spec, progress)


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


def head_warnings(output: Path) -> list[str]:
    """Return what doctor would say about the values of the head in a written GGUF."""
    with open_model(output) as model:
        return [f.text for f in value_findings(model)] if model.head.report.ready else []


def report_file(output: Path, next_command: str | None = None, *, as_json: bool = False) -> None:
    """Print a description of `output`, and a possible next command.

    next_command: a pattern with `{}` in place of the file's name, or None.
    """
    if as_json:
        typer.echo(json.dumps(file_fields(output), indent=1))
        return
    typer.echo(f"{output}: {human_bytes(output.stat().st_size)}")
    typer.echo(head_verdict(head_of(output)))
    for warning in head_warnings(output):
        typer.echo(f"warning: {warning}")
    if next_command:
        typer.echo(f"next: {next_command.format(quoted(output))}")


def tower_verdict(tower: VisionTower) -> str:
    """Return one line that says what an mmproj file contains, and whether it can be used."""
    faults = "".join(f"; cannot be used: {fault}" for fault in tower.faults)
    return printable(f"{tower.text} ({count_types(tower.types)}){faults}")


def head_verdict(report: HeadReport) -> str:
    """Return one line that says whether a GGUF can draft, and how."""
    if not report.ready:
        return f"cannot draft: {printable(report.reason)}"
    draft = "full vocabulary"
    if report.draft:
        draft = f"FastMTP {report.draft.size} tokens, layout {report.draft.layout.value}"
        if report.draft.coverage is not None:
            draft += f", covers {report.draft.coverage:.1%} of its corpus"
    where = "" if report.stock else "; stock llama.cpp cannot load this layout"
    return f"can draft: {report.reason} ({count_types(report.types)}), {draft}{where}"
