"""The base class of Python objects that own a C object."""

import atexit
import ctypes
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ._bindings import check, library
from .errors import NativeError

_Self = TypeVar("_Self", bound="Owner")

# Every owner of this process, in the order in which they were made.
_owners: "weakref.WeakValueDictionary[int, Owner]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_ending = threading.Event()  # the process is ending, and what it owned is freed


@atexit.register
def _free_all() -> None:
    """Free what is left at the end of the process.

    A daemon thread may still be in a call. llama.cpp must not compute while the process destroys
    its libraries, so the call is waited for, and the thread then waits in `_alone`.
    """
    _ending.set()
    if _owners:
        library().mtp_abort_decoding()
    for _, owner in sorted(_owners.items(), reverse=True):
        with suppress(NativeError):
            owner.close()


def _free_once(
    free: Callable[[ctypes.c_void_p], None], handle: ctypes.c_void_p, process: int
) -> None:
    """Free a C object and clear its handle, so that later use is detected.

    In a fork of its process it is not freed, because it may have threads, which a fork lacks.
    """
    last = ctypes.c_void_p(handle.value)
    handle.value = None
    if last and os.getpid() == process:
        free(last)


def refuse_fork(name: str, process: int) -> None:
    """NativeError in a fork of `process`, where llama.cpp would wait for threads for ever."""
    if os.getpid() != process:
        raise NativeError(
            f"the {name}: expected a call in the process that loaded it, found one in its fork, "
            "which lacks llama.cpp's threads; load the model in the child process, or start that "
            'with multiprocessing\'s method "spawn"'
        )


class Owner:
    """Frees its C object on `close`, at the end of `with`, or when garbage-collected.

    A call while another thread's call runs raises NativeError.
    """

    _what: str  # the object's name in error messages, e.g. "head"
    _runs_threads = False  # whether it cannot be used in a fork
    _parts: tuple["Owner", ...] = ()  # which its C object uses as well

    def _own(self, free: Callable[[ctypes.c_void_p], None]) -> ctypes.c_void_p:
        """Return a null handle for C to set; it is owned already, as Ctrl-C may follow the call."""
        handle = ctypes.c_void_p()
        self._handle = handle
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._free = partial(_free_once, free, handle, self._process)
        weakref.finalize(self, self._free).atexit = False
        _owners[next(_numbers)] = self
        return handle

    @property
    def closed(self) -> bool:
        """Whether the C object has been freed, by `close` or at the end of the process."""
        return not self._handle

    @property
    def handle(self) -> ctypes.c_void_p:
        """The C handle; NativeError once it or an object that it uses is closed."""
        if self.closed:
            raise NativeError(f"the {self._what} is closed")
        for part in self._parts:
            _ = part.handle
        return self._handle

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        """Call a C function with this object, and others, while no other thread can use them."""
        others = [argument for argument in arguments if isinstance(argument, Owner)]

        def call() -> None:
            values = (a.handle if isinstance(a, Owner) else a for a in arguments)
            check(function(self.handle, *values))

        self._alone(call, *others)

    def _alone(self, work: Callable[[], None], *others: "Owner") -> None:
        """Do some work while no other thread can use this object, its parts and others."""
        try:
            self._locked(work, *others)
        except NativeError:
            if _ending.is_set() and threading.current_thread() is not threading.main_thread():
                threading.Event().wait()  # a daemon thread, which Python ends with the process
            raise

    def _locked(self, work: Callable[[], None], *others: "Owner") -> None:
        """Do what `_alone` does.

        `with` releases a lock even if Ctrl-C comes at once, unlike acquire() followed by try.
        """
        if self._runs_threads:
            refuse_fork(self._what, self._process)
        if self._lock.locked() and not _ending.is_set():
            raise NativeError(f"the {self._what} is in use by another thread")
        for other in dict.fromkeys((*self._parts, *others)):
            work = partial(other._locked, work)
        with self._lock:
            work()

    def close(self) -> None:
        """Free the C object; a second call does nothing. NativeError if another thread uses it."""
        if os.getpid() == self._process:
            self._alone(self._free)
        else:
            self._free()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
