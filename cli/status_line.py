"""One line that says what is going on, for work whose parts are no bytes."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

_PLAIN_SECONDS = 10.0


@contextmanager
def status_line(first: str) -> Iterator[Callable[[str], None]]:
    """A line on standard error that changes on a terminal; elsewhere one every few seconds.

    Yields a function to be called with the new text.
    """
    if sys.stderr.isatty():
        from rich.console import Console  # noqa: PLC0415  (slow to import)
        from rich.markup import escape  # noqa: PLC0415

        with Console(stderr=True).status(escape(first)) as status:
            yield lambda text: status.update(escape(text))
        return
    typer.echo(first, err=True)
    shown, kind = time.monotonic(), first.partition(":")[0]

    def update(text: str) -> None:
        """A new kind of work is always said; the same kind in another state now and then."""
        nonlocal shown, kind
        now, new = time.monotonic(), text.partition(":")[0]
        if new != kind or now - shown >= _PLAIN_SECONDS:
            shown, kind = now, new
            typer.echo(text, err=True)

    yield update
