"""llama.cpp's log, captured so that its last lines can be shown in error messages."""

from ._bindings import check, library


def listen(verbose: bool) -> None:
    """Capture llama.cpp's log and clear what was captured before; verbose: print it as well."""
    check(library().mtp_log_listen(verbose))


def last_lines() -> list[str]:
    """Return the last captured lines, oldest first."""
    text: str = library().mtp_log_last().decode(errors="replace")
    return text.split("\n")[:-1]


def indented() -> str:
    """Return the last lines, indented, to append to an error message; "" if there are none."""
    return "".join(f"\n  {line}" for line in last_lines())
