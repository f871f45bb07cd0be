"""Files that hold a session: its tokens, and the checkpoint of what the model has computed.

docs/sessions.md describes the bytes. Nothing here needs llama.cpp.
"""

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import FormatError, RequestError
from mtp_gguf.gguf_tools.output import OutputFile, check_output
from mtp_gguf.gguf_tools.sources import FileSource

MAGIC = b"mtpsess\0"
VERSION = 1
ALIGNMENT = 64  # of sections, in bytes
TOKENS, CHECKPOINT, EARLIER = "tokens", "checkpoint", "earlier"
_SECTIONS = [TOKENS, CHECKPOINT]  # in the order of the file; those of earlier checkpoints follow
# Those of llama-server (native/server/session_folder.h), whose tokens are in a form of its own.
_SERVER_SECTIONS = [TOKENS, "slot"]

# Magic, version, checksum of the header, bytes of the JSON, bytes of the file.
_PREFIX = struct.Struct("<8sIIQQ")
_LARGEST_JSON = 64 << 20
_MOST_LEVELS = 256  # of the JSON; llama-server's reader has the same bound
_LARGEST_TEXT = 1 << 24  # tokens, as in a checkpoint
_MOST_EARLIER = 1024
_BLOCK = 256 << 10  # bytes that are read at once, and still in the CPU's cache for the checksum


@dataclass(frozen=True)
class Section:
    """A part of the file. checksum: the CRC-32 of its bytes."""

    name: str
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True)
class SessionHeader:
    """What a file says of itself, before its sections are read.

    identity: the model and the settings of its context, by name. extra: what the program that saved
    it added. earlier: how many of the tokens each earlier checkpoint has, the shortest first.
    """

    path: Path
    nbytes: int
    n_tokens: int
    identity: dict[str, Any]
    extra: dict[str, Any]
    sections: tuple[Section, ...]
    earlier: tuple[int, ...]

    @property
    def is_of_server(self) -> bool:
        """Whether llama-server wrote it, not `MTPLlama`."""
        return self.sections[1].name != CHECKPOINT


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
    identity: Mapping[str, Any],
    extra: Mapping[str, Any],
    earlier: Mapping[int, bytes | NDArray[np.uint8]] | None = None,
) -> None:
    """Write a session file, which appears under its name only when it is complete.

    earlier: checkpoints of a beginning of the tokens by their length, the shortest first.
    Raises OutputError if it cannot be written, which leaves an older file as it was, and
    RequestError if `extra` has values that JSON lacks.
    """
    check_output(path, [], overwrite=True)
    earlier = earlier or {}
    arrays = [np.ascontiguousarray(tokens, "<i4"), checkpoint, *earlier.values()]
    contents = [np.frombuffer(array, np.uint8).data for array in arrays]
    names = _section_names(len(earlier))
    sums = [zlib.crc32(data) for data in contents]

    def layout(start: int) -> list[Section]:
        sections = []
        for name, data, checksum in zip(names, contents, sums, strict=True):
            start = _aligned(start)
            sections.append(Section(name, start, len(data), checksum))
            start += len(data)
        return sections

    def header(sections: list[Section]) -> bytes:
        fields = {
            "n_tokens": len(tokens),
            "identity": dict(identity),
            "extra": dict(extra),
            "sections": [vars(section) for section in sections],
        }
        if earlier:
            fields["earlier"] = list(earlier)
        return json.dumps(fields, allow_nan=False).encode()

    try:
        # The offsets are part of the JSON, whose length they depend on: leave room for 20 digits.
        room = len(header(layout(0))) + 20 * len(contents)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{path}: extra: expected what JSON can hold, found: {error}") from None
    if _is_deeper(dict(extra), _MOST_LEVELS - 1):
        raise RequestError(f"{path}: extra: expected {_MOST_LEVELS - 1} levels at most, found more")
    if room > _LARGEST_JSON:
        raise RequestError(f"{path}: extra: expected at most {_LARGEST_JSON} bytes, found {room}")
    sections = layout(_PREFIX.size + room)
    text = header(sections).ljust(room)
    size = sections[-1].offset + sections[-1].nbytes
    with OutputFile(path, size) as out:
        out.write(0, _prefix(text, size) + text)
        for section, data in zip(sections, contents, strict=True):
            out.write(section.offset, data)
        out.commit()


