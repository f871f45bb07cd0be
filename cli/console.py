"""Show the progress of the library's long calls at the console."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import typer

from mtp_gguf.gguf_tools.machine.text import human_bytes, printable
from mtp_gguf.gguf_tools.progress import Progress

from .progress import byte_progress, share_progress


class Console(Progress):
    """Shows progress as bars and status lines, and prints the rest, all on standard error."""

    def count(
        self, title: str, total: int, note: Callable[[], str] = lambda: ""
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Show a bar."""
        return byte_progress(title, total, note)

    def share(self, title: str) -> AbstractContextManager[Callable[[float, str], None]]:
        """Show a status line."""
        return share_progress(title)

    def download(self, address: str, nbytes: int | None) -> None:
        """Print what is downloaded, and its size in bytes if it is known."""
        size = "" if nbytes is None else f", {human_bytes(nbytes)}"
        typer.echo(f"mtp-gguf: download {printable(address)}{size}", err=True)

    def say(self, text: str) -> None:
        """Print a line."""
        typer.echo(text, err=True)


CONSOLE = Console()
