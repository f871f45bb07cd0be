"""`mtp-gguf convert`."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.model import list_tensors as read_listing
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.output import check_output
from mtp_gguf.gguf_tools.tensor_types import BY_NAME

from .checkpoint_head import head_in_type
from .convert_model import Planned, is_gguf, planned
from .head_gate import HeadGate, gate_type, is_small, measurable, refuse
from .options import (
    DRAFT,
    HEAD,
    AsJson,
    DraftOptions,
    FastMtp,
    FastMtpCorpus,
    FastMtpIds,
    Force,
    MtpF16,
    NoCheck,
    Overwrite,
    Revision,
    Threads,
    parse_bytes,
    parse_gguf_output,
)
from .plan_report import kernel_text, kernels, plan_json, plan_text, summary_json, summary_text
from .progress import byte_progress, leaves_nothing, reports_errors
from .target_mix import Target, choose_types, report_choice
from .written import head_verdict, head_warnings, tower_verdict

if TYPE_CHECKING:
    from mtp_gguf.convert.pipeline import Outcome

# Panels of the help.
_PRECISION, _VISION = "Precision", "Vision tower"


def _complete_mix(incomplete: str) -> list[str]:
    from mtp_gguf.convert.precision import FILE_TYPES  # noqa: PLC0415  (NumPy and gguf are slow)

    return [name for name in FILE_TYPES if name.startswith(incomplete)]


def _complete_type(incomplete: str) -> list[str]:
    return [name for name in BY_NAME if name.startswith(incomplete)]


@reports_errors
def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint: a folder or OWNER/NAME on the hub; or a GGUF in 16 or 32 bits.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            parser=parse_gguf_output,
            help="Write to this file or folder (default: here, named after MODEL).",
        ),
    ] = None,
    quant: Annotated[
        str,
        typer.Option(
            "--quant",
            metavar="MIX",
            rich_help_panel=_PRECISION,
            help="Quantize the base to this mix of llama-quantize.",
            autocompletion=_complete_mix,
        ),
    ] = "Q4_K_M",
    also: Annotated[
        str | None,
        typer.Option(
            "--also",
            metavar="MIX,…",
            rich_help_panel=_PRECISION,
            help="Also write a file in each of these mixes, reading MODEL once.",
        ),
    ] = None,
    mtp_f16: MtpF16 = False,
    mtp_type: Annotated[
        str | None,
        typer.Option(
            "--mtp-type",
            metavar="TYPE",
            rich_help_panel=HEAD,
            help="Store the head's matrices in this type (default: Q8_0; as an unquantized base).",
            autocompletion=_complete_type,
        ),
    ] = None,
    no_mtp: Annotated[
        bool, typer.Option("--no-mtp", rich_help_panel=HEAD, help="Leave out the MTP head.")
    ] = False,
    head_only: Annotated[
        bool,
        typer.Option(
            "--head-only",
            rich_help_panel=HEAD,
            help="Write only the head, an mtp- file for llama-server's -md.",
        ),
    ] = False,
    mtp_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            rich_help_panel=HEAD,
            help="Take the head from this model: folder, OWNER/NAME, or GGUF.",
        ),
    ] = None,
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor-type",
            metavar="REGEX=TYPE",
            rich_help_panel=_PRECISION,
            help="Store the tensors that match REGEX in TYPE; repeatable.",
        ),
    ] = None,
    target_size: Annotated[
        str | None,
        typer.Option(
            "--target-size",
            metavar="N(K|M|G)",
            rich_help_panel=_PRECISION,
            help="Choose types that differ least from MODEL in a file of at most this size.",
        ),
    ] = None,
    target_bpw: Annotated[
        float | None,
        typer.Option(
            "--target-bpw",
            min=1.0,
            max=16.0,
            rich_help_panel=_PRECISION,
            help="Choose types with at most N bits per weight in all.",
        ),
    ] = None,
    target_kld: Annotated[
        float | None,
        typer.Option(
            "--target-kld",
            min=1e-9,
            rich_help_panel=_PRECISION,
            help="Choose types for the smallest file with this mean KL divergence (nats).",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="FILE",
            rich_help_panel=_PRECISION,
            help="Take the types of tensors from this file; with a target, write them to it, also "
            "in a --dry-run.",
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(
            "--imatrix",
            metavar="FILE",
            rich_help_panel=_PRECISION,
            help="Quantize by this importance matrix of llama-imatrix (GGUF or .dat).",
        ),
    ] = None,
    fastmtp: FastMtp = None,
    fastmtp_layout: Annotated[
        DraftLayout,
        typer.Option(
            "--fastmtp-layout",
            rich_help_panel=DRAFT,
            help="Store the draft vocabulary as ids in the metadata, or with its own rows.",
        ),
    ] = DraftLayout.IDS,
    fastmtp_corpus: FastMtpCorpus = None,
    fastmtp_ids: FastMtpIds = None,
    mmproj: Annotated[
        str | None,
        typer.Option(
            "--mmproj",
            metavar="[TYPE]",
            rich_help_panel=_VISION,
            help="Also write the vision tower: F16, BF16, F32 or Q8_0 (default: F16).",
            autocompletion=_complete_type,
        ),
    ] = None,
    mmproj_only: Annotated[
        bool,
        typer.Option(
            "--mmproj-only",
            rich_help_panel=_VISION,
            help="Write only the vision tower, an mmproj file for llama.cpp.",
        ),
    ] = False,
    revision: Revision = None,
    tokenizer_pre: Annotated[
        str | None,
        typer.Option(
            "--tokenizer-pre",
            metavar="NAME",
            help="Use llama.cpp's pre-tokenizer NAME (default: detected from the tokenizer).",
        ),
    ] = None,
    split_max_size: Annotated[
        str | None,
        typer.Option(
            "--split-max-size",
            metavar="N(K|M|G)",
            help="Split the output into shards of at most this size.",
        ),
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Read weights on the hub by ranges, without a copy (default: if the disk lacks "
            "room).",
        ),
    ] = None,
    threads: Threads = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print sources, targets, types and sizes; write nothing."),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Report which types are quantized by which kernels."),
    ] = False,
    no_check: NoCheck = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint to one GGUF that includes its MTP head.

    The final file is written in one pass over the safetensors files, in mixed precision: the base
    in the mix that llama-quantize would use, the head in its own type: Q8_0, or with
    --quant F16, BF16 or F32 that of the base, unless --mtp-type names one. Instead of a checkpoint,
    MODEL can be a GGUF in 16 or 32 bits. With a target, the types of the trunk are chosen by
    measuring what each costs (docs/precision.md). A head in a type of fewer than 8 bits is compared
    with the source's by the acceptance rate: more than 5 points fewer are a warning, more than 25
    an error. --mmproj writes the vision tower, too, into
    a file of its own beside the model.

    **Examples**

    mtp-gguf convert Qwen/Qwen3.5-4B --mtp-f16 --fastmtp

    mtp-gguf convert ./Qwen3.5-4B -o out.gguf --quant Q5_K_M --mtp-type Q8_0 --imatrix i.gguf

    mtp-gguf convert ./Qwen3.5-4B --fastmtp 16384 --fastmtp-corpus notes.txt --dry-run

    mtp-gguf convert Qwen3.5-4B-BF16.gguf --also Q5_K_M,Q8_0

    mtp-gguf convert Qwen3.5-4B-BF16.gguf --imatrix imatrix.gguf --target-size 2400M

    mtp-gguf convert Qwen/Qwen3.5-4B --mmproj
    """
    from mtp_gguf.convert.blueprint import HeadChoice  # noqa: PLC0415  (NumPy and gguf are slow)
    from mtp_gguf.convert.mix import exact_overrides, read_recipe, write_recipe  # noqa: PLC0415
    from mtp_gguf.convert.plan import DraftRequest, Request  # noqa: PLC0415
    from mtp_gguf.convert.plan_mmproj import MMPROJ_TYPES, parse_mmproj_type  # noqa: PLC0415
    from mtp_gguf.convert.precision import parse_override, parse_tensor_type  # noqa: PLC0415
    from mtp_gguf.gguf_tools.imatrix import read_imatrix  # noqa: PLC0415

    precisions = _precisions(quant, also)
    if mtp_f16 and mtp_type and mtp_type.upper() != "F16":
        raise typer.BadParameter("--mtp-f16 and another --mtp-type contradict each other")
    draft = DraftOptions.parse(fastmtp, fastmtp_corpus, fastmtp_ids)
    if no_mtp and (head_only or mtp_from or mtp_f16 or mtp_type or draft.wanted):
        raise typer.BadParameter("--no-mtp cannot be combined with other options for the head")
    sidecar = fastmtp_layout is DraftLayout.SIDECAR
    if fastmtp_layout is not DraftLayout.IDS and not draft.wanted:
        raise typer.BadParameter(f"--fastmtp-layout {fastmtp_layout.value} needs --fastmtp")
    head = HeadChoice.WITH_TRUNK
    if head_only or sidecar:
        head = HeadChoice.ALONE
    elif no_mtp:
        head = HeadChoice.NONE
    if mmproj_only:
        others = (head_only, no_mtp, mtp_from, draft.wanted, mtp_f16, mtp_type, also, imatrix)
        if any((*others, tensor_type, split_max_size)):
            raise typer.BadParameter(
                "--mmproj-only cannot be combined with options for the language model"
            )
        head = HeadChoice.VISION
        mmproj = mmproj or MMPROJ_TYPES[0]
    try:
        mtp_type = "F16" if mtp_f16 else mtp_type
        head_type = parse_tensor_type(mtp_type, "--mtp-type") if mtp_type else None
        overrides = tuple(parse_override(text) for text in tensor_type or ())
        tower_type = parse_mmproj_type(mmproj) if mmproj else None
    except RequestError as error:
        raise typer.BadParameter(str(error)) from None
    shard_size = parse_bytes(split_max_size) if split_max_size else None
    target = Target(
        parse_bytes(target_size, "--target-size") if target_size else None, target_bpw, target_kld
    )
    if [target_size, target_bpw, target_kld].count(None) < 2:
        raise typer.BadParameter(
            "--target-size, --target-bpw and --target-kld contradict each other"
        )
    if (target.wanted or recipe) and (also or head_only or sidecar or mmproj_only):
        raise typer.BadParameter(
            "a target or --recipe cannot be combined with --also, --mmproj-only or a head alone"
        )
    importance = read_imatrix(imatrix) if imatrix else None
    request = Request(
        quant=precisions[0],
        also=precisions[1:],
        mmproj=tower_type,
        head=head,
        head_type=head_type,
        overrides=overrides,
        imatrix=importance,
        draft=DraftRequest(fastmtp_layout, draft.size, draft.corpus, draft.ids_file)
        if draft.wanted
        else None,
        tokenizer_pre=tokenizer_pre,
        split_max_size=shard_size,
        output=output,
    )
    if target.wanted:
        if recipe:
            check_output(recipe, [], overwrite)
        choice, knapsack = choose_types(model, request, target, imatrix, threads)
        report_choice(choice, knapsack, curve=dry_run)
        types = choice.types
        if recipe:
            write_recipe(recipe, choice)
    else:
        types = read_recipe(recipe) if recipe else {}
    request = replace(request, overrides=(*request.overrides, *exact_overrides(types)))
    with planned(model, revision, mtp_from, request, stream) as conversion:
        plans = conversion.plans
        found = kernels(plans) if verbose else None
        if found and not as_json:
            typer.echo(kernel_text(found), err=True)
        if dry_run:
            typer.echo(plan_json(plans, found) if as_json else plan_text(plans))
            return
        sources = [*conversion.sources, *draft.files, *([imatrix] if imatrix else [])]
        outputs = [shard.path for plan in plans for shard in plan.shards]
        for path in outputs:
            check_output(path, sources, overwrite)
        with leaves_nothing(*outputs, resumes=conversion.resumes):
            outcome = _run(conversion, threads)
    warnings = head_warnings(plans[0].shards[0].path)
    if head_type and head is HeadChoice.WITH_TRUNK and not no_check and len(outputs) == 1:
        gate = _compared(outputs[0], mtp_from or model, revision, head_type.name)
        if gate:
            refuse(gate, force=force, written=outputs[0])
            warnings = [*warnings, *gate.warnings()]
    if as_json:
        typer.echo(summary_json(plans, outcome, found, warnings))
        return
    listings = [read_listing(plan.shards[0].path) for plan in plans]
    towers = [tower_verdict(listing.tower) for listing in listings if listing.tower]
    report = listings[0].head
    assert report is not None
    abilities = towers if mmproj_only else [head_verdict(report), *towers]
    abilities += [f"warning: {warning}" for warning in warnings]
    typer.echo(summary_text(plans, outcome, report, abilities))


