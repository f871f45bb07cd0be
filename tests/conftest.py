"""Ctrl-C as a terminal gives it: what a script starts in its background has SIGINT ignored.

The processes that tests start and interrupt would inherit that, and never hear of it.
"""

import signal


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