def read_header(path: Path) -> SessionHeader:
    """Read what a session file holds, without its sections.

    FormatError says why the file cannot be read, or which of its bytes are not as docs/sessions.md
    describes them.
    """
    with closing(FileSource(path)) as source:
        return _header(path, source)


def read_tokens(
    path: Path, wanted: Callable[[SessionHeader], bool] = lambda _: True
) -> tuple[SessionHeader, NDArray[np.int32]] | None:
    """Read the header and the tokens only; errors as those of `read_header`.

    wanted: if it returns False for the header, no token is read, and None is returned.
    """
    with closing(FileSource(path)) as source:
        header = _header(path, source)
        if not wanted(header):
            return None
        _check_ours(header)
        return header, _tokens(_read_section(path, source, header.sections[0]))


def read_session(
    path: Path, check: Callable[[SessionHeader], None] = lambda _: None
) -> SavedSession:
    """Read a session file and check its bytes; errors as those of `read_header`.

    check: called with the header before the sections are read; it may raise an error of its own.
    """
    with closing(FileSource(path)) as source:
        header = _header(path, source)
        _check_ours(header)
        check(header)
        tokens, checkpoint, *earlier = _read_sections(path, source, header)
    return SavedSession(header, _tokens(tokens), checkpoint, tuple(earlier))


def check_session(path: Path) -> SessionHeader:
    """Read all of a session file, ours or llama-server's; errors as those of `read_header`."""
    with closing(FileSource(path)) as source:
        header = _header(path, source)
        _read_sections(path, source, header)
    return header


def _check_ours(header: SessionHeader) -> None:
    if header.is_of_server:
        raise FormatError(
            f"{header.path}: expected a session of MTPLlama, found one of llama-server; "
            "mtp-gguf serve --session-dir reads it"
        )


def _tokens(data: NDArray[np.uint8]) -> NDArray[np.int32]:
    return data.view("<i4").astype(np.int32)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _prefix(text: bytes, size: int) -> bytes:
    """Return what comes before the JSON; its checksum covers both, with itself as 0."""
    unsummed = _PREFIX.pack(MAGIC, VERSION, 0, len(text), size)
    return _PREFIX.pack(MAGIC, VERSION, zlib.crc32(text, zlib.crc32(unsummed)), len(text), size)


def _header(path: Path, source: FileSource) -> SessionHeader:
    size = source.size
    raw = source.read(0, min(_PREFIX.size, size))
    if raw[: len(MAGIC)] != MAGIC:
        raise FormatError(f"{path}: expected a session file, found other data")
    if len(raw) < _PREFIX.size:
        raise FormatError(f"{path}: expected {_PREFIX.size} bytes or more, found {len(raw)}")
    _, version, checksum, length, claimed = _PREFIX.unpack(raw)
    if version != VERSION:
        raise FormatError(f"{path}: version: expected {VERSION}, found {version}; save it anew")
    if claimed != size:
        raise FormatError(f"{path}: expected {claimed} bytes, found {size}")
    if length > min(_LARGEST_JSON, size - _PREFIX.size):
        most = min(_LARGEST_JSON, size - _PREFIX.size)
        raise FormatError(f"{path}: header: expected at most {most} bytes, found {length}")
    text = source.read(_PREFIX.size, length)
    if raw != _prefix(text, size):
        raise FormatError(
            f"{path}: header: expected checksum {checksum:08x}, found that of other bytes"
        )
    return _parsed(path, text, size)