def _compared(path: Path, source: str, revision: str | None, head_type: str) -> HeadGate | None:
    """Compare the head of a written file, if its type is small, with that of its source."""
    if not is_small(head_type) or is_gguf(source):
        return None
    with open_model(path) as written:
        if not measurable(written):
            return None
        convert = partial(head_in_type, written, source, revision, path)
        return gate_type(path, None, head_type, convert)


def _precisions(quant: str, also: str | None) -> tuple[str, ...]:
    """Return the names of the requested mixes, that of the first file first."""
    from mtp_gguf.convert.precision import FILE_TYPES, unknown_name  # noqa: PLC0415

    asked = [
        ("--quant", quant),
        *(("--also", name) for name in (also.split(",") if also is not None else ())),
    ]
    for option, name in asked:
        if name.upper() not in FILE_TYPES:
            raise typer.BadParameter(unknown_name(name, FILE_TYPES), param_hint=option)
    names = tuple(name.upper() for _, name in asked)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise typer.BadParameter(
            f"expected each mix once, including that of --quant; found {twice[0]} again",
            param_hint="--also",
        )
    return names


def _run(conversion: Planned, threads: int | None) -> "Outcome":
    """Write the files, with progress on standard error."""
    from mtp_gguf.convert.pipeline import run  # noqa: PLC0415
    from mtp_gguf.convert.source_rows import SourceRows  # noqa: PLC0415
    from mtp_gguf.gguf_tools.system import CoreMeter  # noqa: PLC0415

    total = sum(plan.size for plan in conversion.plans)
    meter = CoreMeter()

    def busy() -> str:
        return f"{meter.cores} cores {meter.share():.0%} busy"

    rows = SourceRows(conversion.weights)
    with byte_progress("convert", total, busy) as progress:
        return run(conversion.plans, rows, progress, threads, resumable=conversion.resumes)
