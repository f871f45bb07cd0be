"""The state of a session's sequence, to come back to, as an object or as bytes."""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from typing import Any

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

    def __init__(self, make: Callable[[Any], None]) -> None:
        """make: fills in the handle at the address that it is given."""
        handle = self._own(library().mtp_checkpoint_free)
        make(ctypes.byref(handle))
        info = CheckpointInfo()
        check(library().mtp_checkpoint_get_info(handle, ctypes.byref(info)))
        self.kind = CheckpointKind(info.kind)
        self.length: int = info.length
        self.nbytes: int = info.bytes
        self._written_bytes: int = info.written_bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> "Checkpoint":
        """What `to_bytes` gave; ModelRefusedError names what is wrong with other bytes."""
        return cls(lambda out: check(library().mtp_checkpoint_read(data, len(data), out)))

    def to_bytes(self) -> bytes:
        """The checkpoint for another session or process; kinds HEAD and WHOLE alone."""
        out = ctypes.create_string_buffer(self._written_bytes)
        check(library().mtp_checkpoint_write(self.handle, out, self._written_bytes))
        return out.raw
