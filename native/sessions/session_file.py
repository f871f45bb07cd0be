"""Files that hold a session: its tokens, and the checkpoint of what the model has computed.

The reader and the writer of their bytes are those of libmtp (native/src/session_file.h), which
llama-server has, too.
"""

import ctypes
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import FormatError, RequestError
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.files.output import OutputFile, check_output

from .._bindings import SessionField, SessionFileInfo, SessionSection, check, library
from ..errors import ModelRefusedError, NativeError

MAGIC = b"mtpsess\0"
TOKENS, CHECKPOINT, EARLIER = "tokens", "checkpoint", "earlier"
_MTP_LLAMA, _LLAMA_SERVER = 1, 2  # the program that wrote a file
_LARGEST_EXTRA = 64 << 20
_MOST_LEVELS = 255  # of the JSON in `extra`


@dataclass(frozen=True)
class Section:
    """A part of the file. checksum: the CRC-32 of its bytes. n_tokens: that it belongs to."""

    name: str
    offset: int
    nbytes: int
    checksum: int
    n_tokens: int


@dataclass(frozen=True)
class SessionHeader:
    """What a file says of itself, before its sections are read.

    identity: the model and the settings of its context, by name. extra: what the program that saved
    it added. sections: the tokens, the state of all, then earlier checkpoints, the shortest first.
    owner: whose conversation it is, in llama-server with several API keys; 0: everybody's.
    """

    path: Path
    nbytes: int
    n_tokens: int
    identity: dict[str, str]
    extra: dict[str, Any]
    sections: tuple[Section, ...]
    is_of_server: bool
    owner: int

    @property
    def earlier(self) -> tuple[int, ...]:
        """The number of tokens of each earlier checkpoint."""
        return tuple(section.n_tokens for section in self.sections[2:])


@dataclass(frozen=True)
class SavedSession:
    """A session as it was saved.

    tokens: ids; the positions of a picture have a negative one, each picture another. checkpoint,
    earlier: the bytes for `Checkpoint.from_bytes`, of the kinds WHOLE and HOST.
    """

    header: SessionHeader
    tokens: NDArray[np.int32]
    checkpoint: NDArray[np.uint8]
    earlier: tuple[NDArray[np.uint8], ...] = ()


def is_session(path: Path) -> bool:
    """Whether a local file begins as a session file does; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def write_session(
    path: Path,
    tokens: NDArray[np.int32],
    checkpoint: bytes | NDArray[np.uint8],
    identity: Mapping[str, str],
    extra: Mapping[str, Any],
    earlier: Mapping[int, bytes | NDArray[np.uint8]] | None = None,
) -> None:
    """Write a session file, which appears under its name only when it is complete.

    identity: names and values of printable ASCII. earlier: checkpoints of a beginning of the tokens
    by their length, the shortest first.
    Raises OutputError if it cannot be written, which leaves an older file as it was, and
    RequestError if `extra` has values that JSON lacks, or if a reader would refuse the header.
    """
    check_output(path, [], overwrite=True)
    earlier = earlier or {}
    arrays = [np.ascontiguousarray(tokens, "<i4"), checkpoint, *earlier.values()]
    contents = [np.frombuffer(array, np.uint8).data for array in arrays]
    lengths = [len(tokens), len(tokens), *earlier]
    sections = (SessionSection * len(contents))(
        *(
            SessionSection(nbytes=len(data), checksum=zlib.crc32(data), n_tokens=length)
            for data, length in zip(contents, lengths, strict=True)
        )
    )
    text = _encoded(path, dict(extra))
    fields = (SessionField * len(identity))(
        *(SessionField(name.encode(), value.encode()) for name, value in identity.items())
    )
    info = SessionFileInfo(
        program=_MTP_LLAMA,
        n_tokens=len(tokens),
        n_sections=len(sections),
        n_fields=len(fields),
        extra=ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p),
        n_extra=len(text),
    )
    size = ctypes.c_size_t()

    def header(out: "ctypes.Array[ctypes.c_char] | None", n: int) -> None:
        lib, place = library(), os.fsencode(path)
        try:
            check(lib.mtp_session_file_header(place, info, sections, fields, out, n, size))
        except NativeError as error:
            raise RequestError(str(error)) from None

    header(None, 0)
    data = ctypes.create_string_buffer(size.value)
    header(data, size.value)
    with OutputFile(path, sections[-1].offset + sections[-1].nbytes) as out:
        out.write(0, data.raw)
        for section, content in zip(sections, contents, strict=True):
            out.write(section.offset, content)
        out.commit()


def read_header(path: Path) -> SessionHeader:
    """Read what a session file holds, without its sections.

    FormatError says why the file cannot be read, or which of its bytes are not as docs/sessions.md
    describes them.
    """
    with _opened(path) as file:
        return file.header


def read_tokens(
    path: Path, wanted: Callable[[SessionHeader], bool] = lambda _: True
) -> tuple[SessionHeader, NDArray[np.int32]] | None:
    """Read the header and the tokens only; errors as those of `read_header`.

    wanted: if it returns False for the header, no token is read, and None is returned.
    """
    with _opened(path) as file:
        if not wanted(file.header):
            return None
        _check_ours(file.header)
        return file.header, _tokens(file.read(0))


def read_session(
    path: Path, check: Callable[[SessionHeader], None] = lambda _: None
) -> SavedSession:
    """Read a session file and check its bytes; errors as those of `read_header`.

    check: called with the header before the sections are read; it may raise an error of its own.
    """
    with _opened(path) as file:
        _check_ours(file.header)
        check(file.header)
        tokens, checkpoint, *earlier = map(file.read, range(len(file.header.sections)))
    return SavedSession(file.header, _tokens(tokens), checkpoint, tuple(earlier))


def check_session(path: Path) -> SessionHeader:
    """Check all of a session file, ours or llama-server's; errors as those of `read_header`."""
    with _opened(path) as file:
        for index in range(len(file.header.sections)):
            file.check(index)
        return file.header


