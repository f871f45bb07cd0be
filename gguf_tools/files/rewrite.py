"""Writes GGUF files from parts of others: edited metadata, tensors copied byte for byte.

An `OutputSpec` describes the new file; `write` lays it out and has the kernel copy the tensors.
Adjacent tensors are copied together, so the data of a whole trunk is one copy that never passes
through Python.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ..heads.fastmtp import ID_MAP_TENSOR, SHORT_HEAD_SUFFIX
from ..hub.sources import Source, check_unchanged
from ..model import Metadata, Model
from .format import TensorSpec, Value, ValueType, lay_out
from .output import OutputFile

SIZE_LABEL_KEY = "general.size_label"


@dataclass(frozen=True)
class TensorCopy:
    """A tensor to write, whose bytes are in `source` from `offset` on, or are `data`.

    rows: copies these rows of a larger tensor at `offset`, in this order; empty for all rows.
    """

    spec: TensorSpec
    source: Source | None = None
    offset: int = 0
    data: bytes = b""
    rows: Sequence[int] = ()

    @classmethod
    def of(cls, model: Model, name: str) -> "TensorCopy":
        """The tensor `name` of a model, unchanged."""
        tensor = model.tensors[name]
        spec = TensorSpec(name, tensor.shape, tensor.type)
        return cls(spec, model.source_of(name), tensor.offset)

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.spec.name


@dataclass(frozen=True)
class OutputSpec:
    """A file to write: `metadata` and `tensors`, both in file order."""

    metadata: Metadata
    tensors: tuple[TensorCopy, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding excluded."""
        return sum(tensor.spec.nbytes for tensor in self.tensors)


def copies(model: Model) -> tuple[TensorCopy, ...]:
    """All tensors of a model, unchanged and in file order."""
    return tuple(TensorCopy.of(model, name) for name in model.tensors)


def inserted(metadata: Metadata, new: Mapping[str, Value], before: Iterable[str]) -> Metadata:
    """`metadata` with `new` keys in front of the first key that starts with one of `before`.

    The prefixes are tried in order; keys that already exist are replaced at their place.
    """
    replaced = {key: new.get(key, value) for key, value in metadata.items()}
    added = {key: value for key, value in new.items() if key not in metadata}
    keys = list(replaced)
    at = next(
        (i for prefix in before for i, key in enumerate(keys) if key.startswith(prefix)), len(keys)
    )
    ordered = [*keys[:at], *added, *keys[at:]]
    return {key: replaced[key] if key in replaced else added[key] for key in ordered}


def relabelled(before: Model, after: OutputSpec) -> OutputSpec:
    """`after` with its `general.size_label` recomputed, if it was computed for `before`.

    A converter that finds no size in a model's name derives the label from the number of weights
    ("4.1M", "8x2.0M"), which a head changes. A label from the model's name stays.
    """
    label = _text(after.metadata, SIZE_LABEL_KEY)
    if label is None or label in (_text(after.metadata, "general.name") or ""):
        return after
    if label != _counted_label(tensor.spec for tensor in copies(before)):
        return after
    new = Value(ValueType.STRING, _counted_label(tensor.spec for tensor in after.tensors))
    return OutputSpec(after.metadata | {SIZE_LABEL_KEY: new}, after.tensors)


def _counted_label(tensors: Iterable[TensorSpec]) -> str:
    """The size label that the gguf package computes for a model of these tensors."""
    from gguf import size_label  # noqa: PLC0415  (imports NumPy)

    total = expert = experts = 0
    for tensor in tensors:
        if tensor.name == ID_MAP_TENSOR or tensor.name.endswith(SHORT_HEAD_SUFFIX):
            continue
        size = prod(tensor.shape)
        total += size
        if "_exps." in tensor.name and len(tensor.shape) == 3 and tensor.shape[2]:
            experts = tensor.shape[2]
            expert += size // experts
    shared = total - expert * experts
    return str(size_label(total, shared, expert, experts))


def _text(metadata: Metadata, key: str) -> str | None:
    found = metadata.get(key)
    return found.data if isinstance(found, Value) and isinstance(found.data, str) else None


def write(path: Path, output: OutputSpec, progress: Callable[[int], None] = lambda _: None) -> None:
    """Write the file; it appears under its name once it is complete.

    progress: called with the number of bytes just written.
    """
    layout = lay_out(output.metadata, [tensor.spec for tensor in output.tensors])
    with OutputFile(path, layout.size) as file:
        file.write(0, layout.header)
        for run in _runs(zip(output.tensors, layout.offsets, strict=True)):
            if run.source is None:
                file.write(run.target, run.data)
                progress(run.length)
            else:
                file.copy(run.target, run.source, run.start, run.length, progress)
        check_unchanged(tensor.source for tensor in output.tensors)
        file.commit()


@dataclass
class _Run:
    """A contiguous copy: `length` bytes from `start` of `source` to `target`."""

    source: Source | None
    start: int
    target: int
    length: int
    data: bytes


def _runs(placed: Iterable[tuple[TensorCopy, int]]) -> Iterator[_Run]:
    """The copies to make. Tensors that keep their distance are copied together with the padding."""
    run: _Run | None = None
    for tensor, target in placed:
        if tensor.rows:
            if run is not None:
                yield run
            run = None
            yield from _row_runs(tensor, target)
            continue
        shift = target - tensor.offset
        if (
            run is not None
            and run.source is not None
            and run.source is tensor.source
            and run.target - run.start == shift
            and tensor.offset >= run.start + run.length
        ):
            run.length = tensor.offset + tensor.spec.nbytes - run.start
            continue
        if run is not None:
            yield run
        run = _Run(tensor.source, tensor.offset, target, tensor.spec.nbytes, tensor.data)
    if run is not None:
        yield run


def _row_runs(tensor: TensorCopy, target: int) -> Iterator[_Run]:
    """The copies that gather a tensor's rows."""
    length = tensor.spec.type.row_bytes(tensor.spec.shape[0])
    for index, row in enumerate(tensor.rows):
        start = tensor.offset + row * length
        yield _Run(tensor.source, start, target + index * length, length, b"")
