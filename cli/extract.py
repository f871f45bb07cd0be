"""`mtp-gguf extract`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mtp_gguf.gguf_tools.files.new_file import output_path
from mtp_gguf.gguf_tools.heads import transplant
from mtp_gguf.gguf_tools.heads.head_files import sidecar_name
from mtp_gguf.gguf_tools.heads.transplant import HeadLayout
from mtp_gguf.gguf_tools.hub.resolve import open_any_model
from mtp_gguf.gguf_tools.model import Model

from .file_report import report_file, write_copy
from .options import AsJson, ModelFile, Overwrite, output_option
from .progress import reports_errors


@reports_errors
def extract(
    model: ModelFile,
    output: Annotated[
        Path | None,
        output_option(
            "Write to this file or folder (default: mtp-MODEL.gguf; with --layout, the name "
            "that its publisher gives it)."
        ),
    ] = None,
    layout: Annotated[
        HeadLayout | None,
        typer.Option(
            "--layout",
            help="Write the layout of this publisher; unsloth's has no embedding and output, which "
            "are the trunk's (default: ggml-org).",
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Copy the MTP head of a GGUF into a file of its own.

    The file has llama.cpp's `mtp-` layout, as ggml-org publishes it: the MTP block, the embedding,
    the last norm and the output layer (if the model has its own), copied byte for byte.
    llama-server can use it as a separate head (`-md`), and `graft` as the source of a head. The
    layout `unsloth` has the MTP block only, a seventh of the size: stock llama.cpp cannot load it,
    `mtp-gguf serve` and `MTPLlama` can. A file of the layout ggml-org can be its source, too.

    **Examples**

    mtp-gguf extract Qwen3.5-9B-Q4_K_M.gguf -o mtp-Qwen3.5-9B.gguf

    mtp-gguf extract mtp-Qwen3.5-9B-Q8_0.gguf --layout unsloth
    """
    with open_any_model(model) as opened:
        target = output_path(output, opened, "mtp-{}" if layout is None else "{}")
        if layout is not None and (output is None or output.is_dir()):
            target = target.with_name(_published_name(opened, target, layout))
        make = partial(transplant.extract, layout=layout or HeadLayout.GGML_ORG)
        write_copy("extract", target, opened, make, overwrite)
    report_file(target, "mtp-gguf graft TRUNK.gguf --from {}", as_json=as_json)


def _published_name(model: Model, path: Path, layout: HeadLayout) -> str:
    """Return the name that a publisher gives the head; `path` has the model's name."""
    types = model.head.types if model.head.is_known else {}
    return sidecar_name(path, next(iter(types), "F32"), shared=layout is HeadLayout.UNSLOTH)
