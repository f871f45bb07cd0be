"""Whether other programs used the processors during a measurement, which makes it unreliable."""

import os
import time
from contextlib import suppress

import psutil

# Others that take no more than this of the processors have little effect: in cores, as a share.
_FEW_CORES, _SMALL_SHARE = 0.5, 0.1
# The system counts processor time in ticks of 10 ms: a shorter measurement says nothing.
_SHORTEST = 1.0


class OtherPrograms:
    """The processor time that other programs use from now on."""

    def __init__(self, threads: int) -> None:
        """threads: how many the measurement uses."""
        self._threads = threads
        self._processors = os.cpu_count() or 1
        self._start = _clock()
        self._all, self._own = _all_seconds(), _own_seconds()

    @property
    def cores(self) -> float:
        """How many processors they have used, on average."""
        others = (_all_seconds() - self._all) - (_own_seconds() - self._own)
        return max(others, 0.0) / max(_clock() - self._start, 1e-9)

    def note(self) -> str | None:
        """A sentence if they competed with the measurement, else None."""
        if _clock() - self._start < _SHORTEST:
            return None
        cores = self.cores
        idle = self._processors - self._threads
        if cores <= max(idle, 0) + max(_FEW_CORES, _SMALL_SHARE * self._processors):
            return None
        return (
            f"other programs used {cores:.1f} of {self._processors} processors during the "
            "measurement, so its results are unreliable; repeat it when they are done"
        )


def _clock() -> float:
    return time.monotonic()


def _all_seconds() -> float:
    """Processor time of all programs since the machine started."""
    times = psutil.cpu_times()
    unused = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # in `user`, too
    return float(sum(times) - unused - guests)


def _own_seconds() -> float:
    """Processor time of this process and its children, such as llama-server."""
    ended = sum(os.times()[:4])
    running = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            running += sum(child.cpu_times()[:2])
    return ended + running
