"""The end of a graft: how often the head guesses what the trunk says."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mtp_gguf.gguf_tools import system
from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError

from .progress import human_bytes, printable

if TYPE_CHECKING:
    from mtp_gguf.native.acceptance import Acceptance

# A head of the trunk's own training guesses 60 to 95 % of the next tokens, one of another
# fine-tune was seen at 11 to 12 %.
_POOR = 0.4
_LARGE = 1 << 30  # bytes from which the cost is named before it is paid
_SECONDS = 60.0


@dataclass(frozen=True)
class AcceptanceCheck:
    """What was measured, or why nothing was.

    whole: measured without the file's draft vocabulary, where the first measurement was poor.
    skipped: the reason, "" where something was measured.
    """

    measured: "Acceptance | None" = None
    whole: "Acceptance | None" = None
    skipped: str = ""

    @property
    def poor(self) -> bool:
        """Whether drafts of this head would mostly be thrown away."""
        return self.measured is not None and self.measured.share < _POOR

    def fields(self) -> dict[str, Any]:
        """For --json."""
        held = self.measured
        return {
            "share": held.share if held else None,
            "drafted": held.drafted if held else 0,
            "accepted": held.accepted if held else 0,
            "seconds": held.seconds if held else None,
            "share_without_list": self.whole.share if self.whole else None,
            "poor": self.poor if held else None,
            "skipped": self.skipped or None,
        }


def check_acceptance(path: Path, *, has_list: bool) -> AcceptanceCheck:
    """Measure the finished file; what keeps from measuring becomes the answer.

    has_list: whether it has a draft vocabulary that can be left out, to tell whose fault it is.
    """
    try:
        from mtp_gguf.native.acceptance import measure_in_subprocess, memory_needed  # noqa: PLC0415

        needed, free = memory_needed(path), system.free_memory()
        if free is not None and free < needed:
            raise RequestError(
                f"the model takes {human_bytes(needed)} of memory, and {human_bytes(free)} are free"
            )
        if needed >= _LARGE:
            typer.echo(
                f"measuring the acceptance: takes {human_bytes(needed)} of memory, and "
                f"{_SECONDS:.0f} s at most after loading; Ctrl-C or --no-check skips it",
                err=True,
            )
        check = AcceptanceCheck(measure_in_subprocess(path, seconds=_SECONDS))
        if check.poor and has_list:
            whole = measure_in_subprocess(path, seconds=_SECONDS, whole_vocabulary=True)
            check = AcceptanceCheck(check.measured, whole)
    except (MtpGgufError, ImportError) as error:
        return AcceptanceCheck(skipped=printable(str(error).partition("\n")[0]))
    except KeyboardInterrupt:
        return AcceptanceCheck(skipped="interrupted")
    return check


def acceptance_lines(
    check: AcceptanceCheck, output: str, base: str, original: str
) -> Iterator[str]:
    """The report: one line, and for a poor head why and what fixes it.

    output, base: the files as a shell takes them. original: the model that the base was made of.
    """
    held = check.measured
    if held is None:
        yield f"acceptance not measured: {check.skipped}"
        return
    yield f"accepts {held.share:.0%} of first drafts ({held.accepted} of {held.drafted}, greedy)"
    if not check.poor:
        return
    if check.whole and check.whole.share >= _POOR:
        yield (
            f"warning: without the draft vocabulary it would be {check.whole.share:.0%}: the list "
            "lacks the words of the text that was measured (English and Python)"
        )
        yield f"  fix: mtp-gguf fastmtp add {output} --corpus FILES --in-place"
        return
    yield (
        "warning: that is poor, drafting will cost more than it gives; a head of another "
        "fine-tune drafts so: take the one of the very model that was quantized"
    )
    yield f"  fix: mtp-gguf graft {base} --from {original} -o {output} --overwrite"
