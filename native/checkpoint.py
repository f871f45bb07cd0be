"""The state of a session's sequence, to come back to, as an object or as bytes."""

import ctypes
from enum import IntEnum

from ._bindings import CheckpointInfo, check, library
from ._owner import Owner


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


class Checkpoint(Owner):
    """A sequence at one length; `Session.save` and `from_bytes` make them. Close it, or use `with`.

    kind, length: its kind and number of tokens. nbytes: held in host memory.
    """

    _what = "checkpoint"

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._own(handle, library().mtp_checkpoint_free)
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
