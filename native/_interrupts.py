"""Deferred Ctrl-C, for code in which an interrupt would be lost or would leak C objects."""

import signal
import threading
from types import FrameType
from typing import Any


class DeferredInterrupts:
    """Defer SIGINT to the end of `with`, when its handler is called.

    Python handles signals only in the main thread, so in other threads this does nothing.
    """

    def __init__(self) -> None:
        self._pending = False
        self._handler: Any = None

    @property
    def will_raise(self) -> bool:
        """Whether KeyboardInterrupt will be raised at the end, so the work can be cut short."""
        return self._pending and self._handler is signal.default_int_handler

    def __enter__(self) -> "DeferredInterrupts":
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._record)
        return self

    def _record(self, _signal: int, _frame: FrameType | None) -> None:
        self._pending = True

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._pending:
            try:
                self._handler(signal.SIGINT, None)
            except BaseException as interrupt:
                raise interrupt from None  # the error of the interrupted work is of no interest
