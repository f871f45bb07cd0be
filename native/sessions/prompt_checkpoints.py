"""Copies of a recurrent state near the ends of prompts, from which a changed prompt continues."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import Checkpoint
from ..errors import ModelRefusedError, NativeError
from ..session import Session


class PromptCheckpoints:
    """Up to `most` checkpoints of one sequence, of kind HOST.

    A recurrent state cannot be cut, so a prompt that leaves out what follows one of them continues
    there instead of at its beginning.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._checkpoints: list[Checkpoint] = []  # the shortest first

    def add(self, session: Session, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint of all tokens of the session, and close it later.

        If there are too many, the older checkpoint that follows another most closely is dropped:
        losing it costs the fewest tokens.
        """
        checkpoints = [c for c in self.fitting(session) if c.length < checkpoint.length]
        checkpoints.append(checkpoint)
        while len(checkpoints) > self.most:
            lengths = [0, *(c.length for c in checkpoints[:-1])]
            del checkpoints[int(np.argmin(np.diff(lengths)))]
        self.replace(checkpoints)

    def fitting(self, session: Session) -> list[Checkpoint]:
        """Return those whose tokens the session still holds, the shortest first; close others."""
        self.replace([c for c in self._checkpoints if session.can_restore(c)])
        return list(self._checkpoints)

    def restore(self, session: Session, most: int) -> int:
        """Restore the longest that has `most` tokens at most; return its length, or 0."""
        for checkpoint in reversed(self.fitting(session)):
            if checkpoint.length <= most:
                try:
                    session.restore(checkpoint)
                except NativeError:  # which leaves an empty session
                    return 0
                return checkpoint.length
        return 0

    def to_arrays(self, session: Session) -> dict[int, NDArray[np.uint8]]:
        """Return the bytes of those that fit, by length; none if the model is not recurrent."""
        return {c.length: c.to_array() for c in self.fitting(session) if c.can_be_written}

    def load(
        self, session: Session, lengths: Sequence[int], arrays: Sequence[NDArray[np.uint8]]
    ) -> None:
        """Keep checkpoints from the bytes of `to_arrays` instead of those before.

        The caller vouches that the session holds their tokens. NativeError, and none is kept, if
        they are not of these lengths, or do not fit otherwise.
        """
        self.close()
        try:
            for length, data in zip(lengths, arrays, strict=True):
                checkpoint = Checkpoint.from_bytes(data, borrow=True)
                self._checkpoints.append(checkpoint)
                if checkpoint.length != length:
                    raise ModelRefusedError(
                        f"earlier: expected a checkpoint of {length} tokens, found one of "
                        f"{checkpoint.length}"
                    )
                session.attach(checkpoint)
        except NativeError:
            self.close()
            raise

    def replace(self, checkpoints: list[Checkpoint]) -> None:
        """Keep these, the shortest first, and close all others."""
        for checkpoint in self._checkpoints:
            if checkpoint not in checkpoints:
                checkpoint.close()
        self._checkpoints = checkpoints

    def close(self) -> None:
        """Close all; a second call does nothing."""
        self.replace([])
