"""What dask runs in each worker process of this machine when it starts."""

import signal
from importlib import import_module


def dask_setup(_worker: object) -> None:
    """Import what units need, and leave Ctrl-C to the process that has started this one.

    A terminal sends Ctrl-C to all of its processes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in (f"{__package__}.file_units", "requests"):  # seconds, in which the client plans
        import_module(name)
