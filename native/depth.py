"""How many tokens to draft, cycle by cycle: the library's own choice, on its own."""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ._bindings import CycleOutcome, check, library


@dataclass(frozen=True)
class Outcome:
    """What a cycle did; mtp_cycle_outcome in mtp.h says it in full.

    probabilities: the head's, of each drafted token. next_right: whether the first draft that was
    not verified was what came in its place, or the chance of it; None: not known. Times in ms.
    """

    probabilities: Sequence[float] = ()
    verified: int = 0
    accepted: int = 0
    next_right: float | None = None
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    undo_ms: float = 0.0


class DepthChooser:
    """Costs and outcomes in, depth out; no clock and no chance inside.

    One cycle: `plan`, draft, `keep`, verify, `report`. A Session has one of its own for the depth
    "auto"; this class is for simulations and for other runtimes.
    """

    def __init__(self, max_depth: int) -> None:
        handle = ctypes.c_void_p()
        check(library().mtp_depth_new(max_depth, ctypes.byref(handle)))
        self._own(handle)

    def _own(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle
        self._free = weakref.finalize(self, library().mtp_depth_free, handle)
        self._out = ctypes.c_int32()

    def beside(self) -> "DepthChooser":
        """A chooser for another sequence of the same runtime: costs hold for both."""
        handle = ctypes.c_void_p()
        check(library().mtp_depth_new_beside(self._handle, ctypes.byref(handle)))
        other = DepthChooser.__new__(DepthChooser)
        other._own(handle)
        return other

    def share(self, n_sequences: int) -> None:
        """Say how many sequences have their drafts in one batch from now on; 1 at first."""
        check(library().mtp_depth_share(self._handle, n_sequences))

    def report_batch(self, n_tokens: int, ms: float) -> None:
        """Say what a batch took that verified `n_tokens` of all its sequences together.

        Once for each batch; the outcomes' verify_ms are then 0.
        """
        check(library().mtp_depth_report_batch(self._handle, n_tokens, ms))

    def set_costs(self, verify_ms: Sequence[float], draft_ms: Sequence[float]) -> None:
        """What batches of 1, 2, … tokens and drafts of 1, 2, … tokens are known to cost."""
        verify = (ctypes.c_double * len(verify_ms))(*verify_ms)
        draft = (ctypes.c_double * len(draft_ms))(*draft_ms)
        check(library().mtp_depth_set_costs(self._handle, verify, len(verify), draft, len(draft)))

    def plan(self, room: int) -> int:
        """How many tokens to draft, at most `room`."""
        check(library().mtp_depth_plan(self._handle, room, ctypes.byref(self._out)))
        return self._out.value

    def keep(self, probabilities: Sequence[float], *, drawn: bool = False) -> int:
        """How many of the drafts with these probabilities to verify.

        drawn: they were drawn at random, so that none of them may decide about itself.
        """
        values = (ctypes.c_float * len(probabilities))(*probabilities)
        out = ctypes.byref(self._out)
        check(library().mtp_depth_keep(self._handle, values, len(values), drawn, out))
        return self._out.value

    def report(self, outcome: Outcome) -> None:
        """Say what came of the cycle."""
        values = (ctypes.c_float * len(outcome.probabilities))(*outcome.probabilities)
        raw = CycleOutcome(
            len(values),
            outcome.verified,
            outcome.accepted,
            values,
            -1.0 if outcome.next_right is None else outcome.next_right,
            outcome.draft_ms,
            outcome.verify_ms,
            outcome.undo_ms,
        )
        check(library().mtp_depth_report(self._handle, ctypes.byref(raw)))
