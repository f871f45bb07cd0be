"""Being told to stop in other ways than Ctrl-C."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def stops_cleanly() -> Iterator[None]:
    """Let SIGTERM and SIGHUP do meanwhile what Ctrl-C does: raise KeyboardInterrupt, once.

    Signals that somebody ignores (nohup) or handles already are left to them; so are all where
    this is not the main thread, which alone can have handlers.
    """
    held = {}
    if threading.current_thread() is threading.main_thread():
        held = {n: signal.SIG_DFL for n in _STOPS if signal.getsignal(n) is signal.SIG_DFL}

    def stop(_number: int, _frame: FrameType | None) -> None:
        for number in held:  # cleaning up is not to be stopped in its turn
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in held:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
