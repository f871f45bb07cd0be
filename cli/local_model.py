"""Get the model that a command runs onto this machine."""

import typer

from mtp_gguf.gguf_tools.resolve import LocalGguf, local_gguf

from .progress import Interrupted, human_bytes, printable


def local_model(model: str, head: str | None = None, *, drafts: bool = True) -> LocalGguf:
    """Return the local files of a model, downloading what is on the hub; announce each download.

    head: another GGUF to take the head from, local or on the hub. drafts: the model's head is
    needed, so download it too if it is in a file of its own.
    """
    try:
        found = local_gguf(model, with_head=drafts and head is None, say=announce_download)
        if head is None:
            return found
        return LocalGguf(found.path, local_gguf(head, with_head=False, say=announce_download).path)
    except KeyboardInterrupt:
        raise Interrupted("files that are complete stay in the hub's cache") from None


def announce_download(address: str, nbytes: int | None) -> None:
    """Print what is downloaded, and its size in bytes if it is known."""
    size = "" if nbytes is None else f", {human_bytes(nbytes)}"
    typer.echo(f"mtp-gguf: download {printable(address)}{size}", err=True)
