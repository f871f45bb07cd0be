"""What the trunk computed on a text, in shards on disk.

A folder holds `data.json` and shards in the safetensors format. A shard appears under its name once
it is complete, and in the index, with its checksum, after that: what a killed run leaves is valid.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mtp_gguf.gguf_tools.errors import FormatError, OutputError, RequestError, raising
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.files.torch_file import open_weights

INDEX_NAME = "data.json"
LOCK_NAME = "lock"
SHARD_BYTES = 64 << 20
# A slow trunk fills a shard in an hour; a killed run loses no more than this.
_SHARD_SECONDS = 60.0
_FORMAT = 2
_HASH_BYTES = 1 << 20
_DTYPES = {"tokens": "<i4", "hidden": "<f2", "sequences": "<i4"}


@dataclass(frozen=True, eq=False)
class Sample:
    """n tokens that the trunk read from an empty context on.

    hidden: [n, width], its states after the final norm. start: the first position whose next token
    counts; those before it belong to a prompt. held_out: for measuring only; the trunk wrote what
    follows `start` greedily.
    """

    tokens: NDArray[np.int32]
    hidden: NDArray[np.float16]
    start: int
    held_out: bool

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class _Shard:
    name: str
    sha256: str
    samples: int
    tokens: int


class DataWriter:
    """Adds samples to a folder; continues where an earlier run with the same key stopped.

    key: what the samples depend on (model, text, settings). RequestError if the folder holds those
    of another key. Call `finish` when the last one was added.
    """

    def __init__(
        self, folder: Path, key: Mapping[str, Any], shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder = folder
        self._key = dict(key)
        self._shard_bytes = shard_bytes
        self._pending: list[Sample] = []
        self._flushed = time.monotonic()
        self._shards: list[_Shard] = []
        self.finished = False
        if (folder / INDEX_NAME).exists():
            found, self.finished, self._shards = _read_index(folder)
            differing = sorted(
                name for name in {*found, *self._key} if found.get(name) != self._key.get(name)
            )
            if differing:
                raise RequestError(
                    f"{folder}: expected the states of this model and text, found others "
                    f"(different {', '.join(differing)}); choose another --work folder, or remove "
                    "this one"
                )

    @property
    def samples(self) -> int:
        """Samples that are on disk or pending."""
        return sum(shard.samples for shard in self._shards) + len(self._pending)

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(shard.tokens for shard in self._shards) + sum(map(len, self._pending))

    def add(self, sample: Sample) -> None:
        """Add a sample; a shard is written once it is full, or after a minute."""
        self._pending.append(sample)
        full = sum(s.hidden.nbytes for s in self._pending) >= self._shard_bytes
        if full or time.monotonic() - self._flushed >= _SHARD_SECONDS:
            self.flush()

    def finish(self) -> None:
        """Write what is pending, and mark the data as complete."""
        self.flush()
        self.finished = True
        self._write_index()

    def flush(self) -> None:
        """Write what is pending."""
        self._flushed = time.monotonic()
        if not self._pending:
            return
        make_folder(self.folder)
        path = self.folder / f"shard-{len(self._shards):05}.safetensors"
        arrays = {
            "tokens": np.concatenate([s.tokens for s in self._pending]),
            "hidden": np.concatenate([s.hidden for s in self._pending]),
            "sequences": np.array([(len(s), s.start, s.held_out) for s in self._pending], np.int32),
        }
        partial = path.with_suffix(".partial")
        try:
            save_file(arrays, partial)
            digest = _sha256(partial)
            os.replace(partial, path)
        except OSError as error:
            raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from None
        self._shards.append(_Shard(path.name, digest, len(self._pending), len(arrays["tokens"])))
        self._pending = []
        self._write_index()

    def _write_index(self) -> None:
        index = {
            "format": _FORMAT,
            "finished": self.finished,
            "key": self._key,
            "shards": [asdict(shard) for shard in self._shards],
        }
        write_json(self.folder / INDEX_NAME, index)


def make_folder(folder: Path) -> None:
    """Make a folder for samples, if there is none."""
    with raising(OutputError, f"{folder}: cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)


def write_json(path: Path, content: object) -> None:
    """Write a small file, which appears at once or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with raising(OutputError, f"{path}: cannot be written"):
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)


