"""What all commands share at the console: errors, signals and progress."""

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import typer

from mtp_gguf.gguf_tools.errors import MtpGgufError, OptionError
from mtp_gguf.gguf_tools.machine.interrupted import Interrupted
from mtp_gguf.gguf_tools.machine.text import duration, human_bytes, printable, utf8_bytes

from .out_of_memory import OUT_OF_MEMORY, is_out_of_memory

P = ParamSpec("P")
R = TypeVar("R")

# The base of typer.BadParameter, for which typer has no public name.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]

INTERRUPTED = 130  # 128 and SIGINT
_BROKEN_PIPE = 141  # 128 and SIGPIPE: what a shell reports for a program that SIGPIPE ended
_STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
NARROW = 60  # columns of a terminal that are too few for Rich's tables and bars
# Seconds between two lines of progress if standard error is not a terminal.
_PLAIN_PROGRESS_SECONDS = 5.0
_PLAIN_STATUS_SECONDS = 10.0
_EARLY = 0.02  # before this share is done, the estimate of the time left is unreliable


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorate a command so that expected errors end in one sentence and an exit code.

    The code is 1, or 2 for wrong usage; after a signal it is 128 plus its number, as in a shell.
    With --json (`as_json`) the sentence is also printed as JSON.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        as_json = bool(kwargs.get("as_json"))

        def fail(text: str, code: int = 1, fields: Mapping[str, Any] | None = None) -> typer.Exit:
            if as_json:
                print_json_error(text, code, fields)
            typer.echo(f"mtp-gguf: {printable(text)}", err=True)
            return typer.Exit(code)

        with stops_cleanly() as stop:
            try:
                with usage_errors():
                    result = command(*args, **kwargs)
                sys.stdout.flush()
                return result
            except MtpGgufError as error:
                raise fail(str(error)) from None
            except USAGE_ERROR as error:
                if as_json:
                    print_json_error(error.format_message(), error.exit_code)
                raise
            except BrokenPipeError:  # the reader of the pipe, such as `head`, has closed it
                raise typer.Exit(_BROKEN_PIPE) from None
            except OSError as error:  # from the system, such as a full temporary folder
                where = f"{error.filename}: " if error.filename else ""
                reason = error.strerror or str(error) or type(error).__name__
                raise fail(f"{where}{reason}") from None
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise fail(OUT_OF_MEMORY) from None
            except KeyboardInterrupt as error:
                known = error if isinstance(error, Interrupted) else Interrupted()
                detail = f"; {known}" if str(known) else ""
                raise fail(f"interrupted{detail}", 128 + stop.signal, known.fields) from None
            finally:
                _finish_output()

    return wrapped


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn an OptionError of the library into a usage error."""
    try:
        yield
    except OptionError as error:
        raise typer.BadParameter(error.text, param_hint=error.option) from None


def print_json_error(text: str, code: int, fields: Mapping[str, Any] | None = None) -> None:
    """Print the error of a command that was called with --json, after the fields of its result."""
    record = {**(fields or {}), "error": text, "exit_code": code}
    typer.echo(utf8_bytes(json.dumps(record, ensure_ascii=False)).decode())


def _finish_output() -> None:
    """Flush standard output; if the pipe is closed, discard it so that Python exits quietly."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def say(text: str) -> None:
    """Print a line on standard error, above the status line if one is shown.

    typer.echo writes to the file itself, and so into the status line.
    """
    print(text, file=sys.stderr, flush=True)


@contextmanager
def byte_progress(
    title: str, total: int, note: Callable[[], str] = lambda: ""
) -> Iterator[Callable[[int], None]]:
    """Show progress on standard error: a bar on a terminal, else a line every few seconds.

    note: returns additional text. Yields a function to call with the number of bytes just
    processed.
    """
    if not sys.stderr.isatty():
        yield _plain_progress(title, total, note)
        return
    from rich import progress as bars  # noqa: PLC0415  (slow to import)
    from rich.console import Console  # noqa: PLC0415

    console = Console(stderr=True)
    columns: list[bars.ProgressColumn] = [
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[note]}"),
    ]
    if console.width < NARROW:  # there is no room for more than the share and the time left
        columns = [columns[i] for i in (0, 2, 5)]
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda count: bar.update(task, advance=count, note=note())


def _plain_progress(title: str, total: int, note: Callable[[], str]) -> Callable[[int], None]:
    began = shown = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.monotonic()
        if now - shown >= _PLAIN_PROGRESS_SECONDS and 0 < done < total:
            shown = now
            rate = done / (now - began)
            typer.echo(
                f"{title}: {done / total:.0%}, {human_bytes(rate)}/s, "
                f"{(total - done) / rate:.0f} s left" + (f", {text}" if (text := note()) else ""),
                err=True,
            )

    return advance


@contextmanager
def status_line(first: str) -> Iterator[Callable[[str], None]]:
    """Show a status on standard error: a changing line on a terminal, else one every few seconds.

    Yields a function to call with the new text.
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
        """Print a new kind of work at once, and news of the same kind every few seconds."""
        nonlocal shown, kind
        now, new = time.monotonic(), text.partition(":")[0]
        if new != kind or now - shown >= _PLAIN_STATUS_SECONDS:
            shown, kind = now, new
            typer.echo(text, err=True)

    yield update


@contextmanager
def share_progress(name: str) -> Iterator[Callable[[float, str], None]]:
    """Show a status line with the share done and the time left, on standard error.

    Yields a function to call with the share done, 0 to 1, and the current activity.
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


@dataclass
class Stop:
    """The signal that stopped a command; SIGINT until another one arrives."""

    signal: int = signal.SIGINT


@contextmanager
def stops_cleanly() -> Iterator[Stop]:
    """Make SIGTERM and SIGHUP act like Ctrl-C: raise KeyboardInterrupt, once.

    Signals that are ignored (nohup) or already handled stay so. Outside the main thread nothing
    changes, because only the main thread can install handlers. A signal that arrives while the
    handlers are restored ends the process, as after that.
    """
    stop = Stop()
    ours = {}
    if threading.current_thread() is threading.main_thread():
        ours = {n: signal.SIG_DFL for n in _STOP_SIGNALS if signal.getsignal(n) is signal.SIG_DFL}

    over = False

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if over:  # nobody waits for KeyboardInterrupt any more
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        for each in ours:  # a second signal must not interrupt the cleanup
            signal.signal(each, signal.SIG_IGN)
        stop.signal = number
        raise KeyboardInterrupt

    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield stop
    finally:
        over = True
        for number, handler in ours.items():
            signal.signal(number, handler)
