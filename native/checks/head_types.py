"""Choose the type of a head's matrices in memory: by what drafts cost here, and how many it loses.

The file stays as it is. Candidates are compared on the same places of the acceptance corpus, in one
loaded trunk, alternating passage by passage. What was measured is kept in the user's cache for each
model, machine and setting.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.depth_file import cached_file
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.machine.system import this_machine

from .subprocesses import REFUSED, run_module

AUTO = "auto"
STORED = "as stored"
TYPES = ("Q8_0", "Q6_K", "Q4_K")  # candidates
DEPTH = 4  # of the chains that are measured

_LEAST_GAIN = 1.02  # how much faster than the stored type another one has to be
MOST_LOSS = 0.02  # share of the accepted drafts that 140 chains cannot tell from none
_LIMIT = 900.0  # seconds, with loading, after which the stored type is kept


@dataclass(frozen=True)
class MeasuredType:
    """A type on this machine. chains: of `DEPTH` drafts.

    The times are of a chain: the lower quartile, because other programs only add to them.
    """

    name: str
    chains: int
    accepted: int
    draft_ms: float
    verify_ms: float

    def speed(self, verify_ms: float) -> float:
        """Tokens per second with a trunk that verifies a chain in so many milliseconds."""
        return 1000 * (1 + self.accepted / self.chains) / (verify_ms + self.draft_ms)


@dataclass(frozen=True)
class TypeChoice:
    """The types that were measured, the stored one first; why not, if they could not be."""

    measured: tuple[MeasuredType, ...]
    fault: str = ""

    @property
    def name(self) -> str | None:
        """The chosen type; None for as stored."""
        if not self.measured:
            return None
        best = self._best()
        return None if best is self.measured[0] else best.name

    @property
    def text(self) -> str:
        """One line: what was chosen, and the figures."""
        if not self.measured:
            return f"head as stored: its types were not compared: {self.fault}"
        verify, best, stored = self._verify_ms, self._best(), self.measured[0]
        figures = ", ".join(
            f"{m.name} {m.draft_ms:.1f} ms, {m.accepted} accepted" for m in self.measured
        )
        gain = best.speed(verify) / stored.speed(verify)
        return (
            f"head {best.name}: {gain:.2f} times as many tokens per second as stored "
            f"({stored.chains} chains of drafts: {figures})"
        )

    @property
    def _verify_ms(self) -> float:
        return min(m.verify_ms for m in self.measured)

    def _best(self) -> MeasuredType:
        """The fastest type that loses no drafts; the stored one, unless that gains enough."""
        stored, verify = self.measured[0], self._verify_ms
        least = stored.accepted * (1 - MOST_LOSS)
        allowed = [m for m in self.measured if m.accepted >= least]
        best = max(allowed, key=lambda m: m.speed(verify))
        return best if best.speed(verify) >= _LEAST_GAIN * stored.speed(verify) else stored


def type_without_drafts(option: str, name: str) -> str:
    """Say that the type of a head has no effect. option: what the user gave it as."""
    return f"{option}: {name} has no effect, because nothing is drafted with a head"


def choose_type(
    model: Path, head: Path | None, kernels: str, options: Mapping[str, Any]
) -> TypeChoice:
    """Return the choice for a model, measured in a subprocess unless that is in the cache.

    head: the file of the head, if it is another one. kernels: named as in Machine. options: other
    arguments of MTPLlama that change what drafts cost, as JSON can hold them.
    """
    files = [model, head] if head else [model]
    known = cached_file("head-types", ".json", files, this_machine(kernels), TYPES, dict(options))
    if known is not None:
        try:
            return TypeChoice(tuple(MeasuredType(**m) for m in parse_json(known.read_bytes())))
        except (OSError, ValueError, TypeError):
            pass  # not there, or not ours
    words = (
        str(model.absolute()),
        json.dumps({"mtp_head": head and str(head.absolute()), **options}),
    )
    try:
        child = run_module("mtp_gguf.native.checks.head_trial", *words, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return TypeChoice((), f"that took longer than {_LIMIT:.0f} s")
    except OSError as error:
        return TypeChoice((), f"cannot start {sys.executable}: {error.strerror}")
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"the process ended with {child.returncode}"]
        return TypeChoice((), lines[0] if child.returncode == REFUSED else lines[-1])
    found = child.stdout.splitlines()[-1]
    if known is not None:
        try:
            known.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(found)
        except OSError:
            pass  # measured again next time
    return TypeChoice(tuple(MeasuredType(**m) for m in parse_json(found)))
