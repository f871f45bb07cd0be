"""New GGUF files from parts of others: metadata edited, tensors copied byte for byte.

A `Model` is a GGUF file, or all shards of one, opened by its headers. An `Assembly` says what the
new file shall hold; `write` lays it out and has the kernel copy the tensors, neighbours together,
so that the data of a whole base moves in one go and never passes through Python.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .errors import FormatError
from .format import (
    ArrayRef,
    GgufFile,
    RawValue,
    TensorInfo,
    TensorSpec,
    Value,
    lay_out,
    open_gguf,
)
from .output import OutputFile
from .shards import shard_paths
from .sources import Source

Metadata = dict[str, Value | RawValue]

SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True)
class Piece:
    """A tensor to write: its bytes stand in `source` from `offset`, or they are `data`.

    rows: takes these rows of a larger tensor at `offset`, in this order; empty takes all it has.
    """

    spec: TensorSpec
    source: Source | None = None
    offset: int = 0
    data: bytes = b""
    rows: Sequence[int] = ()

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.spec.name


@dataclass(frozen=True)
class Assembly:
    """A file to write: `metadata` in order, `pieces` in file order."""

    metadata: Metadata
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding excluded."""
        return sum(piece.spec.nbytes for piece in self.pieces)


class Model:
    """A GGUF model open for reading: `first` has the metadata, `tensors` those of all shards.

    path: what it is called in messages, an address where it is not a local file. A context manager
    that closes the files.
    """

    def __init__(self, path: Path | str, files: tuple[GgufFile, ...]) -> None:
        self.path = path
        self.files = files
        self.first = files[0]
        self.tensors: dict[str, TensorInfo] = {}
        self._source: dict[str, Source] = {}
        for file in files:
            for tensor in file.tensors:
                if tensor.name in self.tensors:
                    raise FormatError(
                        f"{path}: tensor {tensor.name!r} is in both "
                        f"{self._source[tensor.name].name} and {file.source.name}"
                    )
                self.tensors[tensor.name] = tensor
                self._source[tensor.name] = file.source
        for index, file in enumerate(files):
            self._check_split(index, file)

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.source.close()

    def _check_split(self, index: int, file: GgufFile) -> None:
        count = file.integer("split.count") or 1
        number = file.integer("split.no") or 0
        if (number, count) != (index, len(self.files)):
            raise FormatError(
                f"{file.source.name}: expected shard {index + 1} of {len(self.files)} by the "
                f"files' names, found shard {number + 1} of {count} by split.no and split.count"
            )
        total = file.integer("split.tensors.count")
        if total not in (None, len(self.tensors)):
            raise FormatError(
                f"{file.source.name}: split.tensors.count: expected {len(self.tensors)}, as the "
                f"shards hold, found {total}"
            )

    @property
    def paths(self) -> list[Path]:
        """The files, to be held against an output's path."""
        return [Path(file.source.name) for file in self.files]

    @property
    def architecture(self) -> str | None:
        """`general.architecture`, where it is text."""
        held = self.first.scalar("general.architecture")
        return held if isinstance(held, str) else None

    def metadata(self) -> Metadata:
        """All keys but those of the split, values unread."""
        held = header_keys(self.first)
        return {key: value for key, value in held.items() if key not in SPLIT_KEYS}

    def source_of(self, name: str) -> Source:
        """The file that holds the tensor `name`."""
        return self._source[name]

    def piece(self, name: str) -> Piece:
        """The tensor `name`, to be copied."""
        tensor = self.tensors[name]
        spec = TensorSpec(name, tensor.shape, tensor.type)
        return Piece(spec, self._source[name], tensor.offset)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes `start` to `start + length` of the tensor `name`; all from `start` by default."""
        tensor = self.tensors[name]
        length = tensor.nbytes - start if length is None else length
        return self._source[name].read(tensor.offset + start, length)


def open_model(path: Path) -> Model:
    """Open the GGUF at `path` with all its shards; FormatError when they do not fit together."""
    with ExitStack() as stack:
        files = tuple(stack.enter_context(open_gguf(shard)) for shard in shard_paths(path))
        model = Model(path, files)
        stack.pop_all()
        return model


def header_keys(file: GgufFile) -> Metadata:
    """All keys of one file as they would be written again, arrays unread."""
    return {
        key: file.raw(key) if isinstance(held, ArrayRef) else file.value(key)
        for key, held in file.keys.items()
    }


def inserted(metadata: Metadata, new: Mapping[str, Value], before: Iterable[str]) -> Metadata:
    """`metadata` with `new` keys in front of the first key that starts with one of `before`.

    Prefixes are tried in turn; keys that exist already are replaced where they stand.
    """
    replaced = {key: new.get(key, value) for key, value in metadata.items()}
    added = {key: value for key, value in new.items() if key not in metadata}
    keys = list(replaced)
    at = next(
        (i for prefix in before for i, key in enumerate(keys) if key.startswith(prefix)), len(keys)
    )
    ordered = [*keys[:at], *added, *keys[at:]]
    return {key: replaced[key] if key in replaced else added[key] for key in ordered}


def write(path: Path, assembly: Assembly, progress: Callable[[int], None] = lambda _: None) -> None:
    """Write the file, which appears under its name when it is whole.

    progress: called with the bytes just written.
    """
    layout = lay_out(assembly.metadata, [piece.spec for piece in assembly.pieces])
    with OutputFile(path, layout.size) as output:
        output.write(0, layout.header)
        for run in _runs(zip(assembly.pieces, layout.offsets, strict=True)):
            if run.source is None:
                output.write(run.target, run.data)
                progress(run.length)
            else:
                output.copy(run.target, run.source, run.start, run.length, progress)
        output.commit()


@dataclass
class _Run:
    """Bytes that move together: `length` of them from `start` of `source` to `target`."""

    source: Source | None
    start: int
    target: int
    length: int
    data: bytes


def _runs(placed: Iterable[tuple[Piece, int]]) -> Iterator[_Run]:
    """The copies to make. Tensors that keep their distance move with the padding in between."""
    run: _Run | None = None
    for piece, target in placed:
        if piece.rows:
            if run is not None:
                yield run
            run = None
            yield from _row_runs(piece, target)
            continue
        shift = target - piece.offset
        if (
            run is not None
            and run.source is not None
            and run.source is piece.source
            and run.target - run.start == shift
            and piece.offset >= run.start + run.length
        ):
            run.length = piece.offset + piece.spec.nbytes - run.start
            continue
        if run is not None:
            yield run
        run = _Run(piece.source, piece.offset, target, piece.spec.nbytes, piece.data)
    if run is not None:
        yield run


def _row_runs(piece: Piece, target: int) -> Iterator[_Run]:
    """The copies that gather a piece's rows."""
    length = piece.spec.type.row_bytes(piece.spec.shape[0])
    for index, row in enumerate(piece.rows):
        start = piece.offset + row * length
        yield _Run(piece.source, start, target + index * length, length, b"")
