"""Reads PyTorch `.bin` files (torch.save of a state dict) without torch and without executing them.

A file is a ZIP archive of uncompressed entries: ROOT/data.pkl, a pickle that describes the tensors,
and ROOT/data/KEY, the bytes of each storage. A pickle is a program. This interpreter supports only
the instructions that build dicts, lists, tuples, numbers and text, and recognizes the functions
that rebuild tensors by their names; it imports nothing and calls nothing.
"""

import pickletools
import shlex
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import FormatError
from ..hub.sources import FileSource, closed_on_failure
from .safetensors import DTYPE_BITS, SafetensorsFile, StoredTensor, open_safetensors

MAX_PICKLE_BYTES = 100_000_000  # the limit of a safetensors header
MAX_DIMENSIONS = 64  # as in torch

SUFFIXES = (".safetensors", ".bin")  # of the files that `open_weights` reads

_STORAGES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_DTYPES = {
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.uint16": "U16",
    "torch.uint32": "U32",
    "torch.uint64": "U64",
}
_REWRITE = (
    "import sys, torch, safetensors.torch as s; s.save_file({k: v.clone().contiguous() for k, v in "
    "torch.load(sys.argv[1], weights_only=True).items()}, sys.argv[2])"
)
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, …, length of the name, length of the extra
_SHOWN = 60  # characters of a foreign value in a message


@dataclass(frozen=True)
class _Global:
    """A name that the pickle imports; it is compared but never imported."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """Entry `data/KEY` of the archive; dtype is None if the tensor states it."""

    dtype: str | None
    key: str


@dataclass(frozen=True)
class _View:
    """A view into a storage; `start`, `shape` and `stride` are in elements."""

    storage: _Storage
    dtype: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


_Entries: TypeAlias = dict[str, tuple[int, int]]  # offset and length by name


def open_weights(path: Path) -> SafetensorsFile:
    """Open a weight file according to its suffix: PyTorch's `.bin`, or safetensors."""
    return open_torch_file(path) if path.suffix == ".bin" else open_safetensors(path)


def open_torch_file(path: Path) -> SafetensorsFile:
    """Open a file written by `torch.save`, presenting its tensors like a safetensors file.

    The file stays open for reads of its data. FormatError names what is wrong; if torch may still
    be able to read the file, the message includes a command that rewrites it.
    """
    source = FileSource(path)
    with closed_on_failure(source):
        entries = _stored_entries(source)
        root = _root(source, entries)
        byteorder = entries.get(root + "byteorder")
        if byteorder and source.read(*byteorder) != b"little":
            raise _unreadable(path, "little-endian data", "another byte order")
        tensors = [
            _placed(source, entries, root, name, view)
            for name, view in _state_dict(source, *entries[root + "data.pkl"]).items()
        ]
    return SafetensorsFile(source, {tensor.name: tensor for tensor in tensors}, {})


def _unreadable(path: Path | str, expected: str, found: str) -> FormatError:
    """An error about a file that torch may be able to read, with a command that rewrites it."""
    name = Path(path).with_suffix(".safetensors").name.removeprefix("pytorch_")
    files = shlex.join((str(path), str(Path(path).with_name(name))))
    return FormatError(
        f"{path}: expected {expected}, found {found}; rewrite it with PyTorch: "
        f'python -c "{_REWRITE}" {files}'
    )


def _stored_entries(source: FileSource) -> _Entries:
    """Offset and length of every uncompressed entry of the archive."""
    try:
        with zipfile.ZipFile(source.path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, struct.error):
        raise _unreadable(
            source.name, "a ZIP archive, as torch.save writes since PyTorch 1.6", "none"
        ) from None
    entries: _Entries = {}
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            continue
        start = info.header_offset
        if not 0 <= start <= source.size - _LOCAL_HEADER.size:
            raise FormatError(f"{source.name}: {info.filename!r}: expected inside the file")
        signature, name, extra = _LOCAL_HEADER.unpack(source.read(start, _LOCAL_HEADER.size))
        offset = start + _LOCAL_HEADER.size + name + extra
        if signature != b"PK\3\4" or offset + info.file_size > source.size:
            raise FormatError(f"{source.name}: {info.filename!r:.{_SHOWN}}: the archive is damaged")
        entries[info.filename] = (offset, info.file_size)
    return entries


def _root(source: FileSource, entries: _Entries) -> str:
    """The folder of the archive that contains data.pkl, with a trailing slash."""
    roots = [name[: -len("data.pkl")] for name in entries if name.endswith("/data.pkl")]
    if len(roots) != 1 or entries[roots[0] + "data.pkl"][1] > MAX_PICKLE_BYTES:
        raise _unreadable(source.name, "one data.pkl in the archive", f"{len(roots)}")
    return roots[0]


def _state_dict(source: FileSource, offset: int, length: int) -> dict[str, _View]:
    try:
        content = _unpickled(source.read(offset, length))
    except _ForeignError as error:
        raise _unreadable(source.name, "a state dict of plain tensors", str(error)) from None
    except (ValueError, LookupError, TypeError, OverflowError, AttributeError) as error:
        raise FormatError(
            f"{source.name}: data.pkl: expected a pickle, found: {error!s:.{_SHOWN}}"
        ) from None
    if not isinstance(content, dict):
        raise _unreadable(source.name, "a state dict", type(content).__name__)
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, _View):
            kind = "nothing of the kind" if isinstance(value, _Global) else type(value).__name__
            raise _unreadable(source.name, f"tensors by name, at {name!r:.{_SHOWN}}", kind)
    return content


