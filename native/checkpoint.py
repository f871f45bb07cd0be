"""Checkpoints of a session's sequence, as objects or as bytes."""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._bindings import CheckpointInfo, check, library
from ._owner import Owner


class CheckpointKind(IntEnum):
    """What a checkpoint holds, and where.

    DEVICE and HOST: only the recurrent state, in device or host memory; valid in the session that
    made it as long as none of its tokens are removed. HOST is serializable if the model is
    recurrent, for `Session.attach`. HEAD: all but the trunk's state, that is the
    head's and the text that is drafted from, serializable. WHOLE: the trunk's, too, serializable,
    for any session with the same model.
    """

    DEVICE = 0
    HOST = 1
    HEAD = 2
    WHOLE = 3


class Checkpoint(Owner):
    """The state of a sequence, from `Session.save` or `from_bytes`. Close it, or use `with`.

    kind, length: its kind and number of tokens. nbytes: its size in host memory. can_be_written:
    whether it can be serialized.
    """

    _what = "checkpoint"
    _borrowed: NDArray[np.uint8] | None = None

    def __init__(self, make: Callable[[Any], None]) -> None:
        """Create it with `make`, which stores the C handle at the address it is given."""
        handle = self._own(library().mtp_checkpoint_free)
        make(ctypes.byref(handle))
        info = CheckpointInfo()
        check(library().mtp_checkpoint_get_info(handle, ctypes.byref(info)))
        self.kind = CheckpointKind(info.kind)
        self.length: int = info.length
        self.nbytes: int = info.bytes
        self._written_bytes: int = info.written_bytes
        self.can_be_written = self._written_bytes > 0

    @classmethod
    def from_bytes(cls, data: bytes | NDArray[np.uint8], *, borrow: bool = False) -> "Checkpoint":
        """Read the output of `to_bytes`; ModelRefusedError says what is wrong with invalid data.

        borrow: do not copy it; nobody may change the data until the checkpoint is closed.
        """
        array = np.frombuffer(data, np.uint8)
        address = array.ctypes.data_as(ctypes.c_void_p)
        read = library().mtp_checkpoint_borrow if borrow else library().mtp_checkpoint_read
        checkpoint = cls(lambda out: check(read(address, array.size, out)))
        checkpoint._borrowed = array if borrow else None
        return checkpoint

    def to_bytes(self) -> bytes:
        """Serialize it for another session or process; NativeError if its kind cannot leave it."""
        return self.to_array().tobytes()

    def to_array(self) -> NDArray[np.uint8]:
        """Return the bytes of `to_bytes` without copying them once more."""
        out = np.empty(self._written_bytes, np.uint8)
        address = out.ctypes.data_as(ctypes.c_void_p)
        self._call(library().mtp_checkpoint_write, address, out.size)
        return out
