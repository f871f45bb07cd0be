"""`mtp-gguf publish`."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_gguf.convert.options import check_revision
from mtp_gguf.gguf_tools.errors import MtpGgufError, OutputError, RequestError
from mtp_gguf.gguf_tools.heads.acceptance import LEAST
from mtp_gguf.gguf_tools.hub.remote import hub_model
from mtp_gguf.gguf_tools.machine.interrupted import Interrupted
from mtp_gguf.gguf_tools.machine.shell import quoted
from mtp_gguf.gguf_tools.machine.text import human_bytes, printable
from mtp_gguf.gguf_tools.machine.text_files import whole_texts

from .console import CONSOLE
from .options import (
    AsJson,
    LeastAcceptance,
    NoCheck,
    Revision,
    Threads,
    parse_bytes,
    text_option,
    usage_of,
)
from .progress import byte_progress, reports_errors, say
from .quality_run import measure_quality

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

    from mtp_gguf.publish.catalogue import Entry
    from mtp_gguf.publish.cluster import Cluster
    from mtp_gguf.publish.file_units import FileUnit
    from mtp_gguf.publish.release import Record, Release

_CARD = "README.md"
_CONTEXT = 512  # tokens of a window of text
_NOT_IN_CARD = ("size", "predicted tok/s")  # columns of `quality`: known, or of this machine
_SHOWN = 5  # names in an error message


@dataclass(frozen=True)
class _Options:
    """What holds for every model of a call. folder: of all of them; by default the current one."""

    types: list[str]
    imatrix: Path | None
    sidecar: str | None
    split: int
    text: str
    chunks: int | None
    revision: str | None
    threads: int | None
    public: bool
    replace: bool
    no_check: bool
    least: float
    force: bool
    no_upload: bool
    worker_upload: bool
    remove_local: bool
    dry_run: bool
    as_json: bool


@reports_errors
def publish(
    types: Annotated[
        str,
        typer.Option("--types", metavar="MIX,…", help="Write a file in each of these mixes."),
    ],
    source: Annotated[
        str | None,
        typer.Argument(metavar="SOURCE", help="Checkpoint: a folder or OWNER/NAME on the hub."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="OWNER/NAME",
            help="Publish in this repository of the hub; {name} in it is the name of SOURCE.",
        ),
    ] = None,
    catalogue: Annotated[
        Path | None,
        typer.Option(
            "--list",
            metavar="FILE",
            help="Publish the models of this list, each a line SOURCE or SOURCE OWNER/NAME.",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Keep files and record here (default: NAME of --to, in this folder); with --list, "
            "in a folder for each model here.",
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option("--imatrix", metavar="FILE", help="Quantize by this importance matrix."),
    ] = None,
    sidecar: Annotated[
        str | None,
        typer.Option(
            "--sidecar",
            metavar="MIX",
            help="Also write the head by itself in this mix, an mtp- file for llama-server's -md.",
        ),
    ] = None,
    split_max_size: Annotated[
        str,
        typer.Option(
            "--split-max-size",
            metavar="N(K|M|G)",
            help="Split files into shards of at most this size.",
        ),
    ] = "50G",  # the most that the hub asks for
    text: Annotated[
        list[Path] | None,
        text_option(
            "Measure quality and acceptance on these text files, as `quality` does, for the card."
        ),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option("--chunks", min=1, help="Measure on at most N windows of 512 tokens."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="ADDRESS",
            help="Convert on the workers of a Dask cluster: tcp://HOST:PORT, or local:N for N "
            "processes here.",
        ),
    ] = None,
    worker_upload: Annotated[
        bool,
        typer.Option(
            "--worker-upload",
            help="Let each worker of --cluster write whole files and upload them; no folder is "
            "shared.",
        ),
    ] = False,
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
    remove_local: Annotated[
        bool,
        typer.Option(
            "--remove-local",
            help="Remove the GGUFs of a model from the folder once all of them are uploaded.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and the model card; write nothing.")
    ] = False,
    no_check: NoCheck = False,
    least_acceptance: LeastAcceptance = LEAST,
    force: Annotated[
        bool,
        typer.Option("--force", help="Publish a head below --least-acceptance all the same."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint to several types and publish them on the hub.

    All files are made from one read of the weights, which stay on the hub if SOURCE is there.
    They include the MTP head and, if the model has one, the vision tower; files of more than 50 GB
    are split. Each is examined as by doctor, the acceptance rate of its head is measured and
    stored in it (docs/acceptance.md), a model card is written, and all is uploaded. A
    second call goes on where the first one stopped. Of a list, the models that fail do not stop
    the others.

    **Examples**

    mtp-gguf publish Qwen/Qwen3.5-4B --types Q4_K_M,Q8_0 --to me/Qwen3.5-4B-MTP-GGUF --dry-run

    mtp-gguf publish ./Finetune --types Q4_K_M --to me/Finetune-MTP-GGUF --no-upload

    mtp-gguf publish --list models.txt --types Q4_K_M,Q8_0 --to 'me/{name}-MTP-GGUF'
    """
    names = _types(types)
    if (source is None) == (catalogue is None):
        raise typer.BadParameter("expected either SOURCE or --list FILE", param_hint="--list")
    if catalogue is not None and revision is not None:
        raise typer.BadParameter("write SOURCE@REVISION in the list", param_hint="--revision")
    if no_upload and (worker_upload or remove_local):
        raise typer.BadParameter(
            "expected an upload with --worker-upload and --remove-local", param_hint="--no-upload"
        )
    if worker_upload and cluster is None:
        raise typer.BadParameter("needs --cluster", param_hint="--worker-upload")
    if worker_upload and text:
        raise typer.BadParameter(
            "--worker-upload leaves no files here to measure", param_hint="--text"
        )
    options = _Options(
        types=names,
        imatrix=imatrix,
        sidecar=_mix(sidecar, "--sidecar") if sidecar is not None else None,
        split=parse_bytes(split_max_size),
        text="".join(whole_texts(text)) if text else "",
        chunks=chunks,
        revision=revision,
        threads=threads,
        public=public,
        replace=replace,
        no_check=no_check,
        least=least_acceptance,
        force=force,
        no_upload=no_upload,
        worker_upload=worker_upload,
        remove_local=remove_local,
        dry_run=dry_run,
        as_json=as_json,
    )
    from mtp_gguf.publish.catalogue import read_catalogue  # noqa: PLC0415  (NumPy is slow)

    if catalogue is None:
        assert source is not None
        check_revision(source, revision)
        entries = [_entry(source, to)]
    else:
        entries = read_catalogue(catalogue, to)
    with ExitStack() as stack:
        workers = None
        if cluster is not None:
            workers = _open_cluster(cluster, stack, connect=not dry_run)
        if catalogue is None:
            folder = folder or Path(entries[0].name)
            result = _publish(entries[0], folder, options, workers)
        else:
            result = {"models": _publish_all(entries, folder, options, workers)}
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    if failed := [model["source"] for model in result.get("models", ()) if "error" in model]:
        if as_json:
            raise typer.Exit(1)
        raise RequestError(
            f"{len(failed)} of {len(entries)} models failed: {', '.join(failed[:_SHOWN])}"
            f"{', …' if len(failed) > _SHOWN else ''}; the same command tries them again"
        )


