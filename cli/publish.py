"""`mtp-gguf publish`."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_gguf.gguf_tools.errors import OutputError
from mtp_gguf.gguf_tools.remote import hub_model, on_hub
from mtp_gguf.gguf_tools.shell import quoted

from .options import AsJson, Revision, Threads, check_revision
from .progress import Interrupted, byte_progress, human_bytes, printable, reports_errors, say

if TYPE_CHECKING:
    from mtp_gguf.publish.release import Record, Release

_CARD = "README.md"


@reports_errors
def publish(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Checkpoint: a folder or OWNER/NAME on the hub."),
    ],
    types: Annotated[
        str,
        typer.Option("--types", metavar="MIX,…", help="Write a file in each of these mixes."),
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="OWNER/NAME", help="Publish in this repository of the hub."),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Keep files and record here (default: NAME of --to, in this folder).",
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option("--imatrix", metavar="FILE", help="Quantize by this importance matrix."),
    ] = None,
    revision: Revision = None,
    threads: Threads = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public (default: private).")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace what the repository has.")
    ] = False,
    no_upload: Annotated[
        bool, typer.Option("--no-upload", help="Keep everything in the folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and the model card; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint to several types and publish them on the hub.

    All files are made from one read of the weights, which stay on the hub if SOURCE is there.
    They include the MTP head and, if the model has one, the vision tower; files of more than 50 GB
    are split. Each is examined as by doctor, a model card is written, and all is uploaded. A
    second call goes on where the first one stopped.

    **Examples**

    mtp-gguf publish Qwen/Qwen3.5-4B --types Q4_K_M,Q8_0 --to me/Qwen3.5-4B-MTP-GGUF --dry-run

    mtp-gguf publish ./Finetune --types Q4_K_M --to me/Finetune-MTP-GGUF --no-upload
    """
    from mtp_gguf.convert.blueprint import HeadChoice  # noqa: PLC0415  (NumPy and gguf are slow)
    from mtp_gguf.convert.resolve import open_model  # noqa: PLC0415
    from mtp_gguf.gguf_tools.imatrix import read_imatrix  # noqa: PLC0415
    from mtp_gguf.publish.card import card_of  # noqa: PLC0415
    from mtp_gguf.publish.release import open_record, plan_release  # noqa: PLC0415
    from mtp_gguf.publish.upload import check_repository, upload  # noqa: PLC0415

    names = _types(types)
    target = hub_model(on_hub(to))
    if target is None or target.revision:
        raise typer.BadParameter(f"expected OWNER/NAME, found {to!r}", param_hint="--to")
    check_revision(source, revision)
    folder = folder or Path(target.hub_id.rpartition("/")[2])
    if not dry_run:
        _make(folder)
    with open_model(
        source,
        revision,
        HeadChoice.WITH_TRUNK,
        None,
        vision=True,
        stream=hub_model(source) is not None,
    ) as checkpoint:
        importance = read_imatrix(imatrix) if imatrix else None
        release = plan_release(source, checkpoint, names, folder, importance)
        card = str(card_of(release, target.hub_id))
        if dry_run:
            typer.echo(json.dumps(_fields(release, card), indent=1) if as_json else _text(release))
            if not as_json:
                typer.echo(_printable_lines(card))
            return
        record = open_record(release)
        found = [] if no_upload else check_repository(target.hub_id, record, replace=replace)
        try:
            _convert(release, record, threads)
            _write_card(folder / _CARD, card)
            if not no_upload:
                upload(
                    target.hub_id,
                    [*release.paths, folder / _CARD],
                    found,
                    record,
                    lambda path: say(
                        f"mtp-gguf: upload {path.name}, {human_bytes(path.stat().st_size)}"
                    ),
                    private=not public,
                )
        except KeyboardInterrupt:
            raise Interrupted("the same command goes on from here") from None
    if as_json:
        typer.echo(json.dumps(_fields(release, card) | _done(record), indent=1))
        return
    typer.echo(_text(release))
    for name, warnings in record.diagnosed.items():
        for warning in warnings:
            typer.echo(printable(f"warning: {name}: {warning}"))
    if no_upload:
        typer.echo(f"not uploaded: {folder}; the same command without --no-upload uploads it")
    else:
        typer.echo(f"published: https://huggingface.co/{target.hub_id}")


def _types(text: str) -> list[str]:
    """Return the keys of FILE_TYPES that --types names."""
    from mtp_gguf.convert.precision import FILE_TYPES, unknown_name  # noqa: PLC0415

    names = [name.strip().upper() for name in text.split(",")]
    for name in names:
        if name not in FILE_TYPES:
            raise typer.BadParameter(unknown_name(name, FILE_TYPES), param_hint="--types")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise typer.BadParameter(
            f"expected each mix once, found {twice[0]} again", param_hint="--types"
        )
    return names


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"{quoted(folder)}: cannot be made: {error.strerror}") from None


def _convert(release: "Release", record: "Record", threads: int | None) -> None:
    """Write and examine the files that the record lacks, with progress on standard error."""
    from mtp_gguf.convert.pipeline import run  # noqa: PLC0415
    from mtp_gguf.convert.source_rows import SourceRows  # noqa: PLC0415
    from mtp_gguf.publish.release import diagnose_files, is_converted  # noqa: PLC0415

    if not is_converted(release, record):
        total = sum(plan.size for plan in release.plans)
        with byte_progress("convert", total) as progress:
            run(release.plans, SourceRows(release.checkpoint), progress, threads, resumable=True)
        record.converted = {path.name: path.stat().st_size for path in release.paths}
        record.diagnosed.clear()
        record.save()
    diagnose_files(release, record)


def _write_card(path: Path, card: str) -> None:
    try:
        path.write_text(card, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None


def _text(release: "Release") -> str:
    lines = [
        f"{release.folder / shard.path.name}: {plan.quant}, {human_bytes(shard.layout.size)}"
        for plan in release.plans
        for shard in plan.shards
    ]
    total = sum(plan.size for plan in release.plans)
    lines.append(f"{len(lines)} files, {human_bytes(total)}")
    notes = dict.fromkeys(note for plan in release.plans for note in plan.notes)
    return "\n".join([*lines, *(printable(f"note: {note}") for note in notes)])


def _printable_lines(text: str) -> str:
    """Return a text of several lines without characters that control a terminal."""
    return "\n".join(map(printable, text.splitlines()))


def _fields(release: "Release", card: str) -> dict[str, Any]:
    return {
        "source": release.source,
        "files": [
            {
                "path": str(release.folder / shard.path.name),
                "type": plan.quant,
                "bytes": shard.layout.size,
            }
            for plan in release.plans
            for shard in plan.shards
        ],
        "card": card,
    }


def _done(record: "Record") -> dict[str, Any]:
    return {
        "warnings": record.diagnosed,
        "repository": record.repository or None,
        "uploaded": record.uploaded,
    }
