"""Exclusive use of a model that holds a single sequence: one call or stream at a time."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .._owner import refuse_fork
from ..errors import NativeError

# Seconds between two checks whether the thread that holds the model is still alive.
_POLL = 0.5


class Lease:
    """Exclusive use of the model by one call or stream.

    A stream that is not read to its end keeps its lease until it is closed or collected, or until
    its thread makes another call: then `revoke` closes the stream.
    """

    def __init__(self, revoke: Callable[[], None]) -> None:
        self.revoke = revoke
        self.over = False
        self.running = False
        self.stopped = False
        self.thread = threading.current_thread()  # the thread that used it last


class ModelLock:
    """Grants leases one at a time.

    wait: whether other threads wait for the current lease to end or get a NativeError. A fork of
    the process gets a NativeError, too.
    """

    def __init__(self, *, wait: bool) -> None:
        self._wait = wait
        self._process = os.getpid()
        self._lease: Lease | None = None
        self._changed = threading.Condition()

    def is_ours(self) -> bool:
        """Whether this thread is working under the current lease, as in a nested call."""
        lease = self._lease
        return lease is not None and lease.running and lease.thread is threading.current_thread()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called since the current lease was granted."""
        lease = self._lease
        return lease is not None and lease.stopped

    def stop(self) -> None:
        """Ask the holder of the current lease to end early."""
        with self._changed:
            if self._lease is not None:
                self._lease.stopped = True

    def acquire(self, revoke: Callable[[], None] = lambda: None) -> Lease:
        """Return a new lease once the last one has ended; pass it to `run`, finally to `release`.

        revoke: called if another call of this thread takes the model before the lease is released.
        """
        refuse_fork("model", self._process)
        with self._changed:
            while (last := self._lease) is not None and not self._can_revoke(last):
                if not self._wait:
                    raise NativeError("the model is in use by another thread")
                self._changed.wait(_POLL)
            if last is not None:
                last.over = True
            self._lease = lease = Lease(revoke)
        if last is not None:
            last.revoke()
        return lease

    @staticmethod
    def _can_revoke(last: Lease) -> bool:
        """Whether a lease is an unread stream that no other live thread can continue."""
        here = last.thread is threading.current_thread()
        return not last.running and (here or not last.thread.is_alive())

    @contextmanager
    def run(self, lease: Lease) -> Iterator[None]:
        """Enclose a piece of work under a lease; NativeError if the lease has been revoked."""
        with self._changed:
            if lease.over:
                raise NativeError(
                    "this stream has ended because the model was used for another call; read a "
                    "stream to its end before the next call, or load the model twice"
                )
            lease.thread = threading.current_thread()
            lease.running = True
        try:
            yield
        finally:
            lease.running = False

    def release(self, lease: Lease) -> None:
        """End a lease, so that the next one can be granted."""
        with self._changed:
            lease.over = True
            if self._lease is lease:
                self._lease = None
                self._changed.notify_all()

    def release_all(self) -> None:
        """End the current lease, if any, and wake the threads that wait for it."""
        with self._changed:
            if self._lease is not None:
                self.release(self._lease)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold a lease for the duration of `with`; nested calls share it."""
        if self.is_ours():
            yield
            return
        lease = self.acquire()
        try:
            with self.run(lease):
                yield
        finally:
            self.release(lease)
