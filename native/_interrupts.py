"""Ctrl-C, held back while it would be lost, or objects of C have no owner yet."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class HeldInterrupts:
    """Inside `with`, SIGINT only sets a mark; at its end whoever handles it is called.

    Python handles signals in its main thread alone: in another one nothing has to be held.
    """

    def __init__(self) -> None:
        self._came = False
        self._handler: Any = None

    @property
    def ends_all(self) -> bool:
        """Whether KeyboardInterrupt will come out, so that the work can be cut short."""
        return self._came and self._handler is signal.default_int_handler

    def __enter__(self) -> "HeldInterrupts":
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self._came = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._came:
            try:
                self._handler(signal.SIGINT, None)
            except BaseException as interrupt:
                raise interrupt from None  # not from what was cut short
