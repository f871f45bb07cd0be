"""The base class of Python objects that own a C object."""

import ctypes
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from .errors import NativeError

_Self = TypeVar("_Self", bound="Owner")


def _free_once(free: Callable[[ctypes.c_void_p], None], handle: ctypes.c_void_p) -> None:
    """Free a C object and clear its handle, so that later use is detected."""
    last = ctypes.c_void_p(handle.value)
    handle.value = None
    free(last)


class Owner:
    """Frees its C object on `close`, at the end of `with`, or when garbage-collected."""

    _what: str  # the object's name in error messages, e.g. "head"

    def _own(self, free: Callable[[ctypes.c_void_p], None]) -> ctypes.c_void_p:
        """Return a null handle for C to set; it is owned already, as Ctrl-C may follow the call."""
        handle = ctypes.c_void_p()
        self._handle = handle
        self._free = weakref.finalize(self, _free_once, free, handle)
        return handle

    @property
    def closed(self) -> bool:
        """Whether the C object has been freed, by `close` or at the end of the process."""
        return not self._handle

    @property
    def handle(self) -> ctypes.c_void_p:
        """The C handle; NativeError once closed."""
        if self.closed:
            raise NativeError(f"the {self._what} is closed")
        return self._handle

    def close(self) -> None:
        """Free the C object; a second call does nothing."""
        self._free()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
