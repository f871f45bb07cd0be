"""What the commands share towards the user: sizes, progress, and the one-sentence error."""

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import typer

from mtp_gguf.gguf_tools.errors import MtpGgufError

from .signals import stops_cleanly

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN_PROGRESS_SECONDS = 5.0


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Make a command end in one sentence and exit code 1 where it fails on purpose."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with stops_cleanly():
                return command(*args, **kwargs)
        except MtpGgufError as error:
            typer.echo(f"mtp-gguf: {printable(str(error))}", err=True)
        except OSError as error:  # of the system: a name too long, a full temporary folder
            where = f"{error.filename}: " if error.filename else ""
            typer.echo(f"mtp-gguf: {printable(f'{where}{error.strerror or error}')}", err=True)
        except KeyboardInterrupt:
            typer.echo("mtp-gguf: interrupted; nothing was written", err=True)
        raise typer.Exit(1)

    return wrapped


def printable(text: str) -> str:
    """Text from a file, without the characters that steer a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def human_bytes(count: float) -> str:
    """A number of bytes with three digits and a decimal unit."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}" if count < 99.95 else f"{count:.0f} {unit}"
    return f"{count / 1000:.3g} TB"


def parse_bytes(text: str) -> int:
    """`500M`, `4G` and the like as bytes, decimal as in llama.cpp's --split-max-size."""
    units = {"K": 10**3, "M": 10**6, "G": 10**9}
    number, unit = text[:-1], text[-1:].upper()
    if unit not in units or not number.isascii() or not number.isdigit() or not int(number):
        raise typer.BadParameter(
            f"expected a number and K, M or G, such as 4G; found {text!r}",
            param_hint="--split-max-size",
        )
    return int(number) * units[unit]


def count_types(types: Mapping[str, int]) -> str:
    """Tensor types with their numbers, the most frequent first."""
    ranked = sorted(types.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {name}" for name, count in ranked)


@contextmanager
def byte_progress(
    title: str, total: int, note: Callable[[], str] = lambda: ""
) -> Iterator[Callable[[int], None]]:
    """Progress on standard error: a bar on a terminal, a line every few seconds elsewhere.

    note: gives what else is to be said. Yields a function to be called with the number of bytes
    just done.
    """
    if not sys.stderr.isatty():
        yield _plain_progress(title, total, note)
        return
    from rich import progress as bars  # noqa: PLC0415  (slow to import)
    from rich.console import Console  # noqa: PLC0415

    with bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda count: bar.update(task, advance=count, note=note())


def _plain_progress(title: str, total: int, note: Callable[[], str]) -> Callable[[int], None]:
    began = shown = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.monotonic()
        if now - shown >= _PLAIN_PROGRESS_SECONDS and done < total:
            shown = now
            rate = done / (now - began)
            typer.echo(
                f"{title}: {done / total:.0%}, {human_bytes(rate)}/s, "
                f"{(total - done) / rate:.0f} s left" + (f", {text}" if (text := note()) else ""),
                err=True,
            )

    return advance
