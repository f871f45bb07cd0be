"""How busy a piece of work keeps the cores."""

import os
import time


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CoreMeter:
    """Processor time of this process, all threads together, since the meter was made."""

    def __init__(self) -> None:
        self.cores = usable_cores()
        self._wall, self._busy = time.monotonic(), time.process_time()

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        return time.monotonic() - self._wall

    @property
    def busy_seconds(self) -> float:
        """Processor time so far."""
        return time.process_time() - self._busy

    def share(self) -> float:
        """The part of the cores' time that was used: 1.0 where all of them never waited."""
        seconds = self.seconds
        return self.busy_seconds / (seconds * self.cores) if seconds > 0 else 0.0
