"""What a program says when llama.cpp ends it."""

import faulthandler

from ._bindings import check, library


def tell_crashes() -> None:
    """Have what crashes this process end it with one sentence and exit code 1 from now on.

    For programs; a library leaves the process as it is. Whoever has enabled faulthandler gets its
    traceback instead.
    """
    if not faulthandler.is_enabled():
        check(library().mtp_tell_crashes())
