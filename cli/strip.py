"""`mtp-gguf strip`."""

from pathlib import Path
from typing import Annotated

import typer

from mtp_gguf.gguf_tools import transplant
from mtp_gguf.gguf_tools.model import open_model

from .progress import reports_errors
from .written import output_path, report_file, write_file


@reports_errors
def strip(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="GGUF with a head (any shard).")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File or folder to write to [MODEL-no-mtp.gguf]."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output.")
    ] = False,
) -> None:
    """Copy a GGUF without its MTP head and its draft vocabulary.

    All other tensors stay byte for byte as they are; the layer count and the lists with an entry
    per layer are set to the trunk's. It also clears up what is left of a head that is claimed and
    incomplete, so that a whole one can be grafted on.

    **Example**

    mtp-gguf strip Qwen3.5-9B-Q4_K_M.gguf -o trunk.gguf
    """
    with open_model(model) as opened:
        spec = transplant.strip(opened)
        target = output_path(output, model, "{}-no-mtp")
        write_file("strip", spec, target, opened.paths, overwrite)
    report_file(target, "mtp-gguf graft {} --from MODEL")