def _entry(source: str, to: str | None) -> "Entry":
    """Return the model of a call without a list."""
    from mtp_gguf.publish.catalogue import entry_of  # noqa: PLC0415

    if to is None:
        raise typer.BadParameter("expected OWNER/NAME", param_hint="--to")
    with usage_of("--to"):
        return entry_of(source, to)


def _open_cluster(text: str, stack: ExitStack, *, connect: bool) -> "Cluster | None":
    """Connect to the cluster until `stack` ends; only check its name unless `connect`."""
    from mtp_gguf.publish.cluster import is_cluster, open_cluster  # noqa: PLC0415

    if not is_cluster(text):
        raise typer.BadParameter(
            f"expected tcp://HOST:PORT or local:N, found {text!r}", param_hint="--cluster"
        )
    if not connect:
        return None
    opened = stack.enter_context(open_cluster(text))
    page = f", dashboard at {opened.dashboard}" if opened.dashboard else ""
    say(f"mtp-gguf: {text}: {opened.workers} workers{page}")
    return opened


def _publish_all(
    entries: "Sequence[Entry]", folder: Path | None, options: _Options, cluster: "Cluster | None"
) -> list[dict[str, Any]]:
    """Publish each model; the error of one that fails is printed, and in its result."""
    results: list[dict[str, Any]] = []
    for number, entry in enumerate(entries, 1):
        if not options.as_json:
            typer.echo(f"{number} of {len(entries)}: {printable(entry.source)}")
        try:
            results.append(
                _publish(entry, (folder or Path()) / entry.name, options, cluster, parents=True)
            )
        except (MtpGgufError, OSError) as error:
            text = str(error) if isinstance(error, MtpGgufError) else (error.strerror or str(error))
            known = text.startswith(entry.source)
            say(f"mtp-gguf: {printable(text if known else f'{entry.source}: {text}')}")
            results.append({"source": entry.source, "error": text})
    return results


