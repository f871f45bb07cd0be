"""The state of a session's sequence, to come back to, as an object or as bytes."""

import ctypes
import weakref
from enum import IntEnum
from types import TracebackType

from ._bindings import CheckpointInfo, check, library
from .errors import NativeError


class CheckpointKind(IntEnum):
    """What a checkpoint holds, and where.

    DEVICE and HOST: the recurrent state alone, in device or host memory, for the session that made
    it and as long as none of its tokens is removed. HEAD: the head's part, as bytes. WHOLE: trunk
    and head, as bytes for any session on the same model.
    """

    DEVICE = 0
    HOST = 1
    HEAD = 2
    WHOLE = 3


class Checkpoint:
    """A sequence at one length; `Session.save` and `from_bytes` make them. Close it, or use `with`.

    kind, length: its kind and number of tokens. nbytes: held in host memory.
    """

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._handle: ctypes.c_void_p | None = handle
        self._free = weakref.finalize(self, library().mtp_checkpoint_free, handle)
        info = CheckpointInfo()
        check(library().mtp_checkpoint_get_info(handle, ctypes.byref(info)))
        self.kind = CheckpointKind(info.kind)
        self.length: int = info.length
        self.nbytes: int = info.bytes
        self._written_bytes: int = info.written_bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> "Checkpoint":
        """What `to_bytes` gave; ModelRefusedError names what is wrong with other bytes."""
        handle = ctypes.c_void_p()
        check(library().mtp_checkpoint_read(data, len(data), ctypes.byref(handle)))
        return cls(handle)

    def to_bytes(self) -> bytes:
        """The checkpoint for another session or process; kinds HEAD and WHOLE alone."""
        out = ctypes.create_string_buffer(self._written_bytes)
        check(library().mtp_checkpoint_write(self.handle, out, self._written_bytes))
        return out.raw

    def close(self) -> None:
        """Free it; a second call does nothing."""
        self._handle = None
        self._free()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def handle(self) -> ctypes.c_void_p:
        """The C handle; NativeError once closed."""
        if self._handle is None:
            raise NativeError("the checkpoint is closed")
        return self._handle
