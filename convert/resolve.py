"""Opens the checkpoint that the user's argument names."""

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from mtp_gguf.gguf_tools.errors import CheckpointError, RequestError
from mtp_gguf.gguf_tools.remote import absent_model, hub_model, is_remote

from .blueprint import HeadChoice
from .checkpoint import Checkpoint, is_head, open_checkpoint, read_config
from .family import wanted
from .hub import download
from .hub_checkpoint import open_hub_checkpoint, open_hub_head


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
) -> Checkpoint:
    """Open a hub id or a folder; `mtp_from` names another one to take the head from.

    vision: the vision tower is needed, too. For a donor on the hub only headers are fetched;
    `with_local_head` downloads the head.
    """
    own = HeadChoice.NONE if mtp_from else head
    checkpoint = _open(model, revision, (own, HeadChoice.VISION) if vision else (own,))
    if mtp_from is None:
        return checkpoint
    with ExitStack() as opened:
        opened.enter_context(checkpoint)
        donor = opened.enter_context(_open_head(mtp_from))
        if not any(is_head(name) for name in donor.tensors):
            raise CheckpointError(f"{mtp_from}: --from: expected mtp.* tensors, found none")
        joined = checkpoint.with_head_of(donor)
        opened.pop_all()
    return joined


def open_donor(model: str) -> Checkpoint:
    """Open a hub id or a folder for its head; for a hub id only headers are fetched."""
    if hub := hub_model(model):
        return open_hub_checkpoint(*hub, HeadChoice.BLOCK)
    return _open(model, None, (HeadChoice.BLOCK,))


def _open_head(model: str) -> Checkpoint:
    if hub := hub_model(model):
        return open_hub_head(*hub)
    return open_checkpoint(_local_folder(model), is_head)


def _open(model: str, revision: str | None, parts: Collection[HeadChoice]) -> Checkpoint:
    if hub := hub_model(model):
        folder = download(hub.hub_id, revision or hub.revision, parts)
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
