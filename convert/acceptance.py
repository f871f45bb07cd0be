"""The last step of a graft: measure the acceptance rate of the head."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_gguf.gguf_tools import process_memory
from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError
from mtp_gguf.gguf_tools.progress import Progress
from mtp_gguf.gguf_tools.text import human_bytes, printable

if TYPE_CHECKING:
    from mtp_gguf.native.acceptance import Acceptance

# A head that was trained with the trunk has an acceptance rate of 60 to 95 %; 11 to 12 % was
# measured for one of another fine-tune.
POOR = 0.4
_LARGE = 1 << 30  # bytes of memory from which the user is told before measuring
_SECONDS = 60.0


@dataclass(frozen=True)
class AcceptanceCheck:
    """The measured acceptance, or the reason why it was not measured.

    whole: acceptance without the file's draft vocabulary, measured if the first result was poor.
    skipped: the reason; "" if acceptance was measured.
    """

    measured: "Acceptance | None" = None
    whole: "Acceptance | None" = None
    skipped: str = ""

    @property
    def poor(self) -> bool:
        """Whether most drafts of this head would be rejected."""
        return self.measured is not None and self.measured.share < POOR

    @property
    def warning(self) -> str | None:
        """What is wrong with a poor head; None for any other."""
        if not self.poor:
            return None
        if self.list_is_poor and self.whole:
            return (
                f"without the draft vocabulary it would be {self.whole.share:.0%}: the list "
                "lacks words of the text that was measured (English and Python)"
            )
        return (
            "that is poor, drafting will cost more than it gains; heads of another fine-tune "
            "have such rates: take the head of exactly the model that was quantized"
        )

    @property
    def list_is_poor(self) -> bool:
        """Whether a poor result comes from the draft vocabulary, and not from the head."""
        return self.poor and self.whole is not None and self.whole.share >= POOR

    def fields(self) -> dict[str, Any]:
        """Return the fields for --json."""
        measured = self.measured
        return {
            "share": measured.share if measured else None,
            "drafted": measured.drafted if measured else 0,
            "accepted": measured.accepted if measured else 0,
            "seconds": measured.seconds if measured else None,
            "share_without_list": self.whole.share if self.whole else None,
            "poor": self.poor if measured else None,
            "skipped": self.skipped or None,
        }


def check_acceptance(path: Path, progress: Progress, *, has_list: bool) -> AcceptanceCheck:
    """Measure the finished file; if that fails, the result contains the reason.

    has_list: whether the file has a draft vocabulary that can be left out, to find out whether
    the vocabulary or the head causes a poor result. Without one, all tokens can be drafted.
    """
    try:
        from mtp_gguf.native.acceptance import measure_in_subprocess, memory_needed  # noqa: PLC0415

        needed, free = memory_needed(path), process_memory.free_memory()
        if free < needed:
            raise RequestError(
                f"the model takes {human_bytes(needed)} of memory, and {human_bytes(free)} are free"
            )
        if needed >= _LARGE:
            progress.say(
                f"measuring acceptance: takes {human_bytes(needed)} of memory, and at most "
                f"{_SECONDS:.0f} s after loading; Ctrl-C or --no-check skips it"
            )
        check = AcceptanceCheck(
            measure_in_subprocess(path, seconds=_SECONDS, whole_vocabulary=not has_list)
        )
        if check.poor and has_list:
            whole = measure_in_subprocess(path, seconds=_SECONDS, whole_vocabulary=True)
            check = AcceptanceCheck(check.measured, whole)
    except (MtpGgufError, ImportError) as error:
        return AcceptanceCheck(skipped=printable(str(error).partition("\n")[0]))
    except KeyboardInterrupt:
        return AcceptanceCheck(skipped="interrupted")
    return check
