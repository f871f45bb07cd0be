"""llama.cpp's log, captured so that its last lines can be shown in error messages."""

from ._bindings import check, indented_log, library

__all__ = ["indented_log", "listen"]


def listen(verbose: bool) -> None:
    """Capture llama.cpp's log and clear what was captured before; verbose: print it as well."""
    check(library().mtp_log_listen(verbose))