def open_data(folder: Path, width: int) -> list[Sample]:
    """The samples of a folder, mapped from their files.

    FormatError if a shard is missing, differs from its checksum, or has states of another width.
    """
    samples: list[Sample] = []
    for shard in _read_index(folder)[2]:
        path = folder / Path(shard.name).name
        if not path.is_file() or _sha256(path) != shard.sha256:
            found = "other bytes" if path.is_file() else "no such file"
            raise FormatError(
                f"{path}: expected the shard that {INDEX_NAME} describes, found {found}; remove "
                f"{folder} to collect again"
            )
        samples += _read_shard(path, width)
    return samples


def remove_data(folder: Path, *others: str) -> None:
    """Remove the files of a folder of samples.

    others: names of more files to remove.
    """
    for path in [*folder.glob("shard-*"), *(folder / name for name in (INDEX_NAME, *others))]:
        path.unlink(missing_ok=True)


def split_data(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Samples to train on, and held-out ones; RequestError if either is missing."""
    train = [sample for sample in samples if not sample.held_out]
    held = [s for s in samples if s.held_out and len(s) > s.start + 2]
    if not train or not held:
        raise RequestError(
            f"expected samples to train on and to measure with, found {len(train)} and "
            f"{len(held)}; give more text, or a smaller --length"
        )
    return train, held


def _read_index(folder: Path) -> tuple[dict[str, Any], bool, list[_Shard]]:
    """(key, finished, shards) of a folder's index."""
    path = folder / INDEX_NAME
    try:
        index = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(index, dict) or index.get("format") != _FORMAT:
            raise ValueError(f"not of format {_FORMAT}")
        key, finished, shards = index.get("key"), index.get("finished"), index.get("shards")
        if not (isinstance(key, dict) and isinstance(finished, bool) and isinstance(shards, list)):
            raise ValueError("key, finished or shards is missing or of another type")
        return key, finished, [_shard(entry) for entry in shards]
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise FormatError(
            f"{path}: expected an index of collected states ({error}); remove {folder} to collect "
            "again"
        ) from None


def _shard(entry: object) -> _Shard:
    """ValueError for an entry with other fields, or with values of other types."""
    types = {field.name: field.type for field in fields(_Shard)}
    found = {n: type(v) for n, v in entry.items()} if isinstance(entry, dict) else {}
    if found != types:
        raise ValueError(f"a shard has the fields {sorted(found)}, or values of other types")
    return _Shard(**cast("dict[str, Any]", entry))


def _read_shard(path: Path, width: int) -> Iterator[Sample]:
    file = open_weights(path)
    file.source.close()
    arrays = {}
    for name, dtype in _DTYPES.items():
        tensor = file.tensors.get(name)
        if tensor is None or tensor.nbytes != np.dtype(dtype).itemsize * _count(tensor.shape):
            raise FormatError(f"{path}: expected {name} as {dtype}, found another tensor or none")
        arrays[name] = np.memmap(path, dtype, "r", tensor.offset, tensor.shape)
    hidden, sequences = arrays["hidden"], arrays["sequences"]
    tokens = len(arrays["tokens"])
    if hidden.shape != (tokens, width) or sequences.shape[1:] != (3,):
        raise FormatError(f"{path}: expected states of width {width}, found {list(hidden.shape)}")
    lengths, starts = sequences[:, 0], sequences[:, 1]
    whole = len(lengths) and lengths.min() > 0 and lengths.sum(dtype=np.int64) == tokens
    if not whole or starts.min() < 0 or (starts >= lengths).any():
        raise FormatError(f"{path}: expected sequences that cover its {tokens} tokens")
    if arrays["tokens"].min() < 0:
        raise FormatError(f"{path}: expected token ids from 0, found a negative one")
    at = 0
    for length, start, held_out in sequences.tolist():
        end = at + length
        yield Sample(arrays["tokens"][at:end], hidden[at:end], start, bool(held_out))
        at = end


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()
