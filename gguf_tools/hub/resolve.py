"""Opens or downloads the GGUF that the user's argument names, for all commands and MTPLlama."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import MtpGgufError, RemoteError, RequestError
from ..heads.head_files import heads_beside
from ..machine.interrupted import Interrupted
from ..model import Model, open_model
from .remote import download_command, hub_gguf, is_remote, open_remote_model


@dataclass(frozen=True)
class LocalGguf:
    """A GGUF on this machine, by any shard. head: the separate file that came with its head."""

    path: Path
    head: Path | None = None


def names_gguf(text: str) -> bool:
    """Whether `text` names a GGUF file, local or remote, rather than a folder or checkpoint.

    A local one need not exist.
    """
    found = hub_gguf(text)
    if found is not None:
        return found.file is not None or found.quant is not None
    path = Path(text)
    return is_remote(text) or path.is_file() or (path.suffix == ".gguf" and not path.is_dir())


def open_any_model(text: str) -> Model:
    """Open the local or remote GGUF that `text` names; of a remote one, only headers are read."""
    if found := hub_gguf(text):
        from .hub_gguf import open_hub_gguf  # noqa: PLC0415  (huggingface_hub is slow to import)

        with _says_where(text):
            return open_hub_gguf(found)
    return open_remote_model(text) if is_remote(text) else open_model(Path(text))


def local_gguf(
    text: str, *, with_head: bool = True, say: Callable[[str, int | None], None] = lambda *_: None
) -> LocalGguf:
    """The GGUF that `text` names; one on the hub is downloaded into huggingface_hub's cache.

    with_head: if the model has no head, find the only head-only file beside it that fits; on the
    hub, download it, too.
    say: called before each download, with its address and size in bytes (None if unknown).
    RemoteError if a download fails; whether a local file exists is not checked.
    """
    if found := hub_gguf(text):
        from .hub_gguf import fetch  # noqa: PLC0415  (huggingface_hub is slow to import)

        with _says_where(text):
            try:
                return LocalGguf(*fetch(found, with_head=with_head, say=say))
            except KeyboardInterrupt:
                remains = "files that are complete stay in the hub's cache"
                raise Interrupted(remains) from None
    if is_remote(text):
        raise RequestError(
            f"{text}: expected a local GGUF, or one on the hub; download it first: "
            f"{download_command(text)}"
        )
    path = Path(text)
    return LocalGguf(path, _head_beside(path) if with_head and path.is_file() else None)


@contextmanager
def _says_where(text: str) -> Iterator[None]:
    """Say in a RemoteError about OWNER/NAME/FILE.gguf that there is no such local file either."""
    try:
        yield
    except RemoteError as error:
        if Path(text).suffix != ".gguf" or text.startswith("hf://"):
            raise
        raise RemoteError(f"{text}: no such file here; on the hub: {error}") from None


def _head_beside(path: Path) -> Path | None:
    """The only head-only file that fits a model without a head; whoever runs it reports faults."""
    try:
        with open_model(path) as model:
            found = [] if model.report.ready else heads_beside(model)
    except (MtpGgufError, OSError):
        return None
    return found[0] if len(found) == 1 else None
