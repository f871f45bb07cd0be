"""The native library's choice of the draft depth, usable without a session."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._bindings import CycleOutcome, check, library
from ._owner import Owner


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


class DepthChooser(Owner):
    """Chooses the draft depth from reported costs and outcomes, deterministically.

    One cycle: `plan`, draft, `keep`, verify, `report`. A Session has its own for the depth "auto";
    this class is for simulations and other runtimes.
    """

    _what = "depth chooser"

    def __init__(self, max_depth: int) -> None:
        self._make(library().mtp_depth_new, max_depth)

    def _make(self, function: Callable[..., int], *arguments: Any) -> None:
        handle = self._own(library().mtp_depth_free)
        check(function(*arguments, ctypes.byref(handle)))
        self._out = ctypes.c_int32()

    def beside(self) -> "DepthChooser":
        """Return a chooser for another sequence of the same runtime; the two share their costs."""
        other = DepthChooser.__new__(DepthChooser)
        other._make(library().mtp_depth_new_beside, self.handle)
        other._lock = self._lock
        return other

    def expect(self, acceptance: float) -> None:
        """Set the acceptance of first drafts, 0 to 1, that is expected before any outcome."""
        self._call(library().mtp_depth_expect, acceptance)

    def share(self, n_sequences: int) -> None:
        """Set how many sequences share the next batches; initially 1."""
        self._call(library().mtp_depth_share, n_sequences)

    def report_batch(self, n_tokens: int, ms: float) -> None:
        """Report the time of a batch that verified `n_tokens`, counted over all its sequences.

        Call it once per batch and leave verify_ms of the sequences' outcomes at 0.
        """
        self._call(library().mtp_depth_report_batch, n_tokens, ms)

    def report_draft(self, n_sequences: int, depth: int, ms: float) -> None:
        """Report the time of a graph that drafted for sequences, `depth` for the deepest of them.

        Call it once per graph and leave draft_ms of the sequences' outcomes at 0.
        """
        self._call(library().mtp_depth_report_draft, n_sequences, depth, ms)

    def set_costs(self, verify_ms: Sequence[float], draft_ms: Sequence[float]) -> None:
        """Set known costs: of batches of 1, 2, … tokens, and of drafting 1, 2, … tokens."""
        verify = (ctypes.c_double * len(verify_ms))(*verify_ms)
        draft = (ctypes.c_double * len(draft_ms))(*draft_ms)
        self._call(library().mtp_depth_set_costs, verify, len(verify), draft, len(draft))

    def plan(self, room: int) -> int:
        """Return how many tokens to draft, at most `room`."""
        self._call(library().mtp_depth_plan, room, ctypes.byref(self._out))
        return self._out.value

    def keep(self, probabilities: Sequence[float], *, drawn: bool = False) -> int:
        """Return how many of the drafts with these probabilities to verify.

        drawn: the drafts were sampled, so a draft's own probability must not decide about it.
        """
        values = (ctypes.c_float * len(probabilities))(*probabilities)
        out = ctypes.byref(self._out)
        self._call(library().mtp_depth_keep, values, len(values), drawn, out)
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
        self._call(library().mtp_depth_report, ctypes.byref(raw))

    def state(self) -> bytes:
        """Return what it has learned, for another chooser's `set_state`."""
        state = bytearray()

        def get() -> None:
            size = ctypes.c_size_t()
            check(library().mtp_depth_state_size(self.handle, ctypes.byref(size)))
            out = (ctypes.c_uint8 * size.value)()
            check(library().mtp_depth_get_state(self.handle, out, size.value))
            state.extend(out)

        self._alone(get)
        return bytes(state)

    def set_state(self, state: bytes) -> None:
        """Go on as the chooser of `state`; ModelRefusedError if it is not one.

        Costs that were measured here are kept.
        """
        self._call(library().mtp_depth_set_state, state, len(state))


def plan_batch(choosers: Sequence[DepthChooser], rooms: Sequence[int]) -> list[int]:
    """Return how many tokens to draft for each of the sequences that share a graph and a batch."""
    n = len(choosers)
    out = (ctypes.c_int32 * n)()
    limits = (ctypes.c_int32 * n)(*rooms)
    _call_together(choosers, library().mtp_depth_plan_batch, limits, n, out)
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
    _call_together(choosers, library().mtp_depth_keep_batch, pointers, drafted, n, others, out)
    return list(out)


def _call_together(
    choosers: Sequence[DepthChooser], function: Callable[..., int], *arguments: Any
) -> None:
    """Call a C function with choosers of one runtime, which share a lock."""
    handles = (ctypes.c_void_p * len(choosers))(*(chooser.handle for chooser in choosers))

    def call() -> None:
        check(function(handles, *arguments))

    if choosers:
        choosers[0]._alone(call)
    else:
        call()  # raises an error
