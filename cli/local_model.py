"""Get the model that a command runs onto this machine."""

from mtp_gguf.gguf_tools.hub.resolve import LocalGguf, local_gguf

from .console import CONSOLE


def local_model(model: str, head: str | None = None, *, drafts: bool = True) -> LocalGguf:
    """Return the local files of a model, downloading what is on the hub; announce each download.

    head: another GGUF to take the head from, local or on the hub. drafts: the model's head is
    needed, so download it too if it is in a file of its own.
    """
    found = local_gguf(model, with_head=drafts and head is None, say=CONSOLE.download)
    if head is None:
        return found
    return LocalGguf(found.path, local_gguf(head, with_head=False, say=CONSOLE.download).path)