def _publish(
    entry: "Entry",
    folder: Path,
    options: _Options,
    cluster: "Cluster | None",
    *,
    parents: bool = False,
) -> dict[str, Any]:
    """Publish one model and print what was done, unless --json is for the caller to print."""
    from mtp_gguf.convert.families.target_model import HeadChoice  # noqa: PLC0415  (NumPy and gguf are slow)
    from mtp_gguf.convert.heads.acceptance import is_measured  # noqa: PLC0415
    from mtp_gguf.convert.resolve import open_model  # noqa: PLC0415
    from mtp_gguf.gguf_tools.imatrix import read_imatrix  # noqa: PLC0415
    from mtp_gguf.publish.card import card_of  # noqa: PLC0415
    from mtp_gguf.publish.chart import CHART, draw_acceptance  # noqa: PLC0415
    from mtp_gguf.publish.release import (  # noqa: PLC0415
        measure_files,
        open_record,
        plan_release,
    )
    from mtp_gguf.publish.upload import check_repository  # noqa: PLC0415

    target = entry.repository
    with open_model(
        entry.source,
        options.revision,
        HeadChoice.WITH_TRUNK,
        None,
        vision=True,
        stream=hub_model(entry.source) is not None,
    ) as checkpoint:
        if not options.dry_run:
            _make(folder, parents)
        importance = read_imatrix(options.imatrix) if options.imatrix else None
        release = plan_release(
            entry.source,
            checkpoint,
            options.types,
            folder,
            imatrix=importance,
            sidecar=options.sidecar,
            split=options.split,
            measured=is_measured(no_check=options.no_check) and not options.worker_upload,
        )
        card = str(card_of(release, target))
        if options.dry_run:
            if not options.as_json:
                typer.echo(_text(release, folder))
                typer.echo(_printable_lines(card))
            return _fields(release, card)
        record = open_record(release)
        found = (
            [] if options.no_upload else check_repository(target, record, replace=options.replace)
        )
        try:
            if options.no_upload or not _is_published(release, target, record):
                if options.worker_upload:
                    assert cluster is not None
                    _make_on_workers(release, target, found, record, options, cluster)
                else:
                    _convert(release, record, options.threads, cluster)
            if options.text:
                _measure(release, record, options)
            measure_files(release, record, options.least, CONSOLE, force=options.force)
            picture = draw_acceptance(record.acceptance)
            if picture is not None:
                _write(folder / CHART, picture)
            elif record.acceptance:
                say(
                    "mtp-gguf: the card has no picture without matplotlib: mtp-gguf[publish] has it"
                )
            chart = None if picture is None else CHART
            card = str(card_of(release, target, record.measured, record.acceptance, chart))
            _write(folder / _CARD, card.encode())
            if not options.no_upload:
                _upload(release, target, found, record, options)
        except KeyboardInterrupt:
            raise Interrupted("the same command goes on from here") from None
    if not options.as_json:
        typer.echo(_text(release, PurePosixPath(target) if options.worker_upload else folder))
        for name, warnings in record.diagnosed.items():
            for warning in warnings:
                typer.echo(printable(f"warning: {name}: {warning}"))
        if options.no_upload:
            typer.echo(f"not uploaded: {folder}; the same command without --no-upload uploads it")
        else:
            typer.echo(f"published: https://huggingface.co/{target}")
    return _fields(release, card) | _done(record)


def _types(text: str) -> list[str]:
    """Return the keys of FILE_TYPES that --types names."""
    names = [_mix(name.strip(), "--types") for name in text.split(",")]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise typer.BadParameter(
            f"expected each mix once, found {twice[0]} again", param_hint="--types"
        )
    return names


def _mix(name: str, option: str) -> str:
    """Return the key of FILE_TYPES that an option names, in any case."""
    from mtp_gguf.convert.plans.precision import FILE_TYPES, unknown_name  # noqa: PLC0415

    if name.upper() not in FILE_TYPES:
        raise typer.BadParameter(unknown_name(name, FILE_TYPES), param_hint=option)
    return name.upper()


def _make(folder: Path, parents: bool) -> None:
    try:
        folder.mkdir(exist_ok=True, parents=parents)
    except OSError as error:
        raise OutputError(f"{quoted(folder)}: cannot be made: {error.strerror}") from None


def _convert(
    release: "Release", record: "Record", threads: int | None, cluster: "Cluster | None"
) -> None:
    """Write and examine the files that the record lacks, with progress on standard error."""
    from mtp_gguf.convert.checkpoints.source_rows import SourceRows  # noqa: PLC0415
    from mtp_gguf.convert.pipeline import run  # noqa: PLC0415
    from mtp_gguf.publish.release import diagnose_files, is_converted  # noqa: PLC0415

    if not is_converted(release, record):
        total = sum(plan.size for plan in release.plans)
        with byte_progress("convert", total) as progress:
            run(
                release.plans,
                SourceRows(release.checkpoint),
                progress,
                threads,
                resumable=True,
                carry_out=cluster.carry_out if cluster else None,
            )
        record.converted = {path.name: path.stat().st_size for path in release.paths}
        record.diagnosed.clear()
        record.measured.clear()
        record.acceptance.clear()
        record.save()
    diagnose_files(release, record)


