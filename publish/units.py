"""Units of work of a conversion: slices that any machine can carry out by themselves.

A unit names the sources, the places of its results in the output files, and everything between
them. It is sent as bytes. A worker reads the ranges of the sources that the unit needs, from the
hub or a shared folder, and writes into the files that the client has made in a shared folder.
"""

import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from mtp_gguf.convert.checkpoints.slices import Slice
from mtp_gguf.convert.checkpoints.source_rows import SourceRows
from mtp_gguf.convert.pipeline import Work, process
from mtp_gguf.convert.plans.recipe import Target
from mtp_gguf.gguf_tools.errors import CheckpointError, FormatError, OutputError, RequestError
from mtp_gguf.gguf_tools.imatrix import Imatrix
from mtp_gguf.gguf_tools.machine import os_files

# Bytes of the sources that a unit reads. Each takes a share of what is left, so that the last ones
# are small and end at about the same time; two of the least keep a worker's connections busy.
_LARGEST = 1 << 30
_SMALLEST = 16 << 20
_SHARE = 2  # units that each slot would do if all had the size of the next one


@dataclass(frozen=True)
class Unit:
    """Slices with their numbers; outputs: the unfinished files that they write, with their sizes.

    Files are counted as in `Place`.
    """

    slices: list[tuple[int, Slice]]
    rows: SourceRows
    imatrix: Imatrix | None
    outputs: dict[int, tuple[Path, int]]

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return sum(part.nbytes for _, part in self.slices)


@dataclass(frozen=True)
class Failure:
    """Why no machine can carry out a unit: `text` is the whole message."""

    kind: type[CheckpointError] | type[FormatError]
    text: str


def units_of(work: Work, slots: int) -> Iterator[Unit]:
    """Divide the work among `slots`, the units that the workers carry out at a time.

    The slices of a unit read neighbouring bytes.
    """
    left = sum(_source_bytes(part) for _, part in work.left)
    group: list[tuple[int, Slice]] = []
    size = 0
    for numbered in work.left:
        group.append(numbered)
        size += _source_bytes(numbered[1])
        if size >= min(max(left // (slots * _SHARE), _SMALLEST), _LARGEST):
            yield _unit(work, group)
            left -= size
            group, size = [], 0
    if group:
        yield _unit(work, group)


def _source_bytes(part: Slice) -> int:
    return sum(extent.stop - extent.start for extent in part.extents)


def _unit(work: Work, slices: list[tuple[int, Slice]]) -> Unit:
    targets = [(p.tensor.target, p.rows) for _, p in slices if p.tensor.target is not None]
    imatrix = importance_of(work.imatrix, (target for target, _ in targets))
    numbers = {
        place.output for _, part in slices for places in part.places.values() for place in places
    }
    outputs = {n: (work.outputs[n].partial.absolute(), work.outputs[n].size) for n in numbers}
    return Unit(slices, work.rows.only(targets), imatrix, outputs)


def importance_of(imatrix: Imatrix | None, targets: Iterable[Target]) -> Imatrix | None:
    """The part of an importance matrix that these targets need."""
    if imatrix is None:
        return None
    names = {target.name for target in targets}
    weights = {name: w for name, w in imatrix.weights.items() if name in names}
    return replace(imatrix, weights=weights)


def packed(unit: object) -> tuple[str, bytes]:
    """The unit as the first arguments of the function that carries it out."""
    return version("mtp-gguf"), pickle.dumps(unit)


def carry_out(wanted: str, data: bytes, threads: int) -> Failure | None:
    """Carry out a packed unit; every byte is on the disk, or with its file server, at the end.

    wanted: the version that has packed it. Returns a failure that would be the same elsewhere, and
    raises what another machine may be able to do.
    """
    check_version(wanted)
    try:
        unit: Unit = pickle.loads(data)
        _write(unit, threads)
    except (CheckpointError, FormatError) as error:
        return Failure(type(error), str(error))
    return None


def check_version(wanted: str) -> None:
    """RequestError if this process has another version of the package."""
    if (own := version("mtp-gguf")) != wanted:
        raise RequestError(f"expected mtp-gguf {wanted} on every worker, found {own}")


def _write(unit: Unit, threads: int) -> None:
    with ExitStack() as stack:
        stack.callback(unit.rows.close)
        files = {number: _open(*output, stack) for number, output in unit.outputs.items()}

        def write(output: int, offset: int, data: "bytes | memoryview") -> None:
            os_files.write_at(files[output], data, offset)

        try:
            process(unit.slices, unit.rows, unit.imatrix, write, lambda *_: None, threads)
            unit.rows.check_unchanged()
            for fd in files.values():
                os.fsync(fd)
        except OSError as error:
            raise OutputError(f"{_folder(unit)}: cannot be written: {error.strerror}") from None


def _open(path: Path, size: int, stack: ExitStack) -> int:
    """Open an unfinished file that the client has made."""
    try:
        fd = os_files.open_file(path, os.O_RDWR)
    except OSError as error:
        raise OutputError(
            f"{path.parent}: expected the unfinished files of the conversion, found none "
            f"({error.strerror}); all workers must see this folder under this name"
        ) from None
    stack.callback(os.close, fd)
    if os.fstat(fd).st_size != size:
        raise OutputError(f"{path}: expected {size} bytes, found {os.fstat(fd).st_size}")
    return fd


def _folder(unit: Unit) -> Path:
    return next(iter(unit.outputs.values()))[0].parent


def finished(unit: Unit, work: Work) -> None:
    """Record a unit that was carried out; its bytes count at once, as one step of progress."""
    (last, _), *others = reversed(unit.slices)
    for index, _ in others:
        work.done(index, 0)
    work.done(last, unit.nbytes)
