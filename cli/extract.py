"""`mtp-gguf extract`."""

from pathlib import Path
from typing import Annotated

import typer

from mtp_gguf.gguf_tools import transplant
from mtp_gguf.gguf_tools.resolve import open_any_model

from .options import AsJson, ModelFile, Overwrite, parse_gguf_output
from .progress import leaves_nothing, reports_errors
from .written import local_files, output_path, report_file, write_file


@reports_errors
def extract(
    model: ModelFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            parser=parse_gguf_output,
            help="Write to this file or folder (default: mtp-MODEL.gguf).",
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Copy the MTP head of a GGUF into a file of its own.

    The file has llama.cpp's `mtp-` layout: the MTP block, the embedding, the last norm and the
    output layer (if the model has its own), copied byte for byte. llama-server can use it as a
    separate head (`-md`), and `graft` as the source of a head.

    **Example**

    mtp-gguf extract Qwen3.5-9B-Q4_K_M.gguf -o mtp-Qwen3.5-9B.gguf
    """
    with open_any_model(model) as opened:
        target = output_path(output, opened, "mtp-{}")
        with leaves_nothing(target):
            spec = transplant.extract(opened)
            write_file("extract", spec, target, local_files(opened), overwrite)
    report_file(target, "mtp-gguf graft TRUNK.gguf --from {}", as_json=as_json)
