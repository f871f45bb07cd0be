"""Open the model that `generate` and `chat` run."""

import warnings
from typing import TYPE_CHECKING, Any, Literal

import typer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.sources import what_is_at

from .local_model import local_model
from .options import spelled, usable_gpu_layers, with_options

if TYPE_CHECKING:
    from mtp_gguf.native.llama import MTPLlama

# Arguments of MTPLlama, and the options of the commands.
_OPTION_NAMES = {
    "n_batch:": "--ctx:",
    "n_batch and n_ubatch:": "--ctx:",
    "n_ctx:": "--ctx:",
    "depth:": "--depth:",
    "max_depth:": "--max-depth:",
    "fastmtp_size:": "--fastmtp-size:",
    "draft_threads:": "--draft-threads:",
    "mtp_head:": "--head:",
    "n_cpu_moe:": "--n-cpu-moe:",
    "lookup files:": "--lookup-file:",
}


def drafting_model(
    model: str,
    head: str | None,
    depth: int | Literal["auto"] | None,
    context: int,
    threads: int | None,
    gpu_layers: int,
    n_cpu_moe: int,
    **options: Any,
) -> "MTPLlama":
    """Download the model if it is on the hub, check it, and load it; warnings become notes.

    options: further arguments of MTPLlama. From here on, a crash ends the program with a sentence.
    """
    found = local_model(model, head, drafts=depth != 0)
    if not found.path.is_file():
        raise RequestError(
            f"{model}: expected a GGUF file, found {what_is_at(found.path)}; create one with "
            "mtp-gguf convert, or name one on the hub: OWNER/NAME:QUANT"
        )
    with open_model(found.path):
        pass  # report an invalid file with our errors, before llama.cpp reads it
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415

    tell_crashes()
    from mtp_gguf.native.llama import MTPLlama  # noqa: PLC0415  (loads llama.cpp)

    usable_layers = usable_gpu_layers(gpu_layers)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        with spelled(_OPTION_NAMES):
            llm = MTPLlama(
                str(found.path),
                depth=depth,
                mtp_head=str(found.head) if found.head else None,
                n_ctx=context,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=usable_layers,
                # Without the GPU that was asked for, one note is enough.
                n_cpu_moe=n_cpu_moe if usable_layers == gpu_layers else 0,
                **options,
            )
    for note in notes:
        typer.echo(f"mtp-gguf: {with_options(_OPTION_NAMES, str(note.message))}", err=True)
    return llm
