"""Carries out plans: tensors are streamed in slices of rows, on all cores.

Each worker reads a slice, transforms it, and for each requested precision quantizes it and writes
it to its final place. NumPy, the quantizers and the system calls release the GIL, so threads
suffice. Only the slices in flight are in memory, whatever the size of the model.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.output import OutputFile, commit_all
from mtp_gguf.gguf_tools.process_memory import peak_memory
from mtp_gguf.gguf_tools.system import CoreMeter, usable_cores
from mtp_gguf.gguf_tools.tensor_types import F32, NVFP4, TensorType
from mtp_gguf.native import ggml

from .imatrix import Imatrix
from .plan import Plan, PlannedTensor
from .recipe import Target
from .source_rows import SourceRows
from .weights import PLAIN_DTYPES, Rows

# Most values in a slice. Its copies (source, F32, reordered, result) take about 24 bytes per value;
# with many workers the slices shrink, so that the total stays within the budget. Several precisions
# are computed one after another.
_SLICE_VALUES = 1 << 21
_SLICE_BUDGET_BYTES = 512 << 20
_BYTES_PER_VALUE = 24


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


@dataclass(frozen=True, eq=False)
class _Place:
    """Destination of a tensor's rows at one type: row 0 is written to `offset` of `output`."""

    output: OutputFile
    offset: int


@dataclass(frozen=True, eq=False)
class _Slice:
    """Rows `start` to `stop` of a tensor, and their destinations by type."""

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
    """Write the files of all plans; tensors of one name have the same content in all of them.

    Each source row is read once. All files appear under their names at the end; on any exception
    none does, and no temporary files are left.
    progress: called with the number of bytes just written, from any thread, never concurrently.
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
        tensors = {t.spec.name: t for plan in reversed(plans) for t in plan.tensors}
        ordered = [tensors[name] for name in places]
        _work(_slices(ordered, places, workers), rows, plans[0].imatrix, progress, workers)
        rows.check_unchanged()
        commit_all(outputs)
    return Outcome(meter.seconds, meter.busy_seconds, meter.cores, peak_memory())


def _slices(
    tensors: Sequence[PlannedTensor],
    places: dict[str, dict[TensorType, list[_Place]]],
    workers: int,
) -> Iterator[_Slice]:
    values = min(_SLICE_VALUES, _SLICE_BUDGET_BYTES // (workers * _BYTES_PER_VALUE))
    for tensor in tensors:
        if tensor.target is None:
            yield _Slice(tensor, 0, 1, places[tensor.spec.name])
            continue
        height = tensor.spec.shape[1] if len(tensor.spec.shape) > 1 else 1
        step = max(values // tensor.spec.shape[0], 1)
        # Slices do not span experts, because each expert has its own importance weights.
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
    """Process all slices in `workers` threads; the first error stops all of them."""
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
    finally:  # Ctrl-C raises in this thread
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]


def _do(job: _Slice, rows: SourceRows, imatrix: Imatrix | None) -> int:
    """Read a slice and write it to all its destinations; returns the number of bytes written."""
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
    """The bytes of a slice at one type, as a contiguous array."""
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
    """Encode rows as `kind`; 16-bit floats of the same type are returned unchanged.

    GgmlError if they contain NaN or infinity, or weights that are too large for the type.
    """
    if kind is NVFP4:
        return rows  # the checkpoint's own blocks, unchanged
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
    """The importance weights of the expert that the slice belongs to."""
    weights = imatrix.weights.get(target.name) if imatrix else None
    if weights is None or not kind.is_quantized:
        return None
    height = target.shape[1] if len(target.shape) > 1 else 1
    expert: NDArray[np.float32] = weights[job.start // height]
    return expert
