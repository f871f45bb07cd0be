"""Carries out conversions on a Dask cluster: one that runs already, or processes on this machine.

dask.distributed sends the units to the workers, sends those of a lost worker to another one, and
repeats what fails. This machine plans, makes the files, keeps the record of what is written, and
renames the files when they are complete.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from mtp_gguf.convert.pipeline import Work
from mtp_gguf.gguf_tools.errors import ClusterError, MtpGgufError, RemoteError
from mtp_gguf.gguf_tools.machine.processors import usable_cores

from .file_units import FileUnit, make_file
from .units import Failure, Unit, carry_out, finished, packed, units_of

if TYPE_CHECKING:
    from distributed import Client, Future
    from huggingface_hub import CommitOperationAdd

_Unit = TypeVar("_Unit", Unit, FileUnit)
_ATTEMPTS = 3  # of a unit
_POLL = 2.0  # seconds between two checks of whether the cluster is alive
_PATIENCE = 60.0  # seconds without any worker, after which a conversion ends
_CONNECT = 20.0  # seconds
# Units at a time of a worker on this machine: one is read while the other's last rows are written.
_UNITS = 2
_LOCAL = "local:"
_SCHEMES = ("tcp://", "tls://", "ucx://", "ws://", "wss://")
LOOPBACK = "127.0.0.1"


class Cluster:
    """Workers that carry out conversions; made by `open_cluster`.

    dashboard: the address of the page that shows the workers; empty if there is none.
    """

    def __init__(self, client: "Client", address: str, threads: int, dashboard: str) -> None:
        self._client = client
        self._address = address
        self._threads = threads  # of a unit
        self.dashboard = dashboard

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self._workers())

    def _workers(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.scheduler_info(n_workers=-1)["workers"]
        return found

    def _slots(self) -> int:
        """How many units the workers carry out at a time; 1 without workers."""
        return max(sum(int(worker["nthreads"]) for worker in self._workers().values()), 1)

    def carry_out(self, work: Work) -> None:
        """Carry out all slices, each of which is recorded once it is written.

        What is final, such as weights that cannot be written, raises the error of a conversion
        in one process. A unit that failed three times, or a cluster that is gone, raises
        ClusterError or RemoteError; the parts that are written stay.
        """
        self._await_workers()
        units = units_of(work, self._slots())
        self._run(carry_out, units, lambda unit, _: finished(unit, work))

    def make_files(
        self, units: Iterator[FileUnit], sent: "Callable[[FileUnit, CommitOperationAdd], None]"
    ) -> None:
        """Let the workers write files and send them to the hub, each of which is then `sent`.

        Raises as `carry_out`.
        """
        self._await_workers()
        self._run(make_file, units, sent)

    def _run(
        self,
        carry_out: Callable[[str, bytes, int], Any],
        units: Iterator[_Unit],
        done: Callable[[_Unit, Any], None],
    ) -> None:
        """Carry out units on the workers; `done` gets each one with what it has returned."""
        ended: SimpleQueue[Future] = SimpleQueue()
        running: dict[Future, _Unit] = {}
        name = f"mtp-gguf-{uuid4().hex[:8]}"
        count = 0
        alone_since: float | None = None
        try:
            while True:
                slots = self._slots()
                while len(running) < slots:
                    unit = next(units, None)
                    if unit is None:
                        break
                    future = self._submit(carry_out, unit, f"{name}-{count}")
                    count += 1
                    running[future] = unit
                    future.add_done_callback(ended.put)
                if not running:
                    return
                try:
                    future = ended.get(timeout=_POLL)
                except Empty:
                    alone_since = self._check_alive(alone_since)
                    continue
                done(running.pop(future), self._result(future))
                future.release()
        finally:
            with suppress(Exception):  # the scheduler may be gone
                self._client.cancel([*running])

    def _submit(
        self, carry_out: Callable[[str, bytes, int], Any], unit: object, key: str
    ) -> "Future":
        wanted, data = packed(unit)
        future: Future = self._client.submit(
            carry_out,
            wanted,
            data,
            self._threads,
            key=key,
            pure=False,
            retries=_ATTEMPTS - 1,
        )
        return future

    def _result(self, future: "Future") -> object:
        """What a unit has returned; raises what one that is not carried out ends it all with."""
        if future.status == "finished":
            result = future.result()
            if isinstance(result, Failure):
                raise result.kind(result.text)
            return result
        error = future.exception() if future.status == "error" else None
        if error is None:  # cancelled or lost, because the scheduler is
            raise self._gone()
        if isinstance(error, RemoteError):
            raise error
        reason = str(error) if isinstance(error, MtpGgufError) else _reason(error)
        raise ClusterError(
            f"{self._address}: a part of the conversion failed {_ATTEMPTS} times: {reason}"
        )

    def _await_workers(self) -> None:
        alone_since: float | None = None
        while not self.workers:
            alone_since = self._check_alive(alone_since)
            sleep(_POLL / 10)

    def _check_alive(self, alone_since: float | None) -> float | None:
        """ClusterError if scheduler or workers are gone; since when there are no workers."""
        if self._client.status != "running":
            raise self._gone()
        if self.workers:
            return None
        now = monotonic()
        if alone_since is not None and now - alone_since > _PATIENCE:
            raise self._no_workers()
        return now if alone_since is None else alone_since

    def _gone(self) -> ClusterError:
        return _gone(self._address)

    def _no_workers(self) -> ClusterError:
        return ClusterError(
            f"{self._address}: expected workers, found none for {_PATIENCE:.0f} s; start one with "
            "dask worker ADDRESS --nthreads 2"
        )


def _gone(address: str) -> ClusterError:
    return ClusterError(
        f"{address}: the scheduler is gone; start it again, and the same command goes on"
    )


def _reason(error: BaseException) -> str:
    """An error that is not ours, in one line."""
    from distributed import KilledWorker  # noqa: PLC0415

    if isinstance(error, KilledWorker):
        return "its workers were lost"
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {text:.200}"


@contextmanager
def open_cluster(text: str) -> Iterator[Cluster]:
    """The cluster that `text` names: the address of a scheduler, or `local:N` for N processes.

    ClusterError if there is none, or without dask.distributed.
    """
    try:
        from distributed import Client, LocalCluster  # noqa: PLC0415  (an extra, and slow)
        from distributed.comm import CommClosedError  # noqa: PLC0415
    except ImportError:
        raise ClusterError(
            "--cluster: needs dask.distributed, found none; pip install 'mtp-gguf[cluster]'"
        ) from None
    import dask  # noqa: PLC0415

    for name in ("distributed", "tornado", "asyncio"):  # the sentences say it
        logging.getLogger(name).setLevel(logging.CRITICAL)
    settings: dict[str, Any] = {
        "distributed.scheduler.allowed-failures": _ATTEMPTS - 1,
        "distributed.comm.timeouts.connect": _CONNECT,
        "distributed.admin.large-graph-warning-threshold": "1GB",
    }
    with ExitStack() as stack:
        stack.enter_context(dask.config.set(settings))
        threads = 1
        address: Any = text
        try:
            if text.startswith(_LOCAL):
                count = int(text.removeprefix(_LOCAL))
                threads = max(1, usable_cores() // (count * _UNITS))
                address = stack.enter_context(
                    LocalCluster(
                        n_workers=count,
                        threads_per_worker=_UNITS,
                        processes=True,
                        host=LOOPBACK,
                        dashboard_address=f"{LOOPBACK}:0",
                        memory_limit=0,
                        preload=f"{__package__}.worker_setup",
                        silence_logs=logging.CRITICAL,
                    )
                )
            client = stack.enter_context(Client(address, timeout=_CONNECT))
        except (OSError, ValueError, RuntimeError) as error:
            raise ClusterError(f"{text}: the cluster cannot be used: {_reason(error)}") from None
        try:
            yield Cluster(client, text, threads, client.dashboard_link)
        except (CommClosedError, CancelledError):  # between two checks of whether it is alive
            raise _gone(text) from None


def is_cluster(text: str) -> bool:
    """Whether `text` has the form of a cluster's name."""
    if text.startswith(_LOCAL):
        count = text.removeprefix(_LOCAL)
        return count.isascii() and count.isdecimal() and int(count) > 0
    return text.startswith(_SCHEMES) and ":" in text.partition("://")[2]