class _File:
    """An open file of libmtp, and its header."""

    def __init__(self, path: Path, handle: ctypes.c_void_p) -> None:
        self._handle = handle
        lib = library()
        info, section, field = SessionFileInfo(), SessionSection(), SessionField()
        check(lib.mtp_session_file_get_info(handle, info))
        sections = []
        for index in range(info.n_sections):
            check(lib.mtp_session_file_get_section(handle, index, section))
            numbers = (section.offset, section.nbytes, section.checksum, section.n_tokens)
            sections.append(Section(section.name.decode(), *numbers))
        identity = {}
        for index in range(info.n_fields):
            check(lib.mtp_session_file_get_field(handle, index, field))
            identity[field.name.decode()] = field.value.decode()
        is_of_server = info.program == _LLAMA_SERVER
        text = ctypes.string_at(info.extra, info.n_extra)
        self.header = SessionHeader(
            path=path,
            nbytes=info.nbytes,
            n_tokens=info.n_tokens,
            identity=identity,
            extra={} if is_of_server else _decoded(path, text),
            sections=tuple(sections),
            is_of_server=is_of_server,
            owner=info.owner,
        )

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return the bytes of a section."""
        section = self.header.sections[index]
        try:
            data = np.empty(section.nbytes, np.uint8)
        except MemoryError:
            raise RequestError(
                f"{self.header.path}: {section.name}: needs {section.nbytes} bytes of memory, "
                "which are not free"
            ) from None
        _check(library().mtp_session_file_read(self._handle, index, data.ctypes.data, len(data)))
        return data

    def check(self, index: int) -> None:
        """Check the bytes of a section."""
        _check(library().mtp_session_file_read(self._handle, index, None, 0))


@contextmanager
def _opened(path: Path) -> Iterator[_File]:
    handle = ctypes.c_void_p()
    _check(library().mtp_session_file_open(os.fsencode(path), handle))
    try:
        yield _File(path, handle)
    finally:
        library().mtp_session_file_close(handle)


def _check(status: int) -> None:
    try:
        check(status)
    except ModelRefusedError as error:  # what this class is for other files
        raise FormatError(str(error)) from None


def _check_ours(header: SessionHeader) -> None:
    if header.is_of_server:
        raise FormatError(
            f"{header.path}: expected a session of MTPLlama, found one of llama-server; "
            "mtp-gguf serve --session-dir reads it"
        )


def _tokens(data: NDArray[np.uint8]) -> NDArray[np.int32]:
    return data.view("<i4").astype(np.int32)


def _encoded(path: Path, extra: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(extra, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{path}: extra: expected what JSON can hold, found: {error}") from None
    if _is_deeper(extra):
        raise RequestError(f"{path}: extra: expected {_MOST_LEVELS} levels at most, found more")
    if len(text) > _LARGEST_EXTRA:
        raise RequestError(
            f"{path}: extra: expected at most {_LARGEST_EXTRA} bytes, found {len(text)}"
        )
    return text


def _decoded(path: Path, text: bytes) -> dict[str, Any]:
    try:
        extra = parse_json(text)
    except ValueError:
        raise FormatError(f"{path}: extra: expected JSON, found something else") from None
    if not isinstance(extra, dict):
        raise FormatError(f"{path}: extra: expected an object, found something else")
    if _is_deeper(extra):
        raise FormatError(f"{path}: extra: expected {_MOST_LEVELS} levels at most, found more")
    return extra


def _is_deeper(value: Any) -> bool:
    """Whether objects and lists are nested in more than `_MOST_LEVELS` levels."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
        level = [v for v in level if isinstance(v, dict | list | tuple)]
    return bool(level)
