"""Doing what plans say: tensors stream through in slices of rows, on all cores.

Each worker reads a slice, transforms it, and for each precision that was asked for quantizes it and
writes it at its final place. NumPy, the quantizers and the system calls release the GIL, so threads
suffice; nothing but the slices in flight is held, whatever the size of the model.
"""

import resource
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.output import OutputFile, commit_all
from mtp_gguf.gguf_tools.system import CoreMeter, usable_cores
from mtp_gguf.gguf_tools.tensor_types import F32, NVFP4, TensorType
from mtp_gguf.native import ggml

from .imatrix import Imatrix
from .plan import Plan, PlannedTensor
from .recipe import Target
from .source_rows import SourceRows
from .weights import PLAIN_DTYPES, Rows

# Values of one slice at most, so that its copies (source, F32, reordered, result) stay within
# some 24 bytes each; with many workers slices shrink, so that all together keep to the budget.
# Results of several precisions are made one after another.
_SLICE_VALUES = 1 << 21
_SLICE_BUDGET_BYTES = 512 << 20
_BYTES_PER_VALUE = 24


@dataclass(frozen=True)
class Outcome:
    """What a conversion took.

    seconds: wall time. busy_seconds: processor time of all threads. cores: those it could use.
    peak_bytes: the process's peak resident memory.
    """

    seconds: float
    busy_seconds: float
    cores: int
    peak_bytes: int

    @property
    def utilisation(self) -> float:
        """The part of the cores' time that was used."""
        return self.busy_seconds / (self.seconds * self.cores)


@dataclass(frozen=True, eq=False)
class _Place:
    """Where rows of a tensor go at one type: row 0 to `offset` of `output`."""

    output: OutputFile
    offset: int


@dataclass(frozen=True, eq=False)
class _Slice:
    """Rows `start` to `stop` of a tensor, and where they go by the type that they take there."""

    tensor: PlannedTensor
    start: int
    stop: int
    places: dict[TensorType, list[_Place]]


def run(
    plans: Sequence[Plan],
    rows: SourceRows,
    progress: Callable[[int], None],
    workers: int | None = None,
) -> Outcome:
    """Write the files of all plans, which are of the same content (`plans_of`).

    Each source row is read once. The files appear under their names together, at the end; on any
    exception none does, and nothing else is left behind.
    progress: called with the number of bytes just written, from any thread, one at a time.
    """
    meter = CoreMeter()
    workers = workers or usable_cores()
    for kind in {t.spec.type for plan in plans for t in plan.tensors}:
        ggml.prepare(kind)
    with ExitStack() as stack:
        places: dict[str, dict[TensorType, list[_Place]]] = defaultdict(lambda: defaultdict(list))
        outputs = []
        for shard in (shard for plan in plans for shard in plan.shards):
            output = stack.enter_context(OutputFile(shard.path, shard.layout.size))
            output.write(0, shard.layout.header)
            outputs.append(output)
            for tensor, offset in zip(shard.tensors, shard.layout.offsets, strict=True):
                places[tensor.spec.name][tensor.spec.type].append(_Place(output, offset))
        _work(_slices(plans[0], places, workers), rows, plans[0].imatrix, progress, workers)
        rows.check_unchanged()
        commit_all(outputs)
    return Outcome(meter.seconds, meter.busy_seconds, meter.cores, peak_memory())


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes.

    Linux counts the memory of the process that started this one into ru_maxrss, so its own
    high-water mark is taken where the kernel tells it.
    """
    with suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _slices(
    plan: Plan, places: dict[str, dict[TensorType, list[_Place]]], workers: int
) -> Iterator[_Slice]:
    values = min(_SLICE_VALUES, _SLICE_BUDGET_BYTES // (workers * _BYTES_PER_VALUE))
    for tensor in plan.tensors:
        if tensor.target is None:
            yield _Slice(tensor, 0, 1, places[tensor.spec.name])
            continue
        height = tensor.spec.shape[1] if len(tensor.spec.shape) > 1 else 1
        step = max(values // tensor.spec.shape[0], 1)
        # Slices end with each expert, whose importance weights are its own.
        for matrix in range(0, tensor.target.rows, height):
            for start in range(matrix, matrix + height, step):
                stop = min(start + step, matrix + height)
                yield _Slice(tensor, start, stop, places[tensor.spec.name])


def _work(
    slices: Iterator[_Slice],
    rows: SourceRows,
    imatrix: Imatrix | None,
    progress: Callable[[int], None],
    workers: int,
) -> None:
    """Let `workers` threads take slices until none is left; the first error stops all."""
    lock = threading.Lock()
    errors: list[BaseException] = []
    stop = threading.Event()

    def worker() -> None:
        try:
            while not stop.is_set():
                with lock:
                    job = next(slices, None)
                if job is None:
                    return
                written = _do(job, rows, imatrix)
                with lock:
                    progress(written)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=worker, name=f"convert-{i}") for i in range(workers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:  # an interrupt arrives in this thread
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]


def _do(job: _Slice, rows: SourceRows, imatrix: Imatrix | None) -> int:
    """Read a slice and write it to all its places; the number of bytes written."""
    target = job.tensor.target
    source = None if target is None else rows.read(target, job.start, job.stop)
    written = 0
    for kind, places in job.places.items():
        data = _encoded(job, source, kind, imatrix)
        for place in places:
            start = job.start * kind.row_bytes(job.tensor.spec.shape[0])
            place.output.write(place.offset + start, data.data)
            written += data.nbytes
    return written


def _encoded(
    job: _Slice, source: Rows | None, kind: TensorType, imatrix: Imatrix | None
) -> NDArray[np.generic]:
    """The bytes of a slice at a type, as a contiguous array."""
    target = job.tensor.target
    if target is None or source is None:
        data = job.tensor.data
        assert data is not None
        return np.ascontiguousarray(data, data.dtype.newbyteorder("<"))
    try:
        return encode(source, kind, _importance(job, target, kind, imatrix))
    except ggml.GgmlError as error:
        raise CheckpointError(
            f"{target.recipe.sources[0]}: rows {job.start} to {job.stop - 1} of {target.name} "
            f"cannot be written as {kind.name}: {error}"
        ) from None


def encode(
    rows: Rows, kind: TensorType, importance: NDArray[np.float32] | None
) -> NDArray[np.generic]:
    """Rows in the encoding of `kind`; 16-bit floats of the same type pass as they are.

    GgmlError when they hold NaN or infinity, or weights that are too large for the type.
    """
    if kind is NVFP4:
        return rows  # blocks of the checkpoint, as they are
    if rows.dtype != PLAIN_DTYPES.get(kind.name):
        if kind is not F32:
            return ggml.quantize(kind, rows, importance)
        rows = ggml.to_f32(rows)
    if not ggml.is_finite(rows):
        raise ggml.GgmlError("expected finite weights, found NaN or infinity")
    return rows.view(np.uint8)


def _importance(
    job: _Slice, target: Target, kind: TensorType, imatrix: Imatrix | None
) -> NDArray[np.float32] | None:
    """The importance weights of the expert that the slice lies in."""
    weights = imatrix.weights.get(target.name) if imatrix else None
    if weights is None or not kind.is_quantized:
        return None
    height = target.shape[1] if len(target.shape) > 1 else 1
    expert: NDArray[np.float32] = weights[job.start // height]
    return expert
