"""`mtp-gguf graft`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_gguf.gguf_tools.heads.acceptance import LEAST
from mtp_gguf.gguf_tools.hub.resolve import names_gguf
from mtp_gguf.gguf_tools.machine.shell import quoted

from . import options
from .console import CONSOLE
from .file_report import file_fields, report_file
from .progress import reports_errors

if TYPE_CHECKING:
    from mtp_gguf.convert.heads.acceptance import AcceptanceCheck


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
        Path | None, options.output_option("Write to this file or folder (default: BASE-MTP.gguf).")
    ] = None,
    mtp_f16: options.MtpF16 = False,
    mtp_type: Annotated[
        str | None,
        options.head_type_option(
            "Store the head's matrices in this type (default: Q8_0); a GGUF's head is copied "
            "as it is."
        ),
    ] = None,
    fastmtp: options.FastMtp = None,
    fastmtp_corpus: options.FastMtpCorpus = None,
    fastmtp_ids: options.FastMtpIds = None,
    revision: options.Revision = None,
    overwrite: options.Overwrite = False,
    no_check: options.NoCheck = False,
    least_acceptance: options.LeastAcceptance = LEAST,
    force: options.Force = False,
    as_json: options.AsJson = False,
) -> None:
    """Add an MTP head to a GGUF that has none.

    Most GGUFs were converted without their head. The head is taken from the original checkpoint
    (only the head is read and converted), or from another GGUF of the same model, whatever its
    type. The base may have any quantization and be sharded; its tensors are copied byte for byte,
    so it generates the same text as before. A remote base is downloaded once, into the output. The
    result is the same as converting with the head.

    The head must belong to the model: sizes, layers and vocabulary are checked. A head of another
    fine-tune passes these checks and has a low acceptance rate. The finished file is therefore
    loaded, and the acceptance rate of its drafts is measured and stored in it
    (docs/acceptance.md). A head in a type
    of fewer than 8 bits is first compared with the source's head, and the head of another whole
    GGUF with itself in that file: more than 5 points fewer are a warning, more than 25 an error.

    **Examples**

    mtp-gguf graft Qwen3.5-9B-Q4_K_M.gguf --from Qwen/Qwen3.5-9B --mtp-f16 --fastmtp

    mtp-gguf graft base.gguf --from mtp-Qwen3.5-9B.gguf -o with-head.gguf
    """
    from mtp_gguf.convert.heads.graft import graft as make  # noqa: PLC0415  (NumPy and gguf are slow)

    if (fastmtp or fastmtp_corpus or fastmtp_ids) and names_gguf(source):
        from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415

        tell_crashes()  # llama.cpp reads the vocabulary
    result = make(
        base,
        source,
        output,
        mtp_f16=mtp_f16,
        mtp_type=mtp_type,
        fastmtp=fastmtp,
        fastmtp_corpus=fastmtp_corpus or (),
        fastmtp_ids=fastmtp_ids,
        revision=revision,
        overwrite=overwrite,
        no_check=no_check,
        least_acceptance=least_acceptance,
        force=force,
        progress=CONSOLE,
    )
    target, check, gate = result.path, result.acceptance, result.compared
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
        for line in _acceptance_lines(check, quoted(target), quoted(base), quoted(result.original)):
            typer.echo(line)
    typer.echo(f"next: mtp-gguf list-tensors {quoted(target)} --mtp")


def _acceptance_lines(
    check: "AcceptanceCheck", output: str, base: str, original: str
) -> Iterator[str]:
    """Yield the report: one line, and for a poor head the reason and the command that fixes it.

    output, base: file names quoted for a shell. original: the model that the base was made from.
    """
    yield check.text
    if not check.poor:
        return
    yield f"warning: {check.warning}"
    if check.list_is_poor:
        yield f"  fix: mtp-gguf fastmtp add {output} --corpus FILES --in-place"
        return
    yield f"  fix: mtp-gguf graft {base} --from {original} -o {output} --overwrite"
    yield f"  or train it for this trunk: mtp-gguf train-head {output} --text FILES"
