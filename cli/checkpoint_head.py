"""Fetch the head of a checkpoint, and convert it for a graft onto a GGUF."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.model import Model, open_model
from mtp_gguf.gguf_tools.remote import hub_model

from .options import DraftOptions
from .progress import byte_progress

if TYPE_CHECKING:
    from mtp_gguf.convert.checkpoint import Checkpoint


def open_source(source: str, revision: str | None) -> "Checkpoint":
    """Open the MTP head of a folder, hub id or `hf://OWNER/NAME` (on the hub: only headers)."""
    from mtp_gguf.convert.blueprint import HeadChoice  # noqa: PLC0415  (NumPy and gguf are slow)
    from mtp_gguf.convert.hub_checkpoint import open_hub_checkpoint  # noqa: PLC0415
    from mtp_gguf.convert.resolve import open_model as open_checkpoint  # noqa: PLC0415

    if hub := hub_model(source):
        return open_hub_checkpoint(hub.hub_id, revision or hub.revision, HeadChoice.BLOCK)
    return open_checkpoint(source, revision, HeadChoice.BLOCK, None)


def fetched(checkpoint: "Checkpoint", folder: str) -> "Checkpoint":
    """Return the checkpoint with a local head; a remote one is downloaded into `folder`."""
    from mtp_gguf.convert.hub_checkpoint import (  # noqa: PLC0415
        remote_head_bytes,
        with_local_head,
    )

    with byte_progress("fetch the head", remote_head_bytes(checkpoint)) as progress:
        return with_local_head(checkpoint, Path(folder) / "mtp.safetensors", progress)


@contextmanager
def converted_head(
    base: Model,
    source: str,
    revision: str | None,
    head_type: str | None,
    draft: DraftOptions,
    target: Path,
) -> Iterator[Model]:
    """Convert the head of a checkpoint into a temporary file in the output's folder."""
    from mtp_gguf.convert.blueprint import HeadChoice  # noqa: PLC0415  (NumPy and gguf are slow)
    from mtp_gguf.convert.head_donor import plan_head  # noqa: PLC0415
    from mtp_gguf.convert.pipeline import run  # noqa: PLC0415
    from mtp_gguf.convert.plan import DraftRequest, Request  # noqa: PLC0415
    from mtp_gguf.convert.precision import parse_tensor_type  # noqa: PLC0415
    from mtp_gguf.convert.resolve import model_name  # noqa: PLC0415
    from mtp_gguf.convert.source_rows import SourceRows  # noqa: PLC0415

    try:
        kind = parse_tensor_type(head_type or "Q8_0", "--mtp-type")
    except RequestError as error:
        raise typer.BadParameter(str(error)) from None
    with open_source(source, revision) as checkpoint:
        request = Request(
            quant=_vehicle(base),
            head=HeadChoice.BLOCK,
            head_type=kind,
            draft=DraftRequest(DraftLayout.IDS, draft.size, draft.corpus, draft.ids_file)
            if draft.wanted
            else None,
            tokenizer_pre=_pre_tokenizer(base),
            model_name=model_name(source),
            output=target,
        )
        with tempfile.TemporaryDirectory(prefix=".mtp-gguf-", dir=target.parent) as folder:
            planned = plan_head(checkpoint, request, Path(folder) / "head.gguf", source)
            planned.preview.head.check_fit(base.head)
            for note in planned.plan.notes:
                if "draft vocabulary" in note:
                    typer.echo(f"note: {note}", err=True)
            with (
                fetched(checkpoint, folder) as whole,
                byte_progress("convert the head", planned.plan.size) as progress,
            ):
                run((planned.plan,), SourceRows(whole), progress)
            with open_model(planned.plan.shards[0].path) as head:
                yield head


def head_in_type(
    base: Model, source: str, revision: str | None, target: Path, head_type: str
) -> AbstractContextManager[Model]:
    """Convert the head of a checkpoint into a temporary file, without a draft vocabulary."""
    return converted_head(
        base, source, revision, head_type, DraftOptions.parse(None, None, None), target
    )


def _vehicle(base: Model) -> str:
    """Return the mix under which the head is converted.

    The head's type is set separately. The mix decides the fallback for rows whose length is not a
    multiple of that type's block size: F16 in files that are not quantized, in others the type
    that llama-quantize uses.
    """
    return "F16" if base.first.scalar("general.file_type") in (0, 1, 32) else "Q4_K_M"


def _pre_tokenizer(base: Model) -> str | None:
    """Return the base's pre-tokenizer, so that a checkpoint with an unknown one can be used."""
    name = base.first.scalar("tokenizer.ggml.pre")
    return name if isinstance(name, str) else None
