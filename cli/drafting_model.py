"""Open the model that `generate` and `chat` run."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.hub.sources import what_is_at
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.server.model import choose_mmproj
from mtp_gguf.server.model import open_model as open_server_model

from .local_model import local_model
from .options import CacheType, spelled, usable_gpu_layers, with_options

if TYPE_CHECKING:
    from mtp_gguf.native.llama.mtp_llama import MTPLlama

# Arguments of MTPLlama, and the options of the commands.
_OPTION_NAMES = {
    "n_ctx:": "--ctx:",
    "depth:": "--depth:",
    "max_depth:": "--max-depth:",
    "fastmtp_size:": "--fastmtp-size:",
    "draft_threads:": "--draft-threads:",
    "mtp_head:": "--head:",
    "mtp_type:": "--mtp-type:",
    "n_cpu_moe:": "--n-cpu-moe:",
    "split_mode:": "--split-mode:",
    "tensor_split:": "--tensor-split:",
    "main_gpu:": "--main-gpu:",
    "lora_path:": "--lora:",
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
    *,
    split: Mapping[str, Any] | None = None,
    lora: Path | None = None,
    cache_type_k: CacheType | None = None,
    cache_type_v: CacheType | None = None,
    **options: Any,
) -> "MTPLlama":
    """Download the model if it is on the hub, check it, and load it; warnings become notes.

    split: MTPLlama's arguments that split a model over several GPUs.
    cache_type_k, cache_type_v: types of the KV cache; None for llama.cpp's default. options:
    further arguments of MTPLlama. From here on, a crash ends the program with a sentence.
    """
    found = local_model(model, head, drafts=depth != 0)
    if not found.path.is_file():
        there = what_is_at(found.path)
        if not found.path.exists():
            there += "; create one with mtp-gguf convert, or name one on the hub: OWNER/NAME:QUANT"
        raise RequestError(f"{model}: expected a GGUF file, found {there}")
    with open_model(found.path):
        pass  # report an invalid file with our errors, before llama.cpp reads it
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415

    tell_crashes()
    from mtp_gguf.native.llama.mtp_llama import MTPLlama  # noqa: PLC0415  (loads llama.cpp)

    usable_layers = usable_gpu_layers(gpu_layers)
    if lora is not None:
        options["lora_path"] = str(lora)
    if cache_type_k is not None:
        options["type_k"] = cache_type_k.tensor_type.id
    if cache_type_v is not None:
        options["type_v"] = cache_type_v.tensor_type.id
        if cache_type_v.tensor_type.is_quantized:  # which llama.cpp reads with flash attention only
            options["flash_attn"] = True
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
                **(split or {} if usable_layers == gpu_layers else {}),
                **options,
            )
    if llm.type_choice is not None:
        typer.echo(f"mtp-gguf: {llm.type_choice.text}", err=True)
    for note in notes:
        typer.echo(f"mtp-gguf: {with_options(_OPTION_NAMES, str(note.message))}", err=True)
    if llm.head is not None and llm.head.layout == "made":
        typer.echo(
            f"mtp-gguf: {llm.head.vocabulary_text}; --fastmtp-size -1 drafts over all", err=True
        )
    if 0 < context < llm.n_ctx():
        typer.echo(f"mtp-gguf: --ctx {context}: llama.cpp rounds it up to {llm.n_ctx()}", err=True)
    return llm


def vision_tower(llm: "MTPLlama", named: Path | None) -> Path | None:
    """Return the mmproj file for a model's pictures: the named one, or the only one beside it.

    None if there is none. RequestError if the named file does not fit the model.
    """
    path, note = choose_mmproj(open_server_model(Path(llm.model_path)), named)
    if note:
        typer.echo(f"mtp-gguf: {note}", err=True)
    return path
