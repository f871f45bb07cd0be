"""What remains on disk after Ctrl-C or another signal."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or another signal; the message says what remains on disk.

    fields: what --json prints of the work that was done, besides the error.
    """

    def __init__(self, text: str = "", fields: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.fields = fields


@contextmanager
def leaves_nothing(*outputs: Path, resumes: bool = False) -> Iterator[None]:
    """Make an interruption report whether any of `outputs` was written.

    resumes: parts of them stay under hidden names, and the same command goes on with them.
    """
    before = [_identity(path) for path in outputs]
    try:
        yield
    except KeyboardInterrupt:
        whole = [str(p) for p, old in zip(outputs, before, strict=True) if _identity(p) != old]
        text = f"{', '.join(whole)}: written before that" if whole else "nothing was written"
        if resumes and not whole:
            text = "the same command goes on from here"
        raise Interrupted(text) from None


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a value that changes with the file or its contents; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