def _placed(
    source: FileSource, entries: _Entries, root: str, name: str, view: _View
) -> StoredTensor:
    where = f"{source.name}: tensor {name!r:.{_SHOWN}}"
    place = entries.get(f"{root}data/{view.storage.key}")
    if place is None:
        raise FormatError(f"{where}: expected its data in the archive, found none")
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size > 1 and stride != expected:
            raise _unreadable(source.name, f"{name!r:.{_SHOWN}} row by row", "a view of another")
        expected *= size
    item = DTYPE_BITS[view.dtype] // 8
    nbytes, start = expected * item, view.start * item
    if start + nbytes > place[1]:
        raise FormatError(
            f"{where}: expected {start + nbytes} bytes of data for {view.dtype} "
            f"{list(view.shape)!s:.{_SHOWN}}, found {place[1]}"
        )
    return StoredTensor(name, view.dtype, view.shape, place[0] + start, nbytes)


class _ForeignError(Exception):
    """The pickle uses something that is not supported; the text says what."""


def _unpickled(data: bytes) -> Any:
    """The object that a pickle of a state dict builds; _ForeignError for anything else."""
    stack: list[Any] = []
    below: list[list[Any]] = []  # what a mark covers, for each mark
    memo: dict[int, Any] = {}

    def from_mark() -> list[Any]:
        nonlocal stack
        taken, stack = stack, below.pop()
        return taken

    def put_items(items: list[Any]) -> None:
        target = stack[-1]
        if not isinstance(target, dict):
            raise TypeError("items for something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):
                raise _ForeignError(f"a key of type {type(key).__name__}")
            target[key] = value

    for opcode, argument, _ in pickletools.genops(data):
        kind = opcode.name
        if kind in _LITERALS:
            stack.append(argument)
        elif kind in _CONSTANTS:
            stack.append(_CONSTANTS[kind]())
        elif kind == "MARK":
            below.append(stack)
            stack = []
        elif kind == "TUPLE":
            items = from_mark()
            stack.append(tuple(items))
        elif kind in _TUPLES:
            count = _TUPLES[kind]
            stack[-count:] = [tuple(stack[-count:])]
        elif kind in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]  # type: ignore[index]
        elif kind == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif kind in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])  # type: ignore[index]
        elif kind == "GLOBAL":
            stack.append(_Global(".".join(str(argument).split(" "))))
        elif kind == "STACK_GLOBAL":
            module, name = stack[-2:]
            if not isinstance(module, str) or not isinstance(name, str):
                raise TypeError("an import without a name")
            stack[-2:] = [_Global(f"{module}.{name}")]
        elif kind == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif kind == "REDUCE":
            arguments = stack.pop()
            stack.append(_called(stack.pop(), arguments))
        elif kind in ("APPEND", "APPENDS"):
            items = [stack.pop()] if kind == "APPEND" else from_mark()
            stack[-1].extend(items)
        elif kind in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if kind == "SETITEM" else from_mark()
            put_items(items)
        elif kind == "BUILD":
            stack.pop()  # attributes of the dict, which are not needed
        elif kind == "STOP":
            return stack.pop()
        elif kind not in ("PROTO", "FRAME"):
            raise _ForeignError(f"the pickle instruction {kind}")
    raise ValueError("its end is missing")


_LITERALS = (
    *("BININT", "BININT1", "BININT2", "INT", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _storage(reference: Any) -> _Storage:
    """A persistent id: ("storage", storage type, key, device, number of elements)."""
    if isinstance(reference, tuple) and len(reference) == 5 and reference[0] == "storage":
        _, kind, key, _, _ = reference
        if isinstance(kind, _Global) and isinstance(key, str):
            module, _, name = kind.name.rpartition(".")
            if module == "torch" and name in _STORAGES:
                return _Storage(_STORAGES[name], key)
            if kind.name == "torch.storage.UntypedStorage":
                return _Storage(None, key)
            raise _ForeignError(f"{kind.name:.{_SHOWN}}")
    raise _ForeignError("a reference to something else than a storage")


def _called(function: Any, arguments: Any) -> Any:
    """The result of a call that occurs in state dicts; _ForeignError for any other call."""
    name = function.name if isinstance(function, _Global) else type(function).__name__
    if not isinstance(arguments, tuple):
        raise TypeError("a call without arguments")
    if name == "collections.OrderedDict" and not arguments:
        return {}
    if name == "torch.Size" and len(arguments) == 1:
        return arguments[0]
    if name == "torch._utils._rebuild_parameter" and arguments:
        return arguments[0]
    if name == "torch._utils._rebuild_tensor_v2" and len(arguments) >= 4:
        return _view(arguments, None)
    if name == "torch._utils._rebuild_tensor_v3" and len(arguments) >= 7:
        return _view(arguments, arguments[6])
    raise _ForeignError(f"{name:.{_SHOWN}}")


def _view(arguments: tuple[Any, ...], dtype: Any) -> _View:
    storage, start, shape, stride = arguments[:4]
    if not isinstance(storage, _Storage):
        raise TypeError("a tensor without a storage")
    sizes = [start, *shape, *stride]
    whole = all(type(n) is int and 0 <= n < 1 << 63 for n in sizes)
    if not whole or len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
        raise ValueError("a tensor of impossible shape")
    named = _DTYPES.get(dtype.name) if isinstance(dtype, _Global) else storage.dtype
    if named is None:
        raise _ForeignError(f"data of type {getattr(dtype, 'name', 'unknown')}")
    return _View(storage, named, start, tuple(shape), tuple(stride))
