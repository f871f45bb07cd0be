"""`mtp-gguf graft`."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mtp_gguf.gguf_tools import transplant
from mtp_gguf.gguf_tools.doctor import original_of
from mtp_gguf.gguf_tools.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.model import Model
from mtp_gguf.gguf_tools.output import check_output
from mtp_gguf.gguf_tools.resolve import names_gguf, open_any_model
from mtp_gguf.gguf_tools.shell import quoted

from .acceptance import AcceptanceCheck, acceptance_lines, check_acceptance
from .checkpoint_head import converted_head, head_in_type
from .head_gate import HeadGate, gate_donor, gate_type, is_small, measurable, refuse
from .options import (
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
    check_revision,
    parse_gguf_output,
)
from .progress import leaves_nothing, reports_errors
from .written import file_fields, head_of, local_files, output_path, report_file, write_file


@reports_errors
def graft(
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE",
            help="GGUF without a head (any shard); also OWNER/NAME:QUANT or hf://OWNER/NAME/FILE "
            "on the hub, https://….",
        ),
    ],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Take the head from the original (folder, OWNER/NAME), a GGUF, or an mtp- file.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            parser=parse_gguf_output,
            help="Write to this file or folder (default: BASE-MTP.gguf).",
        ),
    ] = None,
    mtp_f16: MtpF16 = False,
    mtp_type: Annotated[
        str | None,
        typer.Option(
            "--mtp-type",
            rich_help_panel=HEAD,
            help="Store the head's matrices in this type (default: Q8_0); a GGUF's head is copied "
            "as it is.",
        ),
    ] = None,
    fastmtp: FastMtp = None,
    fastmtp_corpus: FastMtpCorpus = None,
    fastmtp_ids: FastMtpIds = None,
    revision: Revision = None,
    overwrite: Overwrite = False,
    no_check: NoCheck = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Add an MTP head to a GGUF that has none.

    Most GGUFs were converted without their head. The head is taken from the original checkpoint
    (only the head is read and converted), or from another GGUF of the same model, whatever its
    type. The base may have any quantization and be sharded; its tensors are copied byte for byte,
    so it generates the same text as before. A remote base is downloaded once, into the output. The
    result is the same as converting with the head.

    The head must belong to the model: sizes, layers and vocabulary are checked. A head of another
    fine-tune passes these checks and has a low acceptance rate. The finished file is therefore
    loaded, and the acceptance rate of first drafts on a short text is measured. A head in a type
    of fewer than 8 bits is first compared with the source's head, and the head of another whole
    GGUF with itself in that file: more than 5 points fewer are a warning, more than 25 an error.

    **Examples**

    mtp-gguf graft Qwen3.5-9B-Q4_K_M.gguf --from Qwen/Qwen3.5-9B --mtp-f16 --fastmtp

    mtp-gguf graft base.gguf --from mtp-Qwen3.5-9B.gguf -o with-head.gguf
    """
    draft = DraftOptions.parse(fastmtp, fastmtp_corpus, fastmtp_ids)
    if mtp_f16 and mtp_type and mtp_type.upper() != "F16":
        raise typer.BadParameter("--mtp-f16 and another --mtp-type contradict each other")
    head_type = "F16" if mtp_f16 else mtp_type
    from_gguf = names_gguf(source)
    if from_gguf and (head_type or revision):
        raise typer.BadParameter(
            "--mtp-type, --mtp-f16 and --revision are for checkpoints; "
            "a GGUF's head is copied as it is"
        )
    if not from_gguf:
        check_revision(source, revision)
    with open_any_model(base) as opened:
        transplant.check_takes_a_head(opened)
        target = output_path(output, opened, "{}-MTP")
        sources = [*local_files(opened), *draft.files]
        check_output(target, sources, overwrite)
        gate: HeadGate | None = None
        with leaves_nothing(target):
            if from_gguf:
                with open_any_model(source) as donor:
                    keys = None
                    if draft.wanted:
                        ranked = draft.ranked_for(_tokenizer_of(opened, donor, draft))
                        if ranked.warning:
                            typer.echo(f"note: {ranked.warning}", err=True)
                        keys = ranked.metadata(with_ids=True)
                    spec = transplant.graft(opened, donor, keys)
                    if not no_check and measurable(opened) and measurable(donor):
                        gate = gate_donor(opened.paths[0], donor.paths[0])
                    refuse(gate, force=force)
                    write_file("graft", spec, target, [*sources, *local_files(donor)], overwrite)
            else:
                with converted_head(opened, source, revision, head_type, draft, target) as donor:
                    spec = transplant.graft(opened, donor)
                    if not no_check and head_type and is_small(head_type) and measurable(opened):
                        convert = partial(head_in_type, opened, source, revision, target)
                        gate = gate_type(opened.paths[0], donor.paths[0], head_type, convert)
                    refuse(gate, force=force)
                    write_file("graft", spec, target, sources, overwrite)
        original = original_of(opened)
    check = None if no_check else _checked(target)
    if as_json:
        fields = file_fields(target) | {
            "acceptance": check.fields() if check else None,
            "compared": gate.fields() if gate else None,
        }
        typer.echo(json.dumps(fields, indent=1))
        return
    report_file(target)
    for warning in gate.warnings() if gate else ():
        typer.echo(f"warning: {warning}")
    if check:
        for line in acceptance_lines(check, quoted(target), quoted(base), quoted(original)):
            typer.echo(line)
    typer.echo(f"next: mtp-gguf list-tensors {quoted(target)} --mtp")


def _checked(path: Path) -> AcceptanceCheck | None:
    """Measure the acceptance rate; None if only llama-server drafts with the architecture."""
    report = head_of(path)
    draft = report.draft
    if not report.ours:
        return None
    return check_acceptance(path, has_list=draft is not None and draft.layout is DraftLayout.IDS)


def _tokenizer_of(base: Model, donor: Model, draft: DraftOptions) -> Model:
    """Return the model whose tokenizer counts a corpus: the base if local, else the donor."""
    if not draft.corpus or local_files(base):
        return base
    if local_files(donor):
        return donor
    raise typer.BadParameter(
        "--fastmtp-corpus needs a local file for its tokenizer, and both models are remote; "
        "graft first, then: mtp-gguf fastmtp add OUTPUT --corpus FILES --in-place"
    )
