"""`mtp-gguf carry`."""

from pathlib import Path
from typing import Annotated

import typer

from mtp_gguf.gguf_tools.files.new_file import output_path
from mtp_gguf.gguf_tools.heads.carrier import carry as carried
from mtp_gguf.gguf_tools.heads.carrier import restore, restores_to_the_byte
from mtp_gguf.gguf_tools.model import open_model

from .file_report import report_file, write_copy
from .local_model import local_model
from .options import AsJson, Overwrite, output_option
from .progress import reports_errors


@reports_errors
def carry(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="GGUF of architecture qwen2, qwen3 or llama (any shard); also OWNER/NAME:QUANT on "
            "the hub.",
        ),
    ],
    output: Annotated[
        Path | None,
        output_option(
            "Write to this file or folder (default: MODEL-carrier.gguf, or MODEL-original.gguf "
            "with --back)."
        ),
    ] = None,
    back: Annotated[
        bool, typer.Option("--back", help="Write the original of a carrier, without its head.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Copy a Qwen2, Qwen3 or Llama GGUF so that it can have an MTP head.

    llama.cpp has no MTP head for these models. A carrier is the same model under the architecture
    glm4moe, which can have one and computes the same with dense layers: no number is changed, and
    the logits are the same, to the bit for qwen2 and qwen3. Models that cannot be carried exactly,
    such as Llama 3.1 with its frequency factors, are refused. `train-head` carries a model by
    itself.

    **Examples**

    mtp-gguf carry qwen2.5-coder-0.5b.gguf -o carrier.gguf

    mtp-gguf carry --back carrier.gguf -o original.gguf
    """
    path = local_model(model, drafts=False).path
    with open_model(path) as opened:
        pattern = "{}-original" if back else "{}-carrier"
        target = output_path(output, opened, pattern)
        write_copy("carry", target, opened, restore if back else carried, overwrite)
        exact = back or restores_to_the_byte(opened)
    following = None if back else "mtp-gguf train-head {} --text FILES"
    report_file(target, following, as_json=as_json)
    if not exact and not as_json:
        typer.echo(
            "note: the original is laid out in another way than llama.cpp's tools do it; --back "
            "gives the same model, but not the same bytes"
        )