def _parsed(path: Path, text: bytes, size: int) -> SessionHeader:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise FormatError(f"{path}: header: expected JSON, found something else") from None
    if not isinstance(fields, dict):
        raise FormatError(f"{path}: header: expected an object, found something else")
    if _is_deeper(fields, _MOST_LEVELS):
        raise FormatError(f"{path}: header: expected {_MOST_LEVELS} levels at most, found more")
    n_tokens = _integer(path, fields, "n_tokens", 1, _LARGEST_TEXT)
    for name in ("identity", "extra"):
        if not isinstance(fields.get(name), dict):
            raise FormatError(f"{path}: {name}: expected an object, found something else")
    listed: Any = fields.get("sections")
    names = []
    if isinstance(listed, list):
        names = [section.get("name") for section in listed if isinstance(section, dict)]
    earlier = _lengths_of_earlier(path, fields.get("earlier", []), n_tokens)
    ours = _section_names(len(earlier))
    if names not in (ours, _SERVER_SECTIONS) or len(listed) != len(names):
        raise FormatError(f"{path}: sections: expected {', '.join(ours)}, found others")
    sections = tuple(
        Section(
            section["name"],
            _integer(path, section, "offset", 0, size),
            _integer(path, section, "nbytes", 1, size),
            _integer(path, section, "checksum", 0, 2**32 - 1),
        )
        for section in listed
    )
    ends = [_PREFIX.size + len(text), *(s.offset + s.nbytes for s in sections)]
    for section, end in zip(sections, ends, strict=False):
        if section.offset != _aligned(end):
            raise FormatError(
                f"{path}: {section.name}: expected offset {_aligned(end)}, found {section.offset}"
            )
    if ends[-1] != size:
        raise FormatError(f"{path}: {names[-1]}: expected its end at {size}, found {ends[-1]}")
    if names == ours and sections[0].nbytes != 4 * n_tokens:
        raise FormatError(
            f"{path}: tokens: expected {4 * n_tokens} bytes, found {sections[0].nbytes}"
        )
    identity, extra = fields["identity"], fields["extra"]
    return SessionHeader(path, size, n_tokens, identity, extra, sections, earlier)


def _is_deeper(value: Any, most: int) -> bool:
    """Whether objects and lists are nested in more than `most` levels."""
    level = [value]
    for _ in range(most):
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
        level = [v for v in level if isinstance(v, dict | list | tuple)]
    return bool(level)


def _section_names(n_earlier: int) -> list[str]:
    return [*_SECTIONS, *[EARLIER] * n_earlier]


def _lengths_of_earlier(path: Path, found: Any, n_tokens: int) -> tuple[int, ...]:
    """Check the number of tokens of each earlier checkpoint."""
    fault = FormatError(
        f"{path}: earlier: expected at most {_MOST_EARLIER} rising numbers from 1 to {n_tokens}, "
        "found others"
    )
    if not isinstance(found, list) or len(found) > _MOST_EARLIER:
        raise fault
    before = 0
    for length in found:
        if type(length) is not int or not before < length <= n_tokens:
            raise fault
        before = length
    return tuple(found)


def _integer(path: Path, fields: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        found = value if type(value) is int and abs(value) < 2**64 else "something else"
        raise FormatError(f"{path}: {name}: expected {least} to {most}, found {found}")
    return value


def _read_sections(
    path: Path, source: FileSource, header: SessionHeader
) -> list[NDArray[np.uint8]]:
    # A file is never written to; its time changes while others use it, which harms nobody.
    return [_read_section(path, source, section) for section in header.sections]


def _read_section(path: Path, source: FileSource, section: Section) -> NDArray[np.uint8]:
    """Read a section; what is between sections has no meaning."""
    data = np.empty(section.nbytes, np.uint8)
    checksum = 0
    for start in range(0, section.nbytes, _BLOCK):
        block = data[start : start + _BLOCK].data
        source.read_into(section.offset + start, block)
        checksum = zlib.crc32(block, checksum)
    if checksum != section.checksum:
        raise FormatError(
            f"{path}: {section.name}: expected checksum {section.checksum:08x}, found that of "
            "other bytes; the file is damaged"
        )
    return data
