"""Doing what a plan says: tensors stream through in slices of rows, on all cores.

Each worker reads a slice, transforms and quantizes it, and writes it at its final place. NumPy,
ggml and the system calls release the GIL, so threads suffice; nothing but the slices in flight is
held, whatever the size of the model.
"""

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.output import OutputFile
from mtp_gguf.gguf_tools.tensor_types import F32, TensorType
from mtp_gguf.native import ggml

from .imatrix import Imatrix
from .plan import Plan, PlannedTensor
from .recipe import Target
from .source_rows import DTYPES, Rows, SourceRows

# Values of one slice at most, so that its copies (source, F32, reordered, result) stay within
# some 24 bytes each; with many workers slices shrink, so that all together keep to the budget.
_SLICE_VALUES = 1 << 21
_SLICE_BUDGET_BYTES = 512 << 20
_BYTES_PER_VALUE = 24


@dataclass(frozen=True)
class Outcome:
    """What a conversion took: `seconds`, and the process's peak resident memory in bytes."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True, eq=False)
class _Slice:
    """Rows `start` to `stop` of a tensor, written to `output` from `offset`."""

    tensor: PlannedTensor
    start: int
    stop: int
    output: OutputFile
    offset: int


def run(
    plan: Plan, rows: SourceRows, progress: Callable[[int], None], workers: int | None = None
) -> Outcome:
    """Write the files of a plan; they appear under their names together, at the end.

    progress: called with the number of bytes just written, from any thread, one at a time.
    On any exception nothing is left behind.
    """
    began = time.monotonic()
    workers = workers or os.cpu_count() or 1
    for kind in {t.spec.type for t in plan.tensors}:
        ggml.prepare(kind)
    with ExitStack() as stack:
        outputs = [
            stack.enter_context(OutputFile(shard.path, shard.layout.size)) for shard in plan.shards
        ]
        for shard, output in zip(plan.shards, outputs, strict=True):
            output.write(0, shard.layout.header)
        _work(_slices(plan, outputs, workers), rows, plan.imatrix, progress, workers)
        for output in outputs:
            output.commit()
    return Outcome(time.monotonic() - began, peak_memory())


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


def _slices(plan: Plan, outputs: list[OutputFile], workers: int) -> Iterator[_Slice]:
    values = min(_SLICE_VALUES, _SLICE_BUDGET_BYTES // (workers * _BYTES_PER_VALUE))
    for shard, output in zip(plan.shards, outputs, strict=True):
        for tensor, offset in zip(shard.tensors, shard.layout.offsets, strict=True):
            if tensor.target is None:
                yield _Slice(tensor, 0, 1, output, offset)
                continue
            length = tensor.spec.shape[0]
            height = tensor.spec.shape[1] if len(tensor.spec.shape) > 1 else 1
            step = max(values // length, 1)
            row_bytes = tensor.spec.type.row_bytes(length)
            # Slices end with each expert, whose importance weights are its own.
            for matrix in range(0, tensor.target.rows, height):
                for start in range(matrix, matrix + height, step):
                    stop = min(start + step, matrix + height)
                    yield _Slice(tensor, start, stop, output, offset + start * row_bytes)


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
                data = _make(job, rows, imatrix)
                job.output.write(job.offset, data.data)
                with lock:
                    progress(data.nbytes)
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


def _make(job: _Slice, rows: SourceRows, imatrix: Imatrix | None) -> NDArray[np.generic]:
    """The bytes of a slice, as a contiguous array."""
    target = job.tensor.target
    if target is None:
        assert job.tensor.data is not None
        return np.ascontiguousarray(job.tensor.data, "<i8")
    source = rows.read(target, job.start, job.stop)
    try:
        return encode(source, job.tensor.spec.type, _importance(job, target, imatrix))
    except ggml.GgmlError as error:
        raise CheckpointError(
            f"{target.recipe.sources[0]}: rows {job.start} to {job.stop - 1} of {target.name} "
            f"cannot be written as {job.tensor.spec.type.name}: {error}"
        ) from None


def encode(
    rows: Rows, kind: TensorType, importance: NDArray[np.float32] | None
) -> NDArray[np.generic]:
    """Rows in the encoding of `kind`; 16-bit floats of the same type pass as they are.

    GgmlError when they hold NaN or infinity, or weights that are too large for the type.
    """
    if rows.dtype != DTYPES.get(kind.name):
        if kind is not F32:
            return ggml.quantize(kind, rows, importance)
        rows = ggml.to_f32(rows)
    if not ggml.is_finite(rows):
        raise ggml.GgmlError("expected finite weights, found NaN or infinity")
    return rows.view(np.uint8)


def _importance(job: _Slice, target: Target, imatrix: Imatrix | None) -> NDArray[np.float32] | None:
    """The importance weights of the expert that the slice lies in."""
    weights = imatrix.weights.get(target.name) if imatrix else None
    if weights is None or not job.tensor.spec.type.is_quantized:
        return None
    height = target.shape[1] if len(target.shape) > 1 else 1
    expert: NDArray[np.float32] = weights[job.start // height]
    return expert
