"""Carries out plans: tensors are streamed in slices of rows, on all cores.

Each worker reads a slice (checkpoints/slices.py), transforms it, and for each requested precision
quantizes it and writes it to its final place. NumPy, the quantizers and the system calls release
the GIL, so threads suffice. Only the slices in flight are in memory, whatever the model's size.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version

import numpy as np

from mtp_gguf.gguf_tools.errors import CheckpointError, FormatError, OutputError
from mtp_gguf.gguf_tools.files.output import Journal, OutputFile, commit_all
from mtp_gguf.gguf_tools.hub.read_ahead import ReadAhead
from mtp_gguf.gguf_tools.hub.sources import version_of
from mtp_gguf.gguf_tools.imatrix import Imatrix
from mtp_gguf.gguf_tools.machine.process_memory import peak_memory
from mtp_gguf.gguf_tools.machine.processors import usable_cores
from mtp_gguf.gguf_tools.machine.system import CoreMeter
from mtp_gguf.quantize import ggml

from .checkpoints.slices import Slice, Write, slices_of
from .checkpoints.source_rows import SourceRows
from .plans.plan import Plan

# Most values in a slice. Its copies (source, F32, reordered, result) take about 24 bytes per value;
# with many workers the slices shrink, so that the total stays within the budget. Several precisions
# are computed one after another.
_SLICE_VALUES = 1 << 21
_SLICE_BUDGET_BYTES = 512 << 20
_BYTES_PER_VALUE = 24
# In resumable conversions, whose slices must not depend on the number of workers.
_RESUMABLE_VALUES = 1 << 20
_FINAL = (CheckpointError, FormatError, OutputError)  # after which a second run would end as well


@dataclass(frozen=True)
class Outcome:
    """Time and memory that a conversion took.

    seconds: wall time. busy_seconds: processor time of all threads. cores: those available.
    peak_bytes: the process's peak resident memory.
    """

    seconds: float
    busy_seconds: float
    cores: int
    peak_bytes: int

    @property
    def utilisation(self) -> float:
        """Utilization of the cores, 0 to 1."""
        return self.busy_seconds / (self.seconds * self.cores)


@dataclass(frozen=True)
class Work:
    """What is left to do of a conversion whose outputs are open.

    left: the slices with their numbers, in the order of the bytes that they read. done: to be
    called with the number of a slice whose bytes are in the outputs, and how many they are, never
    concurrently. threads: for work in this process.
    """

    left: list[tuple[int, Slice]]
    rows: SourceRows
    imatrix: Imatrix | None
    outputs: Sequence[OutputFile]
    done: Callable[[int, int], None]
    threads: int


def run(
    plans: Sequence[Plan],
    rows: SourceRows,
    progress: Callable[[int], None],
    workers: int | None = None,
    *,
    resumable: bool = False,
    carry_out: "Callable[[Work], None] | None" = None,
) -> Outcome:
    """Write the files of all plans; tensors of one name and shape have the same content in all.

    Each source row is read once, ahead of its use where it comes from a server. All files appear
    under their names at the end; on any exception none does, and no temporary files are left.
    resumable: what is written stays where the sources or the user stop it, and the same call goes
    on from there. carry_out: does the work elsewhere than in this process's threads; it may
    raise what leaves the parts for another call.
    progress: called with the number of bytes just written, from any thread, never concurrently.
    """
    meter = CoreMeter()
    workers = workers or usable_cores()
    carry_out = carry_out or _in_threads
    values = _RESUMABLE_VALUES
    if not resumable:
        values = min(_SLICE_VALUES, _SLICE_BUDGET_BYTES // (workers * _BYTES_PER_VALUE))
    slices = slices_of(plans, rows, values)
    with ExitStack() as stack:
        outputs, journal = open_outputs(plans, slices, resumable, stack)
        imatrix = plans[0].imatrix
        try:
            done = journal.done if journal else frozenset[int]()
            progress(sum(slices[index].nbytes for index in done))
            left = [(index, part) for index, part in enumerate(slices) if index not in done]

            def finish(index: int, written: int) -> None:
                if journal:
                    journal.mark(index)
                progress(written)

            carry_out(Work(left, rows, imatrix, outputs, finish, workers))
            rows.check_unchanged()
            commit_all(outputs)
        except _FINAL:
            _forget(outputs, journal)
            raise
        if journal:
            journal.remove()
    return Outcome(meter.seconds, meter.busy_seconds, meter.cores, peak_memory())


def open_outputs(
    plans: Sequence[Plan], slices: Sequence[Slice], resumable: bool, stack: ExitStack
) -> tuple[list[OutputFile], Journal | None]:
    """The files of all plans with their headers written, and the record of what they have."""
    shards = [shard for plan in plans for shard in plan.shards]
    identity = identity_of(plans, slices) if resumable else None
    outputs = [OutputFile(shard.path, shard.layout.size, identity) for shard in shards]
    journal = Journal(outputs, len(slices)) if resumable else None
    try:
        for output, shard in zip(outputs, shards, strict=True):
            stack.enter_context(output)
            output.write(0, shard.layout.header)
    except OutputError:  # a full disk, or another process that writes one of them
        for output in outputs:
            if not output.resumed:
                output.discard()
        raise
    if journal:
        stack.enter_context(journal)
    return outputs, journal


def identity_of(plans: Sequence[Plan], slices: Sequence[Slice]) -> str:
    """16 hexadecimal digits that stand for the bytes of the plans' files and for their slices."""
    found = sha256(f"{version('mtp-gguf')} {len(slices)}".encode())
    for shard in (shard for plan in plans for shard in plan.shards):
        found.update(f"{shard.path.name} {shard.layout.size}".encode())
        found.update(shard.layout.header)
        for tensor in shard.tensors:
            if tensor.data is not None:
                found.update(np.ascontiguousarray(tensor.data).data)
    for source in sorted({version_of(e.source) for s in slices for e in s.extents}):
        found.update(source.encode())
    if (imatrix := plans[0].imatrix) is not None:
        for name, weights in sorted(imatrix.weights.items()):
            found.update(name.encode())
            found.update(np.ascontiguousarray(weights).data)
    return found.hexdigest()[:16]


