"""Reads safetensors headers strictly, without reading the tensor data.

A file is: u64 header length, little-endian | the header, JSON | tensor data. The header maps names
to {"dtype", "shape", "data_offsets": [begin, end]}, with offsets from the end of the header;
`__metadata__` maps strings to strings. Tensors cover the data without holes or overlaps. The
reader rejects anything else instead of skipping it.
"""

import re
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import FormatError
from ..hub.sources import FileSource, Source, closed_on_failure, ggufs_in
from ..machine.shell import quoted
from ..machine.text import first_of
from .json_text import parse_json

# The limit of the reference implementation (MAX_HEADER_SIZE in safetensors' tensor.rs).
MAX_HEADER_BYTES = 100_000_000

DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}

# The index of a sharded checkpoint, the names of weight files, and the pattern of shard numbers.
INDEX_NAME = "model.safetensors.index.json"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
WEIGHT_PATTERNS = ("model*.safetensors", "mtp.safetensors")
TORCH_PATTERN = "pytorch_model*.bin"
_HQQ_NAME = "qmodel.pt"  # what the package hqq writes
# Names under which weights are read, by the suffixes of others; and suffixes of what is not read.
_RENAMED = {".safetensors": "model.safetensors"}
_RENAMED |= dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), "pytorch_model.bin")
_OTHER_PROGRAMS = (".h5", ".msgpack", ".npz", ".onnx", ".ot")

# How refusals end: what to convert instead.
FROM_ORIGINAL = "convert from the original 16-bit checkpoint: mtp-gguf convert OWNER/NAME"
MERGE_ADAPTER = (
    'python -c "from peft import AutoPeftModelForCausalLM as M; '
    "M.from_pretrained('FOLDER').merge_and_unload().save_pretrained('MERGED')\", with the "
    "tokenizer's files beside it"
)
_SHARD_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.(safetensors|bin)")

_FIELDS = ("dtype", "shape", "data_offsets")
_SHOWN = 80  # characters of a foreign value in a message


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    `shape` has the outermost dimension first; `offset` counts from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """The header of a safetensors file: tensors by name, in the order of their data."""

    source: Source
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def is_weight_file(name: str) -> bool:
    """Whether a file of this name has weights of a checkpoint without an index."""
    return any(fnmatch(name, pattern) for pattern in WEIGHT_PATTERNS)


def weight_files(folder: Path) -> list[str]:
    """Names of the files that hold the weights of a checkpoint without an index.

    These are `model*.safetensors` and a separate head in `mtp.safetensors`, or, if there are none,
    `pytorch_model*.bin`.
    """
    names = {p.name for pattern in WEIGHT_PATTERNS for p in folder.glob(pattern)}
    return sorted(names or {p.name for p in folder.glob(TORCH_PATTERN)})


def no_weights(folder: Path) -> str:
    """An error message for a folder without supported weights: what it contains instead."""
    others = sorted(p for p in folder.iterdir() if p.suffix in (*_RENAMED, *_OTHER_PROGRAMS))
    found = unmerged(folder) or (_only(others[0]) if others else f"none{ggufs_in(folder)}")
    return f"{folder}: expected model.safetensors or {INDEX_NAME} with its shards, found {found}"


def _only(path: Path) -> str:
    if (name := _RENAMED.get(path.suffix)) is None:
        return f"only {path.name}; {FROM_ORIGINAL}"
    command = f"mv {quoted(path)} {quoted(path.with_name(name))}"
    return f"only {path.name}; if it has the weights of the whole model: {command}"


def unmerged(folder: Path) -> str | None:
    """Names weights that another tool must merge or convert, and the step; None without any."""
    if any(folder.glob("adapter_model.*")):
        return f"a LoRA adapter; merge it into its model first: {MERGE_ADAPTER}"
    if (folder / _HQQ_NAME).exists():
        return f"{_HQQ_NAME}, weights in HQQ; {FROM_ORIGINAL}"
    if _found(folder, "*zero_pp_rank_*") or _found(folder, "mp_rank_*_model_states.pt"):
        script = quoted(folder / "zero_to_fp32.py")
        return (
            "a checkpoint of DeepSpeed; merge it first with the script in it: "
            f"python {script} {quoted(folder)} {quoted(folder)} --safe_serialization"
        )
    if distributed := _found(folder, "*.distcp"):
        return (
            "a distributed checkpoint of PyTorch (.distcp); merge it first: "
            f"accelerate merge-weights {quoted(distributed.parent)} {quoted(folder)}"
        )
    return None


def _found(folder: Path, pattern: str) -> Path | None:
    """A file of this pattern in the folder or in one of its folders."""
    return next((path for at in (pattern, f"*/{pattern}") for path in folder.glob(at)), None)


def checkpoint_files(folder: Path) -> list[Path]:
    """The weight files of `folder`: those that its index names, or else those that exist.

    FormatError if there are none, or if one is missing according to the index or the numbering.
    """
    present = {p.name for p in (*folder.glob("*.safetensors"), *folder.glob(TORCH_PATTERN))}
    if not present:
        raise FormatError(no_weights(folder))
    named = _indexed(folder / INDEX_NAME) or set(weight_files(folder)) or present
    if all(name.endswith(".bin") for name in named):
        named = _indexed(folder / TORCH_INDEX_NAME) or named
    wanted = set(named)
    for match in filter(None, map(_SHARD_NAME.fullmatch, named)):
        count, suffix = match[3], match[4]
        wanted |= {f"{match[1]}-{i:05}-of-{count}.{suffix}" for i in range(1, int(count) + 1)}
    if missing := [*map(repr, sorted(wanted - present))]:
        raise FormatError(f"{folder}: expected {len(wanted)} files, {first_of(missing)} missing")
    return [folder / name for name in sorted(wanted)]


