"""llama.cpp's log, kept quiet: the last lines wait for an exception that wants them."""

from ._bindings import check, library


def listen(verbose: bool) -> None:
    """Take over llama.cpp's log; verbose: print it as well."""
    check(library().mtp_log_listen(verbose))


def last_lines() -> list[str]:
    """The last lines since then, oldest first."""
    text: str = library().mtp_log_last().decode(errors="replace")
    return text.split("\n")[:-1]


def indented() -> str:
    """The last lines, each on a line of its own, to end a sentence with; "" for none."""
    return "".join(f"\n  {line}" for line in last_lines())