def _in_threads(work: Work) -> None:
    """Carry out all slices in threads of this process."""

    def write(output: int, offset: int, data: "bytes | memoryview") -> None:
        work.outputs[output].write(offset, data)

    process(work.left, work.rows, work.imatrix, write, work.done, work.threads)


def _forget(outputs: Sequence[OutputFile], journal: Journal | None) -> None:
    """Remove what is written, which no later run can use."""
    if journal:
        journal.remove()
    for output in outputs:
        output.discard()


def process(
    left: Sequence[tuple[int, Slice]],
    rows: SourceRows,
    imatrix: Imatrix | None,
    write: Write,
    done: Callable[[int, int], None],
    workers: int,
) -> None:
    """Carry out slices in `workers` threads; the first error stops all of them.

    left: the slices with their numbers. done: called with the number of a slice and the bytes that
    were written of it, never concurrently.
    """
    for kind in {kind for _, part in left for kind in part.places}:
        ggml.prepare(kind)
    jobs = enumerate(left)
    lock = threading.Lock()
    errors: list[BaseException] = []
    stop = threading.Event()

    def worker() -> None:
        try:
            while not stop.is_set():
                with taking:
                    job = next(jobs, None)
                    if job is None:
                        return
                    step, (index, part) = job
                    ahead.begin(step)
                written = part.write(rows, imatrix, write)
                ahead.end(step)
                with lock:
                    done(index, written)
        except BaseException as error:
            errors.append(error)
            stop.set()

    taking = threading.Lock()
    threads = [threading.Thread(target=worker, name=f"convert-{i}") for i in range(workers)]
    with ReadAhead([part.extents for _, part in left]) as ahead:
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # Ctrl-C raises in this thread
            stop.set()
            ahead.stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if errors:
            raise errors[0]
        ahead.check()