def _indexed(path: Path) -> set[str] | None:
    """The files that an index names; None if there is no index."""
    try:
        weight_map = parse_json(path.read_text(encoding="utf-8"))["weight_map"]
        return set(map(str, weight_map.values()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{path}: expected a JSON object whose weight_map has file names, found: {error!r}"
        ) from None


def open_safetensors(path: Path) -> SafetensorsFile:
    """Read the header of the file at `path`; the file stays open for reads of its data."""
    source = FileSource(path)
    with closed_on_failure(source):
        return read_safetensors(source)


def read_safetensors(source: Source) -> SafetensorsFile:
    """Read and check the header of `source`; FormatError names what is wrong."""
    if source.size < 8:
        raise FormatError(
            f"{source.name}: header length: expected 8 bytes, found a file of {source.size}"
        )
    length = int.from_bytes(source.read(0, 8), "little")
    limit = min(MAX_HEADER_BYTES, source.size - 8)
    if not 2 <= length <= limit:
        raise FormatError(
            f"{source.name}: header length: expected 2 to {limit} bytes, found {length}"
        )
    header = _parse_json(source, length)
    start = 8 + length
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(map(_is_text, (*notes, *notes.values()))):
        raise FormatError(
            f"{source.name}: __metadata__: expected strings by name, found {_shown(notes)}"
        )
    tensors = [_check_entry(source, name, entry, start) for name, entry in header.items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    position = start
    for tensor in tensors:
        if tensor.offset != position:
            raise FormatError(
                f"{source.name}: data_offsets of {_shown(tensor.name)}: expected to begin at "
                f"{position - start}, found {tensor.offset - start} "
                f"({'overlap' if tensor.offset < position else 'hole'})"
            )
        position += tensor.nbytes
    if position != source.size:
        cut = "truncated, as by a download that was cut; fetch it again"
        raise FormatError(
            f"{source.name}: expected a file of {position} bytes by its header, "
            f"found {source.size} bytes ({cut if position > source.size else 'extra data'})"
        )
    return SafetensorsFile(source, {t.name: t for t in tensors}, notes)


def _parse_json(source: Source, length: int) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        held = dict(pairs)
        if len(held) != len(pairs):
            name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise FormatError(f"{source.name}: header: {_shown(name)} occurs twice")
        return held

    data = source.read(8, length)
    if data[:1] != b"{":
        raise FormatError(f"{source.name}: header: expected '{{' first, found {data[:1]!r}")
    try:
        header: dict[str, Any] = parse_json(data.decode(), object_pairs_hook=unique)
    except ValueError as error:
        raise FormatError(f"{source.name}: header: expected JSON, found: {error}") from None
    return header


def _check_entry(source: Source, name: str, entry: Any, start: int) -> StoredTensor:
    where = f"{source.name}: tensor {_shown(name)}"
    if not _is_text(name):
        raise FormatError(f"{where}: expected a name in UTF-8, found half a surrogate pair")
    if not isinstance(entry, dict) or sorted(entry) != sorted(_FIELDS):
        raise FormatError(f"{where}: expected dtype, shape and data_offsets, found {_shown(entry)}")
    dtype, shape, offsets = (entry[field] for field in _FIELDS)
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError(
            f"{where}: dtype: expected one of {', '.join(DTYPE_BITS)}, found {_shown(dtype)}"
        )
    if not isinstance(shape, list) or not _are_sizes(shape):
        raise FormatError(f"{where}: shape: expected whole numbers from 0, found {_shown(shape)}")
    if (
        not isinstance(offsets, list)
        or not _are_sizes(offsets)
        or len(offsets) != 2
        or offsets[0] > offsets[1]
    ):
        raise FormatError(f"{where}: data_offsets: expected [begin, end], found {_shown(offsets)}")
    bits = _product(shape, DTYPE_BITS[dtype])
    if bits is None:
        raise FormatError(f"{where}: shape: expected fewer than 2^64 bits, found {_shown(shape)}")
    nbytes, odd_bits = divmod(bits, 8)
    if odd_bits:
        raise FormatError(f"{where}: shape: expected whole bytes, found {_shown(shape)} of {dtype}")
    if offsets[1] - offsets[0] != nbytes:
        raise FormatError(
            f"{where}: data_offsets: expected {nbytes} bytes for {dtype} {_shown(shape)}, "
            f"found {offsets[1] - offsets[0]}"
        )
    return StoredTensor(name, dtype, tuple(shape), start + offsets[0], nbytes)


def _are_sizes(values: list[Any]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 63 for v in values)


def _product(shape: list[int], bits: int) -> int | None:
    """Bits of a tensor; None if the product overflows 64 bits, even if a later dimension is 0."""
    for length in shape:
        bits *= length
        if bits >= 1 << 64:
            return None
    return bits


def _is_text(value: object) -> bool:
    """Whether `value` is a string that UTF-8 can encode (without unpaired surrogates)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    """`value` for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
