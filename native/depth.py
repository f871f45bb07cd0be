"""The native library's choice of the draft depth, usable without a session."""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ._bindings import CycleOutcome, check, library


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cycle; see mtp_cycle_outcome in mtp.h.

    probabilities: the head's probability of each drafted token. next_right: whether the first
    unverified draft matched the token generated at its position, or the probability of a match;
    None if unknown. Times are in milliseconds; 0 means not measured.
    """

    probabilities: Sequence[float] = ()
    verified: int = 0
    accepted: int = 0
    next_right: float | None = None
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    rollback_ms: float = 0.0


class DepthChooser:
    """Chooses the draft depth from reported costs and outcomes, deterministically.

    One cycle: `plan`, draft, `keep`, verify, `report`. A Session has its own for the depth "auto";
    this class is for simulations and other runtimes.
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
        """Return a chooser for another sequence of the same runtime; the two share their costs."""
        handle = ctypes.c_void_p()
        check(library().mtp_depth_new_beside(self._handle, ctypes.byref(handle)))
        other = DepthChooser.__new__(DepthChooser)
        other._own(handle)
        return other

    def share(self, n_sequences: int) -> None:
        """Set how many sequences share the next batches; initially 1."""
        check(library().mtp_depth_share(self._handle, n_sequences))

    def report_batch(self, n_tokens: int, ms: float) -> None:
        """Report the time of a batch that verified `n_tokens`, counted over all its sequences.

        Call it once per batch and leave verify_ms of the sequences' outcomes at 0.
        """
        check(library().mtp_depth_report_batch(self._handle, n_tokens, ms))

    def report_draft(self, n_sequences: int, depth: int, ms: float) -> None:
        """Report the time of a graph that drafted for sequences, `depth` for the deepest of them.

        Call it once per graph and leave draft_ms of the sequences' outcomes at 0.
        """
        check(library().mtp_depth_report_draft(self._handle, n_sequences, depth, ms))

    def set_costs(self, verify_ms: Sequence[float], draft_ms: Sequence[float]) -> None:
        """Set known costs: of batches of 1, 2, … tokens, and of drafting 1, 2, … tokens."""
        verify = (ctypes.c_double * len(verify_ms))(*verify_ms)
        draft = (ctypes.c_double * len(draft_ms))(*draft_ms)
        check(library().mtp_depth_set_costs(self._handle, verify, len(verify), draft, len(draft)))

    def plan(self, room: int) -> int:
        """Return how many tokens to draft, at most `room`."""
        check(library().mtp_depth_plan(self._handle, room, ctypes.byref(self._out)))
        return self._out.value

    def keep(self, probabilities: Sequence[float], *, drawn: bool = False) -> int:
        """Return how many of the drafts with these probabilities to verify.

        drawn: the drafts were sampled, so a draft's own probability must not decide about it.
        """
        values = (ctypes.c_float * len(probabilities))(*probabilities)
        out = ctypes.byref(self._out)
        check(library().mtp_depth_keep(self._handle, values, len(values), drawn, out))
        return self._out.value

    def report(self, outcome: Outcome) -> None:
        """Report the outcome of the cycle."""
        values = (ctypes.c_float * len(outcome.probabilities))(*outcome.probabilities)
        raw = CycleOutcome(
            len(values),
            outcome.verified,
            outcome.accepted,
            values,
            -1.0 if outcome.next_right is None else outcome.next_right,
            outcome.draft_ms,
            outcome.verify_ms,
            outcome.rollback_ms,
        )
        check(library().mtp_depth_report(self._handle, ctypes.byref(raw)))


def plan_batch(choosers: Sequence[DepthChooser], rooms: Sequence[int]) -> list[int]:
    """Return how many tokens to draft for each of the sequences that share a graph and a batch."""
    n = len(choosers)
    out = (ctypes.c_int32 * n)()
    limits = (ctypes.c_int32 * n)(*rooms)
    check(library().mtp_depth_plan_batch(_handles(choosers), limits, n, out))
    return list(out)


def keep_batch(
    choosers: Sequence[DepthChooser], probabilities: Sequence[Sequence[float]], others: int = 0
) -> list[int]:
    """Return how many of each sequence's drafts, with these probabilities, to verify.

    others: further sequences in the batch, with a token each.
    """
    n = len(choosers)
    out = (ctypes.c_int32 * n)()
    drafted = (ctypes.c_int32 * n)(*map(len, probabilities))
    floats = ctypes.POINTER(ctypes.c_float)
    arrays = [(ctypes.c_float * len(values))(*values) for values in probabilities]
    pointers = (floats * n)(*(ctypes.cast(array, floats) for array in arrays))
    check(library().mtp_depth_keep_batch(_handles(choosers), pointers, drafted, n, others, out))
    return list(out)


def _handles(choosers: Sequence[DepthChooser]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(choosers))(*(chooser._handle for chooser in choosers))
