"""Choose the type of a head's matrices in memory: by what drafts cost here, and how many it loses.

The file stays as it is. Candidates are compared on the same places of the acceptance corpus, in one
loaded trunk, alternating passage by passage. What was measured is kept in the user's cache for each
model, machine and setting.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mtp_gguf.gguf_tools.depth_file import cached_file
from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError
from mtp_gguf.gguf_tools.machine.system import this_machine

from .acceptance import accepted_drafts, places_of
from .subprocesses import run_module

if TYPE_CHECKING:
    from .llama import MTPLlama
    from .session import Session

AUTO = "auto"
STORED = "as stored"
TYPES = ("Q8_0", "Q6_K", "Q4_K")  # candidates
DEPTH = 4  # of the chains that are measured

_LEAST_GAIN = 1.02  # how much faster than the stored type another one has to be
_MOST_LOSS = 0.02  # share of the accepted drafts that 140 chains cannot tell from none
_CHAINS = 10  # of each passage
_SECONDS = 60.0
_LIMIT = 900.0  # seconds, with loading, after which the stored type is kept
_REFUSED = 3  # exit code of the subprocess if it has printed an error message


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
        least = stored.accepted * (1 - _MOST_LOSS)
        allowed = [m for m in self.measured if m.accepted >= least]
        best = max(allowed, key=lambda m: m.speed(verify))
        return best if best.speed(verify) >= _LEAST_GAIN * stored.speed(verify) else stored


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
            return TypeChoice(tuple(MeasuredType(**m) for m in json.loads(known.read_bytes())))
        except (OSError, ValueError, TypeError):
            pass  # not there, or not ours
    words = (
        str(model.absolute()),
        json.dumps({"mtp_head": head and str(head.absolute()), **options}),
    )
    try:
        child = run_module("mtp_gguf.native.head_types", *words, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return TypeChoice((), f"that took longer than {_LIMIT:.0f} s")
    except OSError as error:
        return TypeChoice((), f"cannot start {sys.executable}: {error.strerror}")
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"the process ended with {child.returncode}"]
        return TypeChoice((), lines[0] if child.returncode == _REFUSED else lines[-1])
    found = child.stdout.splitlines()[-1]
    if known is not None:
        try:
            known.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(found)
        except OSError:
            pass  # measured again next time
    return TypeChoice(tuple(MeasuredType(**m) for m in json.loads(found)))


def measure_types(
    llm: "MTPLlama", types: Sequence[str] = TYPES, seconds: float = _SECONDS
) -> tuple[MeasuredType, ...]:
    """Measure the head of a model as it is stored, and in each type.

    llm: drafts `DEPTH` tokens without drafts from the text; it cannot be used afterwards.
    """
    if llm.head is None:
        raise RequestError("drafting is switched off by MTP_GGUF_DISABLE")
    names: tuple[str, ...] = (STORED, *types)
    heads = [llm._open_head(None if name == STORED else name) for name in names]
    depth = min(DEPTH, llm.head.max_depth)
    counts = [[0, 0] for _ in names]  # chains, and accepted drafts
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in names]
    llm.session.close()
    began = perf_counter()
    try:
        for number, (prompt, places) in enumerate(places_of(llm)):
            if number and perf_counter() - began > seconds:
                break
            for place in range(len(names)):
                at = (place + number) % len(names)
                with llm._open_session(heads[at], depth) as session:
                    session.set_sampling(1.0, seed=number)
                    session.decode(prompt)
                    for chain, token in enumerate(places[:_CHAINS]):
                        counts[at][0] += 1
                        counts[at][1] += _timed(session, token, depth, chain % 2 == 1, times[at])
                    session.remove(0)  # the context is that of all sessions
    finally:
        for head in heads:
            head.close()
    return tuple(
        MeasuredType(name, chains, accepted, _quartile(draft), _quartile(verify))
        for name, (chains, accepted), (draft, verify) in zip(names, counts, times, strict=True)
    )


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _timed(
    session: "Session",
    token: int,
    depth: int,
    sampled: bool,
    times: tuple[list[float], list[float]],
) -> int:
    """Append a token; note the times of drafting and verifying, and return the accepted drafts."""
    before = session.stats()
    accepted = accepted_drafts(session, token, depth, sampled=sampled)
    after = session.stats()
    times[0].append(after.draft_ms - before.draft_ms)
    times[1].append(after.verify_ms - before.verify_ms)
    return accepted


def _main() -> int:
    """Run in the subprocess: print a JSON list, or an error message and exit with _REFUSED."""
    from .llama import MTPLlama  # noqa: PLC0415  (loads llama.cpp)

    warnings.simplefilter("ignore")  # the sentence must be the first line
    try:
        options = json.loads(sys.argv[2])
        with MTPLlama(
            sys.argv[1], depth=DEPTH, lookup=False, profile=False, n_ctx=512, **options
        ) as llm:
            found = measure_types(llm)
    except (MtpGgufError, ImportError, OSError, RuntimeError) as error:
        # llama_cpp raises the last three if its libraries cannot be loaded.
        sys.stderr.write(f"{error}\n")
        return _REFUSED
    sys.stdout.write(json.dumps([asdict(one) for one in found]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
