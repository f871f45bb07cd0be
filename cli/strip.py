"""`mtp-gguf strip`."""

from pathlib import Path
from typing import Annotated

from mtp_gguf.gguf_tools.files.new_file import output_path
from mtp_gguf.gguf_tools.heads import transplant
from mtp_gguf.gguf_tools.hub.resolve import open_any_model

from .file_report import report_file, write_copy
from .options import AsJson, ModelFile, Overwrite, output_option
from .progress import reports_errors


@reports_errors
def strip(
    model: ModelFile,
    output: Annotated[
        Path | None, output_option("Write to this file or folder (default: MODEL-no-mtp.gguf).")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Copy a GGUF without its MTP head and its draft vocabulary.

    All other tensors are copied byte for byte; the layer count and the lists with one entry per
    layer are reduced to the trunk's. An incomplete head is removed as well, so that a complete one
    can be grafted.

    **Example**

    mtp-gguf strip Qwen3.5-9B-Q4_K_M.gguf -o trunk.gguf
    """
    with open_any_model(model) as opened:
        target = output_path(output, opened, "{}-no-mtp")
        write_copy("strip", target, opened, transplant.strip, overwrite)
    report_file(target, "mtp-gguf graft {} --from MODEL", as_json=as_json)
