"""A trunk and a head decoding together: prefill, draft, verify, undo."""

import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_double
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np

from ._bindings import DEPTH_AUTO, MAX_DEPTH, Sampling, SessionParams, SessionStats, check, library
from ._owner import Owner
from .checkpoint import Checkpoint, CheckpointKind
from .errors import NativeError
from .head import Head

# Tokens to draft: a number, "auto" for what pays at the moment, None for the session's max_depth.
Depth = int | Literal["auto"] | None


class Rollback(IntEnum):
    """How rejected drafts leave the trunk's recurrent state; docs/native.md compares them."""

    SNAPSHOT = 0
    CHECKPOINT = 1
    TWO_PHASE = 2
    HOST = 3

    @staticmethod
    def parse(name: str) -> "Rollback":
        """The mode of a name: snapshot, checkpoint, two-phase or host."""
        modes = {mode.name.lower().replace("_", "-"): mode for mode in Rollback}
        if name not in modes:
            raise NativeError(f"rollback: expected one of {', '.join(modes)}, found {name!r}")
        return modes[name]


@dataclass(frozen=True)
class MtpStats:
    """What the cycles of a session did. Times are milliseconds, summed.

    tokens: given by cycles; each cycle gives its accepted drafts and one token more. drafted and
    accepted: by position in the draft, of the head's drafts. text_*: cycles whose drafts came from
    the text, and their drafts. sample_ms counts only what the native library sampled.
    """

    cycles: int
    tokens: int
    rollbacks: int
    prefilled: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    prefill_ms: float
    prefill_head_ms: float
    draft_ms: float
    verify_ms: float
    sample_ms: float
    rollback_ms: float
    text_cycles: int = 0
    text_drafted: int = 0
    text_accepted: int = 0

    @property
    def tokens_per_cycle(self) -> float:
        """1 without drafting, at most depth + 1; 0 before the first cycle."""
        return self.tokens / self.cycles if self.cycles else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of the drafts accepted, by position."""
        return tuple(a / d for a, d in zip(self.accepted, self.drafted, strict=True))


NO_STATS = MtpStats(0, 0, 0, 0, (), (), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Session(Owner):
    """Decodes with a llama.cpp context and a head. Close it, or use `with`.

    context: a llama_context pointer that stays the caller's, as must the head; both must live
    longer. head None or max_depth 0: a session that never drafts. max_rows: most tokens verified in
    one batch, the others once those are accepted; 0: all at once. min_rows 2: a token that would be
    alone in its batch gets a companion, taken back at once; the context must have an n_rs_seq of 1
    or more, and loses its last position. max_lookup: most tokens drafted from the text itself in a
    cycle, where that promises more than the head; 0: none. One thread at a time: a call from
    another one while a call runs raises NativeError.
    """

    _what = "session"

    def __init__(
        self,
        context: Any,
        head: Head | None,
        *,
        max_depth: int = 3,
        rollback: Rollback = Rollback.SNAPSHOT,
        max_rows: int = 0,
        min_rows: int = 1,
        max_lookup: int = 0,
    ) -> None:
        lib = library()
        self.max_depth = max_depth
        self.head = head  # kept alive
        self._lock = threading.Lock()
        self._probabilities = (ctypes.c_float * MAX_DEPTH)()
        params = SessionParams(rollback, max_depth, max_rows, min_rows, max_lookup)
        head_handle = None if head is None else head.handle
        pointer = ctypes.cast(context, ctypes.c_void_p)
        handle = self._own(lib.mtp_session_free)
        check(lib.mtp_session_new(pointer, head_handle, ctypes.byref(params), ctypes.byref(handle)))

    def _call(self, function: Any, *arguments: Any) -> None:
        """Call a C function with this session.

        `with` on a lock cannot be torn by Ctrl-C, unlike acquire() and try.
        """
        self._refuse_others()
        with self._lock:
            handle = self.handle
            if self.head is not None:
                _ = self.head.handle  # a closed one says so, where its memory would be gone
            check(function(handle, *arguments))

    def _number(self, function: Any, *arguments: Any) -> int:
        """What a C function with an int32_t at its end gives."""
        out = ctypes.c_int32()
        self._call(function, *arguments, ctypes.byref(out))
        return out.value

    def _refuse_others(self) -> None:
        if self._lock.locked():
            raise NativeError("the session is in use by another thread")

    def close(self) -> None:
        """Free it; a second call does nothing. NativeError while another thread uses it."""
        self._refuse_others()
        with self._lock:
            super().close()

    def length(self, seq: int = 0) -> int:
        """Number of tokens of a sequence, rejected drafts not counted."""
        return self._number(library().mtp_session_length, seq)

    def decode(self, tokens: Sequence[int], seq: int = 0, *, all_logits: bool = False) -> None:
        """Append tokens; ContextFullError and nothing done when they do not fit."""
        ids = np.ascontiguousarray(tokens, np.int32)
        pointer = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self._call(library().mtp_session_decode, seq, pointer, len(ids), all_logits)

    def step(
        self, token: int, depth: Depth = None, seq: int = 0, *, sampler: Any = None
    ) -> list[int]:
        """One cycle after `token`; the tokens that follow it, the last not yet decoded.

        sampler: a llama_sampler pointer; None takes the most likely tokens.
        """
        out = (ctypes.c_int32 * (MAX_DEPTH + 1))()
        wanted = self._wanted(depth)
        n = self._number(library().mtp_session_step, seq, token, wanted, sampler, out)
        return out[:n]

    def set_sampling(
        self,
        temperature: float,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Set the chain of `sample` and `step_sampled` and start its random numbers anew."""
        params = Sampling(temperature, top_k, top_p, min_p, seed % 2**64)
        self._call(library().mtp_session_set_sampling, ctypes.byref(params))

    def sample(self, row: int = -1) -> int:
        """Draw a token from a row as `row` gives it; -1: the last."""
        return self._number(library().mtp_session_sample, row)

    def step_sampled(self, token: int, depth: Depth = None, seq: int = 0) -> list[int]:
        """As `step`, by rejection sampling with the chain that is set."""
        out = (ctypes.c_int32 * (MAX_DEPTH + 1))()
        wanted = self._wanted(depth)
        n = self._number(library().mtp_session_step_sampled, seq, token, wanted, out)
        return out[:n]

    def begin(self, token: int, depth: Depth = None, seq: int = 0) -> list[int]:
        """Draft after `token` and decode; the drafts. Then `row` and `end`."""
        out = (ctypes.c_int32 * MAX_DEPTH)()
        wanted, chances = self._wanted(depth), self._probabilities
        n = self._number(library().mtp_cycle_begin, seq, token, wanted, out, chances)
        return out[:n]

    def set_costs(self, verify_ms: Sequence[float], draft_ms: Sequence[float]) -> None:
        """Tell the depth "auto" what is known of costs before it has measured any.

        verify_ms[i]: of a trunk batch of i + 1 tokens; draft_ms[i]: of i + 1 drafts.
        """
        verify, draft = (
            (c_double * len(verify_ms))(*verify_ms),
            (c_double * len(draft_ms))(*draft_ms),
        )
        self._call(library().mtp_session_set_costs, verify, len(verify), draft, len(draft))

    def _wanted(self, depth: Depth) -> int:
        if depth == "auto":
            return DEPTH_AUTO
        return self.max_depth if depth is None else depth

    def row(self, row: int) -> int:
        """The llama.cpp index of a row's logits; row i once draft i - 1 is accepted."""
        return self._number(library().mtp_cycle_row, row)

    def end(self, accepted: int) -> None:
        """Say how many drafts of this cycle were accepted."""
        self._call(library().mtp_cycle_end, accepted)

    def argmax(self, row: int = -1) -> int:
        """The most likely token of a row as `row` gives it; -1: the last."""
        return self._number(library().mtp_session_argmax, row)

    def remove(self, first: int, seq: int = 0) -> None:
        """Remove tokens from position `first` on; NativeError, and none go, if that cannot be."""
        self._call(library().mtp_seq_rm, seq, first, -1)

    def sync(self, seq: int = 0) -> None:
        """Take the trunk's memory as it is after others changed it."""
        self._call(library().mtp_session_sync, seq)

    def save(self, kind: CheckpointKind = CheckpointKind.WHOLE, seq: int = 0) -> Checkpoint:
        """The state of a sequence that is not empty, to come back to."""
        return Checkpoint(lambda out: self._call(library().mtp_checkpoint_save, seq, kind, out))

    def restore(self, checkpoint: Checkpoint, seq: int = 0) -> None:
        """Bring a checkpoint back; NativeError, and nothing is changed, if it does not fit.

        There are no logits of it: decode a token next.
        """
        self._call(library().mtp_checkpoint_restore, seq, checkpoint.handle)

    def copy(self, source: int, target: int) -> None:
        """Make sequence `target` hold what `source` holds, in the place of what it held."""
        self._call(library().mtp_seq_cp, source, target)

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._call(library().mtp_session_reset_stats)

    def stats(self) -> MtpStats:
        """What the cycles did so far."""
        raw = SessionStats()
        self._call(library().mtp_session_get_stats, ctypes.byref(raw))
        used = sum(1 for n in raw.drafted if n)
        return MtpStats(
            raw.cycles,
            raw.tokens,
            raw.rollbacks,
            raw.prefilled,
            tuple(raw.drafted[:used]),
            tuple(raw.accepted[:used]),
            raw.prefill_ms,
            raw.prefill_head_ms,
            raw.draft_ms,
            raw.verify_ms,
            raw.sample_ms,
            raw.rollback_ms,
            raw.text_cycles,
            raw.text_drafted,
            raw.text_accepted,
        )
