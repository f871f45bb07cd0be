"""Whether other programs competed with a measurement."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from mtp_gguf.bench import other_programs
from mtp_gguf.bench.other_programs import OtherPrograms


@pytest.mark.parametrize(
    ("processors", "threads", "seconds", "others", "noted"),
    [
        (2, 2, 100, 10, False),  # a tenth of a core is nothing
        (2, 2, 100, 80, True),
        (2, 2, 0.5, 0.5, False),  # shorter than what the system's clock can tell
        (16, 8, 100, 500, False),  # five of the eight idle ones
        (16, 8, 100, 1200, True),
        (16, 16, 100, 100, False),
        (16, 16, 100, 200, True),
    ],
)
def test_others_are_noted_when_they_compete(
    processors: int,
    threads: int,
    seconds: float,
    others: float,
    noted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What this process and its children used themselves does not count."""
    now = dict.fromkeys(("_clock", "_all_seconds", "_own_seconds"), 1000.0)
    for name in now:
        monkeypatch.setattr(other_programs, name, lambda name=name: now[name])
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    meter = OtherPrograms(threads)
    now["_clock"] += seconds
    now["_own_seconds"] += threads * seconds
    now["_all_seconds"] += threads * seconds + others
    assert meter.cores == pytest.approx(others / seconds)
    note = meter.note()
    assert (note is not None) == noted
    if note is not None:
        assert f"used {others / seconds:.1f} of {processors} processors during the " in note


def test_a_child_is_not_another_program() -> None:
    """Neither while it runs nor once it has ended."""
    before = other_programs._own_seconds()
    spin = "import time; t = time.process_time()\nwhile time.process_time() < t + 0.2: pass"
    code = f"{spin}\nprint(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        assert child.stdout.readline()
        assert other_programs._own_seconds() - before > 0.15
        child.communicate("\n")
    assert other_programs._own_seconds() - before > 0.15
    assert other_programs._all_seconds() > 0
    assert time.monotonic() <= other_programs._clock()
