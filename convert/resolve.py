"""From what the user names a model by to an open checkpoint."""

from contextlib import ExitStack
from pathlib import Path

from mtp_gguf.gguf_tools.errors import CheckpointError

from .checkpoint import Checkpoint, is_head, open_checkpoint, read_config
from .family import HeadChoice, find_family
from .hub import download, looks_like_hub_id
from .hub_checkpoint import open_hub_checkpoint, open_hub_head


def model_name(model: str) -> str | None:
    """The model's name where its folder's is none of its own (the hub's cache)."""
    return model.rpartition("/")[2] if looks_like_hub_id(model) else None


def open_model(
    model: str, revision: str | None, head: HeadChoice, mtp_from: str | None
) -> Checkpoint:
    """Open a hub id or a folder; `mtp_from` names another one to take the head from.

    Of a donor on the hub only headers are fetched; `with_local_head` brings the head's bytes.
    """
    own = HeadChoice.NONE if mtp_from else head
    checkpoint = _open(model, revision, own)
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
    """A hub id or a folder, for its head alone; of one on the hub only headers are fetched."""
    if looks_like_hub_id(model):
        return open_hub_checkpoint(model, None, HeadChoice.ALONE)
    return _open(model, None, HeadChoice.ALONE)


def _open_head(model: str) -> Checkpoint:
    return (
        open_hub_head(model) if looks_like_hub_id(model) else open_checkpoint(Path(model), is_head)
    )


def _open(model: str, revision: str | None, head: HeadChoice) -> Checkpoint:
    folder = download(model, revision, head) if looks_like_hub_id(model) else Path(model)
    family = find_family(read_config(folder), folder / "config.json")
    return open_checkpoint(folder, lambda name: family.wants(name, head))
