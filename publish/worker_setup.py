"""What dask runs in each worker process of this machine when it starts."""

import signal


def dask_setup(_worker: object) -> None:
    """Leave Ctrl-C, which a terminal sends to all its processes, to the one that has started us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
