"""Fetch the head of a checkpoint, and convert it for a graft onto a GGUF."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from mtp_gguf.gguf_tools.errors import OptionError, RequestError
from mtp_gguf.gguf_tools.hub.remote import hub_model
from mtp_gguf.gguf_tools.model import Model, open_model
from mtp_gguf.gguf_tools.progress import Progress

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.hub_checkpoint import open_hub_checkpoint, remote_head_bytes, with_local_head
from ..checkpoints.source_rows import SourceRows
from ..families.target_model import HeadChoice
from ..options import DEFAULT_HEAD_TYPE, DraftOptions
from ..pipeline import run
from ..plans.plan import Request
from ..plans.precision import parse_tensor_type
from ..resolve import model_name
from ..resolve import open_model as open_checkpoint
from .head_donor import plan_head, pre_tokenizer_of


def open_source(source: str, revision: str | None) -> Checkpoint:
    """Open the MTP head of a folder, hub id or `hf://OWNER/NAME` (on the hub: only headers)."""
    if hub := hub_model(source):
        return open_hub_checkpoint(hub.hub_id, revision or hub.revision, HeadChoice.BLOCK)
    return open_checkpoint(source, revision, HeadChoice.BLOCK, None)


def fetched(checkpoint: Checkpoint, folder: str, progress: Progress) -> Checkpoint:
    """Return the checkpoint with a local head; a remote one is downloaded into `folder`."""
    with progress.count("fetch the head", remote_head_bytes(checkpoint)) as advance:
        return with_local_head(checkpoint, Path(folder) / "mtp.safetensors", advance)


@contextmanager
def converted_head(
    base: Model,
    source: str,
    revision: str | None,
    head_type: str | None,
    draft: DraftOptions,
    target: Path,
    progress: Progress,
) -> Iterator[Model]:
    """Convert the head of a checkpoint into a temporary file in the output's folder."""
    try:
        kind = parse_tensor_type(head_type or DEFAULT_HEAD_TYPE, "--mtp-type")
    except RequestError as error:
        raise OptionError(str(error)) from None
    with open_source(source, revision) as checkpoint:
        request = Request(
            quant=_vehicle(base),
            head=HeadChoice.BLOCK,
            head_type=kind,
            draft=draft if draft.wanted else None,
            tokenizer_pre=pre_tokenizer_of(base),
            model_name=model_name(source),
            output=target,
        )
        with tempfile.TemporaryDirectory(prefix=".mtp-gguf-", dir=target.parent) as folder:
            plan, preview = plan_head(checkpoint, request, Path(folder) / "head.gguf", source)
            preview.head.check_fit(base.head)
            for note in plan.notes:
                if "draft vocabulary" in note:
                    progress.say(f"note: {note}")
            with (
                fetched(checkpoint, folder, progress) as whole,
                progress.count("convert the head", plan.size) as advance,
            ):
                run((plan,), SourceRows(whole), advance)
            with open_model(plan.shards[0].path) as head:
                yield head


def head_in_type(
    base: Model, source: str, revision: str | None, target: Path, progress: Progress, head_type: str
) -> AbstractContextManager[Model]:
    """Convert the head of a checkpoint into a temporary file, without a draft vocabulary."""
    return converted_head(base, source, revision, head_type, DraftOptions(), target, progress)


def _vehicle(base: Model) -> str:
    """Return the mix under which the head is converted.

    The head's type is set separately. The mix decides the fallback for rows whose length is not a
    multiple of that type's block size: F16 in files that are not quantized, in others the type
    that llama-quantize uses.
    """
    return "F16" if base.first.scalar("general.file_type") in (0, 1, 32) else "Q4_K_M"
