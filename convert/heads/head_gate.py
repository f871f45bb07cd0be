"""Compare the acceptance rate of a head with that of its source, before the head is used."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.gguf_tools.hub.remote import is_remote
from mtp_gguf.gguf_tools.machine.text import printable
from mtp_gguf.gguf_tools.model import Model
from mtp_gguf.gguf_tools.progress import Progress

from .acceptance import checked_memory

WARN, FAIL = 0.05, 0.25  # of acceptance that may be lost before a warning, and before an error
UNQUANTIZED = "F16"
_LEAST_BITS = 8.0  # types from here on were never found to lose acceptance
_LADDER = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
_MOST_DRAFTS = 256
_SECONDS = 60.0


@dataclass(frozen=True)
class HeadGate:
    """Acceptance of first drafts on a built-in text.

    head_type: of the head, None if it is copied as it is. share: its acceptance, source_share: that
    of the source's head. better: the smallest type that loses at most 5 points, None if there is
    none or it was not looked for.
    """

    head_type: str | None
    share: float
    source_share: float
    better: str | None = None

    @property
    def lost(self) -> float:
        """How much lower the acceptance is than the source's, 0 to 1."""
        return self.source_share - self.share

    @property
    def failed(self) -> bool:
        """Whether so much is lost that the head should not be used."""
        return self.lost > FAIL

    def fields(self) -> dict[str, Any]:
        """Return the fields for --json."""
        return {**asdict(self), "lost": self.lost, "failed": self.failed}

    def text(self) -> str:
        """Return one sentence that says what is lost, and what to do."""
        points = f"{100 * self.lost:.0f} points"
        if self.head_type is None:
            return (
                f"this head accepts {self.share:.0%} of first drafts with this trunk, {points} "
                f"fewer than in its own model ({self.source_share:.0%}): take the head of exactly "
                "this model"
            )
        text = (
            f"the head in {self.head_type} accepts {self.share:.0%} of first drafts, {points} "
            f"fewer than the source's head ({self.source_share:.0%})"
        )
        return f"{text}; use --mtp-type {self.better}" if self.better else text

    def warnings(self) -> list[str]:
        """Return the warning if more than 5 points are lost."""
        return [self.text()] if self.lost > WARN else []


def is_small(head_type: str) -> bool:
    """Whether a type of the head's matrices has so few bits that it may lose acceptance."""
    found = BY_NAME.get(head_type.upper())
    return bool(found and found.is_quantized and _bits(head_type) < _LEAST_BITS)


def _bits(name: str) -> float:
    kind = BY_NAME[name.upper()]
    return 8 * kind.block_bytes / kind.block_length


def measurable(model: Model) -> bool:
    """Whether a whole local model, or its trunk, can be run with drafts here."""
    local = not is_remote(str(model.path))
    return local and not model.head.is_alone and model.head.is_known and model.head.kind.ours


def gate_type(
    trunk: Path,
    head: Path | None,
    head_type: str,
    convert: Callable[[str], AbstractContextManager[Model]],
    progress: Progress,
) -> HeadGate | None:
    """Compare a head in a small type with the source's; None, with a note, if not measured.

    trunk: the model's file. head: a separate file with the head; None for the trunk's own. convert:
    makes a temporary file with the source's head in a type.
    """

    def measure() -> HeadGate:
        checked_memory(trunk)
        with convert(UNQUANTIZED) as source:
            reference = _share(trunk, Path(source.path))
        found = HeadGate(head_type.upper(), _share(trunk, head), reference)
        if found.lost <= WARN:
            return found
        return replace(found, better=_better(trunk, head_type, reference, convert))

    return _measured(measure, progress)


def gate_donor(trunk: Path, donor: Path, progress: Progress) -> HeadGate | None:
    """Compare a head that is copied with itself in its own model; None if not measured."""

    def measure() -> HeadGate:
        checked_memory(trunk)
        reference = _share(donor, None)
        return HeadGate(None, _share(trunk, donor), reference)

    return _measured(measure, progress)


def refuse(gate: HeadGate | None, *, force: bool, written: Path | None = None) -> None:
    """RequestError if too much acceptance is lost and the user does not insist.

    written: the file that has the head already; None if nothing was written yet.
    """
    if gate is not None and gate.failed and not force:
        where = f"{written}: written, but " if written else ""
        raise RequestError(f"{where}{gate.text()}; --force accepts it all the same")


def _better(
    trunk: Path,
    head_type: str,
    reference: float,
    convert: Callable[[str], AbstractContextManager[Model]],
) -> str:
    """The smallest larger type that loses at most 5 points."""
    for name in _LADDER:
        if _bits(name) > _bits(head_type):
            with convert(name) as head:
                if reference - _share(trunk, Path(head.path)) <= WARN:
                    return name
    return UNQUANTIZED


def _share(trunk: Path, head: Path | None) -> float:
    """Acceptance over the whole vocabulary on a built-in text."""
    from mtp_gguf.native.checks.acceptance import measure_in_subprocess  # noqa: PLC0415

    text = resources.files("mtp_gguf.bench") / "calibration" / "text.txt"
    with resources.as_file(text) as path:
        return measure_in_subprocess(
            trunk,
            seconds=_SECONDS,
            whole_vocabulary=True,
            head=head,
            text=path,
            drafts=_MOST_DRAFTS,
        ).share


def _measured(measure: Callable[[], HeadGate], progress: Progress) -> HeadGate | None:
    """Return what is measured; None, with a note of the reason, if it is not."""
    try:
        return measure()
    except (MtpGgufError, ImportError, OSError) as error:
        reason = str(error).partition("\n")[0]
    except KeyboardInterrupt:
        reason = "interrupted"
    progress.say(f"note: not compared with the source's head: {printable(reason)}")
    return None