def _is_published(release: "Release", target: str, record: "Record") -> bool:
    """Whether all files are on the hub and were examined, wherever they are here."""
    from mtp_gguf.publish.upload import is_published  # noqa: PLC0415

    examined = {plan.shards[0].path.name for plan in release.models} <= record.diagnosed.keys()
    return examined and is_published(target, [path.name for path in release.paths], record)


def _make_on_workers(
    release: "Release",
    target: str,
    found: "Sequence[str]",
    record: "Record",
    options: _Options,
    cluster: "Cluster",
) -> None:
    """Let the workers write and upload the files that the repository lacks, and examine them."""
    from mtp_gguf.publish.file_units import file_units  # noqa: PLC0415
    from mtp_gguf.publish.release import diagnose_files  # noqa: PLC0415
    from mtp_gguf.publish.upload import open_repository, publish_sent  # noqa: PLC0415

    names = [path.name for path in release.paths]
    private = not options.public
    present = open_repository(target, [*names, _CARD], found, record, private=private)
    done = {n for n in names if n in present and record.uploaded.get(n) == present[n]}
    sizes = {shard.path.name: shard.layout.size for plan in release.plans for shard in plan.shards}
    with byte_progress("convert and upload", sum(sizes.values())) as progress:
        progress(sum(sizes[name] for name in done))
        for name in {*names} - done:
            record.diagnosed.pop(name, None)

        def sent(unit: "FileUnit", operation: "CommitOperationAdd") -> None:
            publish_sent(target, operation, record)
            progress(unit.nbytes)

        cluster.make_files(file_units(release, target, done), sent)
    diagnose_files(release, record, target)


def _upload(
    release: "Release",
    target: str,
    found: "Sequence[str]",
    record: "Record",
    options: _Options,
) -> None:
    """Upload the files that the repository lacks, and remove them here if that is wanted."""
    from mtp_gguf.publish.chart import CHART  # noqa: PLC0415
    from mtp_gguf.publish.upload import open_repository, upload  # noqa: PLC0415

    pictures = [release.folder / CHART] if record.acceptance else []
    paths = [*release.paths, *(path for path in pictures if path.is_file()), release.folder / _CARD]
    names = [path.name for path in paths]
    present = open_repository(target, names, found, record, private=not options.public)
    upload(
        target,
        paths,
        present,
        record,
        lambda path: say(f"mtp-gguf: upload {path.name}, {human_bytes(path.stat().st_size)}"),
    )
    if options.remove_local:
        for path in release.paths:
            path.unlink(missing_ok=True)


def _measure(release: "Release", record: "Record", options: _Options) -> None:
    """Compare the files of all types with that of most bits, unless the record has the figures."""
    from mtp_gguf.gguf_tools.machine.process_memory import free_memory  # noqa: PLC0415

    plans = sorted(release.models, key=lambda plan: -plan.size)
    key = sha256(f"{options.chunks} {options.text}".encode()).hexdigest()
    if record.measured.get("text") == key or len(plans) < 2:
        return
    if not all(path.is_file() for path in release.paths):
        say(f"mtp-gguf: {release.source}: not measured: its files were removed after the upload")
        return
    if plans[0].size > free_memory():
        say(
            f"mtp-gguf: {release.source}: not measured: {plans[0].quant} needs "
            f"{human_bytes(plans[0].size)} of memory, and {human_bytes(free_memory())} are free"
        )
        return
    reference, *files = (plan.shards[0].path for plan in plans)
    measured = measure_quality(
        reference,
        files,
        options.text,
        context=_CONTEXT,
        chunks=options.chunks,
        base=None,
        drafting=True,
        threads=options.threads,
        gpu_layers=0,
        quiet=options.as_json,
    )
    every = measured.candidates[0].HEADS
    at = [index for index, head in enumerate(every) if head not in _NOT_IN_CARD]
    record.measured = {
        "text": key,
        "reference": reference.name,
        "tokens": measured.candidates[0].divergence.tokens,
        "heads": [every[index] for index in at],
        "rows": {c.name: [c.cells()[index] for index in at] for c in measured.candidates},
    }
    record.save()


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None


def _text(release: "Release", place: PurePath) -> str:
    """Return the files and their sizes. place: the folder or repository that they are in."""
    lines = [
        f"{place / shard.path.name}: {plan.quant}, {human_bytes(shard.layout.size)}"
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
