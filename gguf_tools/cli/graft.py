"""`mtp-gguf graft`."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .. import transplant
from ..errors import RequestError
from ..fastmtp import DraftLayout
from ..fit import check_fit
from ..output import check_output
from ..remote import hub_model, is_remote, open_any_model
from ..surgery import Model, open_model
from .console import byte_progress, reports_errors
from .draft_options import DraftOptions
from .head_options import (
    HEAD,
    FastMtp,
    FastMtpCorpus,
    FastMtpIds,
    MtpF16,
    Overwrite,
    Revision,
)
from .written import output_path, report_file, write_file


@reports_errors
def graft(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="GGUF without a head (any shard).")],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Where the head is: hub id or folder of the original, a GGUF, or an mtp- file.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File or folder to write to [BASE-MTP.gguf]."),
    ] = None,
    mtp_f16: MtpF16 = False,
    mtp_type: Annotated[
        str | None,
        typer.Option(
            "--mtp-type",
            rich_help_panel=HEAD,
            help="Type of the head's matrices [Q8_0]; a GGUF's head is copied as it is.",
        ),
    ] = None,
    fastmtp: FastMtp = None,
    fastmtp_corpus: FastMtpCorpus = None,
    fastmtp_ids: FastMtpIds = None,
    revision: Revision = None,
    overwrite: Overwrite = False,
) -> None:
    """Put an MTP head onto a GGUF that has none, at the price of the head.

    Most GGUFs were made without their head. This takes it from the original checkpoint (the head
    alone is read and converted), or from another GGUF of the same model, whatever its type. The
    base may be of any quantization and in shards; its tensors are copied byte for byte, so it
    writes the same text as before. The result is what converting with the head would give.

    The head must belong to the model: sizes, layers and vocabulary are checked. A head of another
    fine-tune passes these checks and drafts badly.

    **Examples**

    mtp-gguf graft Qwen3.5-9B-Q4_K_M.gguf --from Qwen/Qwen3.5-9B --mtp-f16 --fastmtp

    mtp-gguf graft base.gguf --from mtp-Qwen3.5-9B.gguf -o with-head.gguf
    """
    draft = DraftOptions.parse(fastmtp, fastmtp_corpus, fastmtp_ids)
    if mtp_f16 and mtp_type and mtp_type.upper() != "F16":
        raise typer.BadParameter("--mtp-f16 and another --mtp-type contradict each other")
    head_type = "F16" if mtp_f16 else mtp_type
    target = output_path(output, base, "{}-MTP")
    with open_model(base) as opened:
        transplant.check_takes_a_head(opened)
        sources = [*opened.paths, *draft.files]
        if Path(source).is_file() or (is_remote(source) and not hub_model(source)):
            if head_type or revision:
                raise typer.BadParameter(
                    "--mtp-type, --mtp-f16 and --revision are for checkpoints; "
                    "a GGUF's head is copied as it is"
                )
            with open_any_model(source) as donor:
                keys = draft.ranked_for(opened).metadata(with_ids=True) if draft.wanted else None
                assembly = transplant.graft(opened, donor, keys)
                write_file("graft", assembly, target, [*sources, *_local(donor)], overwrite)
        else:
            check_output(target, sources, overwrite)
            with _converted_head(opened, source, revision, head_type, draft, target) as donor:
                assembly = transplant.graft(opened, donor)
                write_file("graft", assembly, target, sources, overwrite)
    report_file(target, "mtp-gguf list-tensors {} --mtp")


def _local(model: Model) -> list[Path]:
    return [] if is_remote(str(model.path)) else model.paths


@contextmanager
def _converted_head(
    base: Model,
    source: str,
    revision: str | None,
    head_type: str | None,
    draft: DraftOptions,
    target: Path,
) -> Iterator[Model]:
    """The head of a checkpoint, converted into a temporary file beside the output."""
    from mtp_gguf.convert.family import HeadChoice  # noqa: PLC0415  (NumPy and gguf are slow)
    from mtp_gguf.convert.head_donor import plan_head  # noqa: PLC0415
    from mtp_gguf.convert.hub import looks_like_hub_id  # noqa: PLC0415
    from mtp_gguf.convert.hub_checkpoint import (  # noqa: PLC0415
        open_hub_checkpoint,
        remote_head_bytes,
        with_local_head,
    )
    from mtp_gguf.convert.pipeline import run  # noqa: PLC0415
    from mtp_gguf.convert.plan import DraftRequest, Request  # noqa: PLC0415
    from mtp_gguf.convert.precision import parse_tensor_type  # noqa: PLC0415
    from mtp_gguf.convert.resolve import model_name  # noqa: PLC0415
    from mtp_gguf.convert.resolve import open_model as open_checkpoint  # noqa: PLC0415
    from mtp_gguf.convert.source_rows import SourceRows  # noqa: PLC0415

    try:
        kind = parse_tensor_type(head_type or "Q8_0", "--mtp-type")
    except RequestError as error:
        raise typer.BadParameter(str(error)) from None
    hub_id, named_revision = hub_model(source) or (source, None)
    if looks_like_hub_id(hub_id):
        opened = open_hub_checkpoint(hub_id, revision or named_revision, HeadChoice.ALONE)
    else:
        opened = open_checkpoint(source, revision, HeadChoice.ALONE, None)
    with opened as checkpoint:
        request = Request(
            quant=_vehicle(base),
            head=HeadChoice.ALONE,
            head_type=kind,
            draft=DraftRequest(DraftLayout.IDS, draft.size, draft.corpus, draft.ids_file)
            if draft.wanted
            else None,
            tokenizer_pre=_pre_tokenizer(base),
            model_name=model_name(hub_id),
            output=target,
        )
        with tempfile.TemporaryDirectory(prefix=".mtp-gguf-", dir=target.parent) as folder:
            planned = plan_head(checkpoint, request, Path(folder) / "head.gguf", source)
            check_fit(base, planned.preview)
            for note in planned.plan.notes:
                if "draft vocabulary" in note:
                    typer.echo(f"note: {note}", err=True)
            with byte_progress("fetch the head", remote_head_bytes(checkpoint)) as progress:
                whole = with_local_head(checkpoint, Path(folder) / "mtp.safetensors", progress)
            with whole, byte_progress("convert the head", planned.plan.size) as progress:
                run((planned.plan,), SourceRows(whole), progress)
            with open_model(planned.plan.shards[0].path) as head:
                yield head


def _vehicle(base: Model) -> str:
    """The mix under which the head is converted, its own type given.

    Which one matters for rows that the head's type does not divide: files that are not quantized
    fall back to F16, others to what llama-quantize takes.
    """
    return "F16" if base.first.scalar("general.file_type") in (0, 1, 32) else "Q4_K_M"


def _pre_tokenizer(base: Model) -> str | None:
    """The base's pre-tokenizer, so that a checkpoint whose split is not known here can serve."""
    held = base.first.scalar("tokenizer.ggml.pre")
    return held if isinstance(held, str) else None
