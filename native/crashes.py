"""A crash message for programs that llama.cpp terminates."""

import faulthandler

from ._bindings import check, library


def tell_crashes() -> None:
    """Make crashes of this process print one sentence and end it with exit code 1 from now on.

    Only for programs, not for libraries. If faulthandler is enabled, its traceback is printed
    instead.
    """
    if not faulthandler.is_enabled():
        check(library().mtp_tell_crashes())
