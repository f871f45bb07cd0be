"""One call or stream at a time on a model that holds one text."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import NativeError

# A waiting thread looks so often, in seconds, whether the one that it waits for still lives.
_POLL = 0.5


class Turn:
    """A call's or stream's time with the model.

    A stream that nobody reads to its end keeps its turn until it is closed or collected, or until
    its thread calls for something else: `leave` then makes room for that.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self.leave = leave
        self.over = False
        self.running = False
        self.thread = threading.current_thread()  # that ran it last


class Turns:
    """Gives turns. A second thread waits for the first one's, or NativeError (wait=False)."""

    def __init__(self, *, wait: bool) -> None:
        self._wait = wait
        self._turn: Turn | None = None
        self._changed = threading.Condition()

    def within(self) -> bool:
        """Whether this thread is inside of a running turn, whose work this call is then part of."""
        turn = self._turn
        return turn is not None and turn.running and turn.thread is threading.current_thread()

    def begin(self, leave: Callable[[], None] = lambda: None) -> Turn:
        """A new turn, once there is room for it; give it to `run` and in the end to `end`."""
        with self._changed:
            while (last := self._turn) is not None and not self._can_follow(last):
                if not self._wait:
                    raise NativeError("the model is in use by another thread")
                self._changed.wait(_POLL)
            if last is not None:
                last.over = True
            self._turn = turn = Turn(leave)
        if last is not None:
            last.leave()
        return turn

    @staticmethod
    def _can_follow(last: Turn) -> bool:
        """Whether a turn is an unread stream that nobody else can go on with."""
        here = last.thread is threading.current_thread()
        return not last.running and (here or not last.thread.is_alive())

    @contextmanager
    def run(self, turn: Turn) -> Iterator[None]:
        """Around each piece of a turn's work; NativeError once another turn has followed."""
        with self._changed:
            if turn.over:
                raise NativeError(
                    "this stream has ended: the model was called for something else since; read a "
                    "stream to its end before the next call, or load the model twice"
                )
            turn.thread = threading.current_thread()
            turn.running = True
        try:
            yield
        finally:
            turn.running = False

    def end(self, turn: Turn) -> None:
        """Make room for the next turn."""
        with self._changed:
            turn.over = True
            if self._turn is turn:
                self._turn = None
                self._changed.notify_all()

    def end_all(self) -> None:
        """End the turn that somebody has, for those who wait."""
        with self._changed:
            if self._turn is not None:
                self.end(self._turn)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A turn for what is done at once."""
        if self.within():
            yield
            return
        turn = self.begin()
        try:
            with self.run(turn):
                yield
        finally:
            self.end(turn)
