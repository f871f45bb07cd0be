"""What owns an object of the C library."""

import ctypes
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from .errors import NativeError

_Self = TypeVar("_Self", bound="Owner")


def _free_once(free: Callable[[ctypes.c_void_p], None], handle: ctypes.c_void_p) -> None:
    """Free a C object and empty its handle, by which those who outlive it see that it is gone."""
    last = ctypes.c_void_p(handle.value)
    handle.value = None
    free(last)


class Owner:
    """Frees its C object on `close`, at the end of `with`, or when nothing refers to it."""

    _what: str  # in errors: "head"

    def _own(self, free: Callable[[ctypes.c_void_p], None]) -> ctypes.c_void_p:
        """An empty handle for C to fill in, owned before it is: Ctrl-C may come right after."""
        handle = ctypes.c_void_p()
        self._handle = handle
        self._free = weakref.finalize(self, _free_once, free, handle)
        return handle

    @property
    def closed(self) -> bool:
        """Whether it is freed: by `close`, or because the process ends or all is collected."""
        return not self._handle

    @property
    def handle(self) -> ctypes.c_void_p:
        """The C handle; NativeError once closed."""
        if self.closed:
            raise NativeError(f"the {self._what} is closed")
        return self._handle

    def close(self) -> None:
        """Free it; a second call does nothing."""
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
