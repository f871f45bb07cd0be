"""The last step of a conversion, a graft or a training: measure the acceptance rate of the head."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_gguf.gguf_tools.doctor import diagnose
from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError
from mtp_gguf.gguf_tools.heads.acceptance import LEAST, Acceptance, store
from mtp_gguf.gguf_tools.heads.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.machine import process_memory
from mtp_gguf.gguf_tools.machine.shell import quoted
from mtp_gguf.gguf_tools.machine.text import human_bytes, printable
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.progress import Progress

if TYPE_CHECKING:
    from mtp_gguf.native.checks.acceptance import Measured

VARIABLE = "MTP_GGUF_ACCEPTANCE"  # 0: no acceptance is measured unless a command asks for it

_LARGE = 1 << 30  # bytes of memory from which the user is told before measuring
_SECONDS = 60.0
# What the file itself shows about a head that is bad (codes of doctor's findings).
_SHOWN_CAUSES = ("norm-not-raised", "norm-raised-twice", "zero-head", "head-precision")


@dataclass(frozen=True)
class AcceptanceCheck:
    """The measured acceptance, or the reason why it was not measured.

    whole: acceptance without the file's draft vocabulary, measured if the first result was poor.
    skipped: the reason; "" if acceptance was measured. least: the acceptance of first drafts that
    was asked for. warning: what is wrong with a poor head, one sentence; None for any other.
    """

    measured: "Measured | None" = None
    whole: "Measured | None" = None
    skipped: str = ""
    least: float = LEAST
    warning: str | None = None

    @property
    def poor(self) -> bool:
        """Whether fewer first drafts were accepted than asked for."""
        return self.measured is not None and self.measured.share < self.least

    @property
    def text(self) -> str:
        """One line: the figures, or why there are none."""
        if self.measured is None:
            return f"acceptance not measured: {self.skipped}"
        return f"acceptance: {self.measured.text}"

    @property
    def list_is_poor(self) -> bool:
        """Whether a poor result comes from the draft vocabulary, and not from the head."""
        return self.poor and self.whole is not None and self.whole.share >= self.least

    def fields(self) -> dict[str, Any]:
        """Return the fields for --json."""
        measured = self.measured
        return {
            "share": measured.share if measured else None,
            "drafted": measured.greedy.drafted[0] if measured else 0,
            "accepted": measured.greedy.accepted[0] if measured else 0,
            "seconds": measured.seconds if measured else None,
            "share_without_list": self.whole.share if self.whole else None,
            "poor": self.poor if measured else None,
            "skipped": self.skipped or None,
            **({} if measured is None else measured.fields()),
        }


def checked_memory(model: Path) -> int:
    """The bytes of memory that running a model takes; RequestError if they are not free."""
    from mtp_gguf.native.checks.acceptance import memory_needed  # noqa: PLC0415

    needed, free = memory_needed(model), process_memory.free_memory()
    if free < needed:
        raise RequestError(
            f"the model takes {human_bytes(needed)} of memory, and {human_bytes(free)} are free"
        )
    return needed


def is_measured(*, no_check: bool) -> bool:
    """Whether finished files are measured: not with --no-check, nor if the environment says so."""
    return not no_check and os.environ.get(VARIABLE) != "0"


def record_acceptance(
    path: Path,
    progress: Progress,
    least: float = LEAST,
    trunk: Path | None = None,
    elsewhere: float | None = None,
) -> AcceptanceCheck:
    """Measure a finished file and store the counts in its reserved keys.

    path: any shard. least: the acceptance of first drafts below which the head is reported as bad.
    trunk: that of a head alone. elsewhere: the share of first drafts accepted on texts that the
    head was just trained for.
    """
    check = check_acceptance(path, progress, least, trunk, elsewhere)
    if check.measured is not None:
        store(path, check.measured, trunk)
    return check


def check_acceptance(
    path: Path,
    progress: Progress,
    least: float = LEAST,
    trunk: Path | None = None,
    elsewhere: float | None = None,
) -> AcceptanceCheck:
    """Measure a finished file as `record_acceptance` does; if that fails, return the reason."""
    model, head = trunk or path, path if trunk else None
    try:
        from mtp_gguf.native.checks.acceptance import measure_in_subprocess  # noqa: PLC0415

        if (needed := checked_memory(model)) >= _LARGE:
            progress.say(
                f"measuring acceptance: takes {human_bytes(needed)} of memory, and at most "
                f"{_SECONDS:.0f} s after loading; Ctrl-C or --no-check skips it"
            )
        with open_model(path) as opened:
            draft = opened.head.report.draft
        measure = partial(measure_in_subprocess, model, seconds=_SECONDS, head=head)
        measured, whole = measure(whole_vocabulary=draft is None), None
        if measured.share >= least:
            return AcceptanceCheck(measured, least=least)
        if draft is not None and draft.layout is DraftLayout.IDS:
            whole = measure(whole_vocabulary=True)
        warning = poor_text(path, measured, least, whole, elsewhere)
        return AcceptanceCheck(measured, whole, least=least, warning=warning)
    except (MtpGgufError, ImportError) as error:
        return AcceptanceCheck(skipped=printable(str(error).partition("\n")[0]), least=least)
    except KeyboardInterrupt:
        return AcceptanceCheck(skipped="interrupted", least=least)


def poor_text(
    path: Path,
    found: Acceptance,
    least: float,
    whole: Acceptance | None = None,
    elsewhere: float | None = None,
) -> str:
    """One sentence: that too few drafts of a file's head are accepted, and why it may be.

    whole: acceptance without its draft vocabulary, if that was measured. elsewhere: as
    `record_acceptance` takes it.
    """
    low, high = found.greedy.interval(0)
    text = (
        f"{found.share:.0%} of first drafts are accepted ({low:.0%} to {high:.0%} at 95 %), less "
        f"than --least-acceptance {least:.0%}"
    )
    if whole is not None and whole.share >= least:
        return (
            f"{text}; without the draft vocabulary it would be {whole.share:.0%}: the list lacks "
            "words of the text that was measured"
        )
    with open_model(path) as model:
        causes = [f.text for f in diagnose(model, None, 1, 1).findings if f.code in _SHOWN_CAUSES]
    if causes:
        return f"{text}: {causes[0]}"
    if elsewhere is not None:
        few = elsewhere < least
        more = "longer, on more text" if few else "on texts of every kind that you use"
        return (
            f"{text}; of the texts that the head was trained for, {elsewhere:.0%} are: train it "
            f"{more}"
        )
    return (
        f"{text}: the head may be that of another model, fine-tune or layer, or its norms or rows "
        "may be exchanged; take the head of exactly this model; "
        f"mtp-gguf doctor {quoted(path)} --explain looks for the cause"
    )
