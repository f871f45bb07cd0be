"""Cycles of greedy decoding or rejection sampling, for the counts of a preloaded device_calls.c."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from . import device_calls, places
from .commands import run_python
from .native_trunk import opened_session
from .slots import opened_slots

DEPTH = 3
CYCLES = 24
FIRST = 8  # cycles of each sequence before these, which build the graphs
STATS = ("cycles", "decodes", "draft_graphs", "draft_syncs", "draft_bytes_up")

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = "import sys; from support.counted_cycles import main; main(*sys.argv[1:])"

Counter = Callable[[], ctypes.Structure]


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in device_calls.NAMES]


def _session(
    path: Path, kind: str, n: int, counter: Counter
) -> tuple[ctypes.Structure, dict[str, int]]:
    """Cycles of a session's sequences, one after another."""
    with opened_session(path, "snapshot", DEPTH, n_seq_max=n) as (session, _):
        for seq in range(n):
            session.decode([5 + seq, 6, 7, 8], seq=seq)
        session.set_sampling(temperature=0.7, top_k=40, top_p=0.9, seed=1)
        step = session.step if kind == "greedy" else session.step_sampled
        tokens = [9] * n
        for cycle in range(FIRST * n + CYCLES):
            if cycle == FIRST * n:
                session.reset_stats()
                counter()
                began = time.perf_counter_ns()
            seq = cycle % n
            tokens[seq] = step(tokens[seq], DEPTH, seq)[-1]
        ns, found = time.perf_counter_ns() - began, counter()
        stats = session.stats()
    return found, {"ns": ns, **{name: getattr(stats, name) for name in STATS}}


def _slots(path: Path, n: int, counter: Counter) -> tuple[ctypes.Structure, dict[str, int]]:
    """Cycles of all sequences at once."""
    with opened_slots(path, DEPTH, [[5 + seq, 6, 7, 8] for seq in range(n)]) as slots:
        for cycle in range(FIRST + CYCLES):
            if cycle == FIRST:
                slots.kept = slots.cycles = 0
                counter()
                began = time.perf_counter_ns()
            slots.step()
        ns, found = time.perf_counter_ns() - began, counter()
    return found, {"ns": ns, "cycles": slots.cycles, "kept": slots.kept}


def main(library: str, path: str, place: str, kind: str, sequences: str) -> None:
    """Print the totals of CYCLES cycles in JSON, after some that build the graphs.

    library: device_calls, preloaded. kind: greedy, rejection or slots. ns: the time they took.
    """
    counter = ctypes.CDLL(library).device_calls
    counter.restype = _Counts
    file, n = Path(path), int(sequences)
    with places.use(places.place(place)):
        is_slots = kind == "slots"
        found, said = _slots(file, n, counter) if is_slots else _session(file, kind, n, counter)
    print(json.dumps({**{name: getattr(found, name) for name in device_calls.NAMES}, **said}))


def count(library: Path, path: Path, place: str, kind: str, sequences: int) -> dict[str, int]:
    """What `main` prints in a process of its own."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(paths)}
    words = (library, path, place, kind, sequences)
    printed = run_python(PROGRAM, *words, env={**os.environ, **environment})
    found: dict[str, int] = json.loads(printed)
    return found
