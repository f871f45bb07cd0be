"""`mtp-gguf convert`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mtp_gguf.convert.options import (
    BPW_RANGE,
    DEFAULT_LAYOUT,
    DEFAULT_QUANT,
    LEAST_KLD,
    PREFERENCES,
)
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.gguf_tools.heads.acceptance import LEAST
from mtp_gguf.gguf_tools.heads.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.machine.text import printable
from mtp_gguf.gguf_tools.model import list_tensors as read_listing

from . import options
from .console import CONSOLE
from .file_report import describe_head, describe_tower
from .plan_report import (
    choice_text,
    heads_text,
    kernel_text,
    kernels,
    plan_json,
    plan_text,
    summary_json,
    summary_text,
)
from .progress import reports_errors

# Options in panels of the help.
_precision = partial(typer.Option, rich_help_panel="Precision")
_vision = partial(typer.Option, rich_help_panel="Vision tower")


def _complete_mix(incomplete: str) -> list[str]:
    from mtp_gguf.convert.plans.precision import FILE_TYPES  # noqa: PLC0415  (NumPy and gguf are slow)

    return [name for name in FILE_TYPES if name.startswith(incomplete)]


def _complete_type(incomplete: str) -> list[str]:
    return [name for name in (*BY_NAME, "auto") if name.startswith(incomplete)]


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
        options.output_option("Write to this file or folder (default: here, named after MODEL)."),
    ] = None,
    quant: Annotated[
        str,
        _precision(
            "--quant",
            metavar="MIX",
            help="Quantize the base to this mix of llama-quantize.",
            autocompletion=_complete_mix,
        ),
    ] = DEFAULT_QUANT,
    also: Annotated[
        list[str] | None,
        _precision(
            "--also",
            metavar="MIX,…",
            help="Also write a file in each of these mixes, reading MODEL once; repeatable.",
        ),
    ] = None,
    mtp_f16: options.MtpF16 = False,
    mtp_type: Annotated[
        str | None,
        options.head_type_option(
            "Store the head's matrices in this type, or with auto in the fastest here "
            "(default: Q8_0; as an unquantized base).",
            metavar="TYPE",
            autocompletion=_complete_type,
        ),
    ] = None,
    head_costs: Annotated[
        Path | None,
        options.head_option(
            "--head-costs",
            metavar="FILE",
            help="With --mtp-type auto: take what drafts cost from this file, measured on another "
            "machine; if there is no such file, write what is measured here to it, also in a "
            "--dry-run.",
        ),
    ] = None,
    no_mtp: Annotated[
        bool, options.head_option("--no-mtp", help="Leave out the MTP head.")
    ] = False,
    head_only: Annotated[
        bool,
        options.head_option(
            "--head-only",
            help="Write only the head, an mtp- file for llama-server's -md.",
        ),
    ] = False,
    mtp_from: Annotated[
        str | None,
        options.head_option(
            "--from",
            metavar="MODEL",
            help="Take the head from this model: folder, OWNER/NAME, or GGUF.",
        ),
    ] = None,
    tensor_type: Annotated[
        list[str] | None,
        _precision(
            "--tensor-type",
            metavar="REGEX=TYPE",
            help="Store the tensors that match REGEX in TYPE; repeatable.",
        ),
    ] = None,
    target_size: Annotated[
        str | None,
        _precision(
            "--target-size",
            metavar="N(K|M|G)",
            help="Choose types that differ least from MODEL in a file of at most this size: bytes, "
            "or thousands (K), millions (M) or billions (G) of them.",
        ),
    ] = None,
    target_bpw: Annotated[
        float | None,
        _precision(
            "--target-bpw",
            min=BPW_RANGE[0],
            max=BPW_RANGE[1],
            help="Choose types with at most N bits per weight in all.",
        ),
    ] = None,
    target_kld: Annotated[
        float | None,
        _precision(
            "--target-kld",
            min=LEAST_KLD,
            help="Choose types for the smallest file with this mean KL divergence (nats).",
        ),
    ] = None,
    target_text: Annotated[
        list[Path] | None,
        _precision(
            "--target-text",
            metavar="FILE…",
            help="Measure on these texts, for a target or --mtp-type auto (default: a built-in "
            "one).",
        ),
    ] = None,
    prefer: Annotated[
        str | None,
        _precision(
            "--prefer",
            metavar="|".join(PREFERENCES),
            help="With a target: only choose types that have kernels on this CPU (speed).",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        _precision(
            "--recipe",
            metavar="FILE",
            help="Take the types of tensors from this file; with a target, write them to it, also "
            "in a --dry-run.",
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        _precision(
            "--imatrix",
            metavar="FILE",
            help="Quantize by this importance matrix of llama-imatrix (GGUF or .dat).",
        ),
    ] = None,
    fastmtp: options.FastMtp = None,
    fastmtp_layout: Annotated[
        DraftLayout,
        typer.Option(
            "--fastmtp-layout",
            rich_help_panel=options.DRAFT,
            help="Store the draft vocabulary as ids in the metadata, or with its own rows.",
        ),
    ] = DEFAULT_LAYOUT,
    fastmtp_corpus: options.FastMtpCorpus = None,
    fastmtp_ids: options.FastMtpIds = None,
    mmproj: Annotated[
        str | None,
        _vision(
            "--mmproj",
            metavar="[TYPE]",
            help="Also write the vision tower: F16, BF16, F32 or Q8_0 (default: F16).",
            autocompletion=_complete_type,
        ),
    ] = None,
    mmproj_only: Annotated[
        bool,
        _vision(
            "--mmproj-only",
            help="Write only the vision tower, an mmproj file for llama.cpp.",
        ),
    ] = False,
    sidecar: Annotated[
        str | None,
        options.head_option(
            "--sidecar",
            metavar="MIX",
            help="Also write the head by itself in this mix, an mtp- file for llama-server's -md.",
            autocompletion=_complete_mix,
        ),
    ] = None,
    revision: options.Revision = None,
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
    threads: options.Threads = None,
    overwrite: options.Overwrite = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print sources, targets, types and sizes; write nothing."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Report which types are quantized by which kernels.")
    ] = False,
    no_check: options.NoCheck = False,
    least_acceptance: options.LeastAcceptance = LEAST,
    force: options.Force = False,
    as_json: options.AsJson = False,
) -> None:
    """Convert a checkpoint to one GGUF that includes its MTP head.

    The final file is written in one pass over the safetensors files, in mixed precision: the base
    in the mix that llama-quantize would use, the head in its own type: Q8_0, or with
    --quant F16, BF16 or F32 that of the base, unless --mtp-type names one. Instead of a checkpoint,
    MODEL can be a GGUF in 16 or 32 bits. With a target, the types of the trunk are chosen by
    measuring what each costs (docs/precision.md). A head in a type of fewer than 8 bits is compared
    with the source's by the acceptance rate: more than 5 points fewer are a warning, more than 25
    an error. The finished file is run for at most a minute, and the acceptance rate of its head is
    stored in it (docs/acceptance.md). --mmproj writes the vision tower, too, into
    a file of its own beside the model.

    **Examples**

    mtp-gguf convert Qwen/Qwen3.5-4B --mtp-f16 --fastmtp

    mtp-gguf convert ./Qwen3.5-4B -o out.gguf --quant Q5_K_M --mtp-type Q8_0 --imatrix i.gguf

    mtp-gguf convert ./Qwen3.5-4B --fastmtp 16384 --fastmtp-corpus notes.txt --dry-run

    mtp-gguf convert Qwen3.5-4B-BF16.gguf --also Q5_K_M,Q8_0

    mtp-gguf convert Qwen3.5-4B-BF16.gguf --imatrix imatrix.gguf --target-size 2400M

    mtp-gguf convert Qwen/Qwen3.5-4B --mmproj
    """
    from mtp_gguf.convert.api import Converted  # noqa: PLC0415  (NumPy and gguf are slow)
    from mtp_gguf.convert.api import convert as make  # noqa: PLC0415
    from mtp_gguf.convert.conversion import is_gguf  # noqa: PLC0415

    found = None

    def show(result: Converted) -> None:
        nonlocal found
        if result.choice:
            typer.echo(choice_text(*result.choice, curve=dry_run), err=True)
        if result.heads:
            typer.echo(heads_text(result.heads), err=True)
        found = kernels(result.plans) if verbose else None
        if found and not as_json:
            typer.echo(kernel_text(found), err=True)

    if (fastmtp or fastmtp_corpus or fastmtp_ids) and is_gguf(model):
        from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415

        tell_crashes()  # llama.cpp reads its vocabulary
    result = make(
        model,
        output,
        quant=quant,
        also=[mix for mixes in also or () for mix in mixes.split(",")],
        mtp_f16=mtp_f16,
        mtp_type=mtp_type,
        no_mtp=no_mtp,
        head_only=head_only,
        mtp_from=mtp_from,
        tensor_type=tensor_type or (),
        target_size=options.parse_bytes(target_size, "--target-size") if target_size else None,
        target_bpw=target_bpw,
        target_kld=target_kld,
        target_text=target_text or (),
        prefer=prefer,
        head_costs=head_costs,
        recipe=recipe,
        imatrix=imatrix,
        fastmtp=fastmtp,
        fastmtp_layout=fastmtp_layout,
        fastmtp_corpus=fastmtp_corpus or (),
        fastmtp_ids=fastmtp_ids,
        mmproj=mmproj,
        mmproj_only=mmproj_only,
        sidecar=sidecar,
        revision=revision,
        tokenizer_pre=tokenizer_pre,
        split_max_size=options.parse_bytes(split_max_size) if split_max_size else None,
        stream=stream,
        threads=threads,
        overwrite=overwrite,
        dry_run=dry_run,
        no_check=no_check,
        least_acceptance=least_acceptance,
        force=force,
        progress=CONSOLE,
        on_plan=show,
    )
    plans, outcome = result.plans, result.outcome
    if outcome is None:
        typer.echo(plan_json(plans, found) if as_json else plan_text(plans))
        return
    if as_json:
        typer.echo(summary_json(plans, outcome, found, result.warnings, result.acceptance))
        return
    listings = [read_listing(plan.shards[0].path) for plan in plans]
    towers = [describe_tower(listing.tower) for listing in listings if listing.tower]
    report = listings[0].head
    assert report is not None
    abilities = towers if mmproj_only else [describe_head(report), *towers]
    abilities += [printable(check.text) for check in result.acceptance.values()]
    abilities += [f"warning: {warning}" for warning in result.warnings]
    typer.echo(summary_text(plans, outcome, report, abilities))
