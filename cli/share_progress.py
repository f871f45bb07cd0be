"""Progress of work that knows its share but not its bytes: what is going on, and the time left."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from .status_line import status_line

_EARLY = 0.02  # before this share the time left is a guess that nobody should read


@contextmanager
def share_progress(name: str) -> Iterator[Callable[[float, str], None]]:
    """A status line on standard error.

    Yields a function to be called with the share done, 0 to 1, and with what is going on.
    """
    began = time.monotonic()
    with status_line(f"{name}: starting") as update:

        def show(share: float, text: str) -> None:
            left = (time.monotonic() - began) * (1 - share) / share if share > _EARLY else None
            rest = "" if left is None else f", {duration(left)} left"
            update(f"{name}: {share:.0%}{rest}, {text}")

        yield show
    if sys.stderr.isatty():
        typer.echo(f"{name}: {duration(time.monotonic() - began)}", err=True)


def duration(seconds: float) -> str:
    """`45 s` or `3:20 min`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60}:{whole % 60:02} min"
