"""Opens the checkpoint that the user's argument names."""

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from mtp_gguf.gguf_tools.errors import CheckpointError, RequestError
from mtp_gguf.gguf_tools.hub.hub_gguf import Announce
from mtp_gguf.gguf_tools.hub.remote import absent_model, hub_model, is_remote

from .checkpoints.checkpoint import Checkpoint, head_test, open_checkpoint, read_config
from .checkpoints.hub import fetch
from .checkpoints.hub_checkpoint import open_hub_checkpoint, open_hub_head, stream_hub_checkpoint
from .families.family import wanted
from .families.target_model import HeadChoice


def model_name(model: str) -> str | None:
    """The model's name if its folder is not named after it (the hub's cache); else None."""
    hub = hub_model(model)
    return hub.hub_id.rpartition("/")[2] if hub else None


def open_model(
    model: str,
    revision: str | None,
    head: HeadChoice,
    mtp_from: str | None,
    *,
    vision: bool = False,
    say: Announce = lambda *_: None,
    stream: bool | None = False,
) -> Checkpoint:
    """Open a hub id or a folder; `mtp_from` names another one to take the head from.

    vision: the vision tower is needed, too. say: called before a download of weights. stream: read
    the weights on the hub by ranges; None to do so if the disk lacks room for them. Of a donor on
    the hub the head is always read there.
    """
    own = HeadChoice.NONE if mtp_from else head
    parts = (own, HeadChoice.VISION) if vision else (own,)
    checkpoint = _open(model, revision, parts, say, stream)
    if mtp_from is None:
        return checkpoint
    with ExitStack() as opened:
        opened.enter_context(checkpoint)
        donor = opened.enter_context(_open_head(mtp_from))
        if not any(map(donor.in_head, donor.tensors)):
            raise CheckpointError(f"{mtp_from}: --from: expected mtp.* tensors, found none")
        joined = checkpoint.with_head_of(donor)
        opened.pop_all()
    return joined


def open_headers(model: str, part: HeadChoice) -> Checkpoint:
    """Open a part of a hub id or a folder; for a hub id only headers are fetched."""
    if hub := hub_model(model):
        return open_hub_checkpoint(*hub, part)
    return _open(model, None, (part,))


def _open_head(model: str) -> Checkpoint:
    if hub := hub_model(model):
        return open_hub_head(*hub)
    folder = _local_folder(model)
    return open_checkpoint(folder, head_test(read_config(folder)))


def _open(
    model: str,
    revision: str | None,
    parts: Collection[HeadChoice],
    say: Announce = lambda *_: None,
    stream: bool | None = False,
) -> Checkpoint:
    if hub := hub_model(model):
        revision = revision or hub.revision
        folder, streamed = fetch(hub.hub_id, revision, parts, say, stream=stream)
        if streamed:
            return stream_hub_checkpoint(hub.hub_id, folder, parts)
    else:
        folder = _local_folder(model)
    return open_checkpoint(folder, wanted(read_config(folder), folder / "config.json", parts))


def _local_folder(model: str) -> Path:
    """The folder of a local model; RequestError if it is not a folder."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    if is_remote(model):
        raise RequestError(
            f"{model}: expected a checkpoint, found a single file elsewhere; download it first, or "
            "name the whole model: hf://OWNER/NAME"
        )
    if folder.exists():
        raise RequestError(f"{model}: expected a checkpoint folder with config.json, found a file")
    raise RequestError(
        f"{model}: expected a folder with config.json, found none; {absent_model(model)}"
    )
