"""Session files as their parts, and put together again, independent of the project's writer.

The layout is that of docs/sessions.md; a forger has the right checksum of the header, too.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Prompts that are long enough to be kept.
PROMPT = [5 + n * n % 200 for n in range(600)]
OTHER = [7 + n * 3 % 150 for n in range(400)]
_START = struct.Struct("<8sIIQ6IQQ")
_SECTION = struct.Struct("<QQII")
NUMBERS = ("nbytes", "header", "program", "n_tokens", "sections", "fields", "extra", "owner")


@dataclass
class SessionFile:
    """Its numbers by the names of NUMBERS, its sections, the fields of its identity, and the rest.

    numbers: those that differ from what the other members say. body: what follows the header.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    sections: list[list[int]] = field(default_factory=list)  # offset, nbytes, checksum, n_tokens
    identity: list[tuple[bytes, bytes]] = field(default_factory=list)
    extra: bytes = b"{}"
    body: bytes = b""
    version: int = 2
    reserved: int = 0

    def data(self) -> bytes:
        """Return the bytes, with the checksum of the header."""
        parts = [_SECTION.pack(*section) for section in self.sections]
        for name, value in self.identity:
            parts += [struct.pack("<HH", len(name), len(value)), name, value]
        rest = b"".join([*parts, self.extra])
        size = _START.size + len(rest)
        numbers: dict[str, Any] = {
            "nbytes": size + len(self.body),
            "header": size,
            "program": 1,
            "n_tokens": 1,
            "sections": len(self.sections),
            "fields": len(self.identity),
            "extra": len(self.extra),
            "owner": 0,
        } | self.numbers
        in_order = (numbers[name] for name in NUMBERS)
        start = _START.pack(b"mtpsess\0", self.version, 0, *in_order, self.reserved)
        return with_checksum(start + rest + self.body)

    def with_header(self, **changes: Any) -> SessionFile:
        """Return it with other fields or another `extra`, and its sections moved accordingly."""
        begin = len(replace(self, body=b"").data())
        other = replace(self, **changes)
        end = other_begin = len(replace(other, body=b"").data())
        sections, body = [], b""
        for offset, nbytes, *rest in self.sections:
            content = self.body[offset - begin : offset - begin + nbytes]
            body += bytes(-end % 64) + content
            sections.append([other_begin + len(body) - nbytes, nbytes, *rest])
            end = other_begin + len(body)
        return replace(other, sections=sections, body=body)


def with_checksum(data: bytes) -> bytes:
    """Return a file with the checksum that its header, of the size that it says, should have."""
    (size,) = struct.unpack_from("<I", data, 24)
    unsummed = data[:12] + bytes(4) + data[16:]
    return data[:12] + struct.pack("<I", zlib.crc32(unsummed[:size])) + data[16:]


def parse_session(data: bytes) -> SessionFile:
    """Return the parts of a whole file."""
    _, version, _, *numbers = _START.unpack_from(data)
    found = dict(zip(NUMBERS, numbers, strict=False))
    at = _START.size
    sections = []
    for _ in range(found["sections"]):
        sections.append(list(_SECTION.unpack_from(data, at)))
        at += _SECTION.size
    identity = []
    for _ in range(found["fields"]):
        name, value = struct.unpack_from("<HH", data, at)
        at += 4
        identity.append((data[at : at + name], data[at + name : at + name + value]))
        at += name + value
    extra = data[at : found["header"]]
    kept = {name: found[name] for name in ("program", "n_tokens", "owner")}
    return SessionFile(kept, sections, identity, extra, data[found["header"] :], version)


def write_twin(model: Path, twin: Path) -> Path:
    """Write a model with other weights of the same shape and size."""
    data = model.read_bytes()
    quarter = len(data) // 4
    twin.write_bytes(data[:-quarter] + bytes(byte ^ 1 for byte in data[-quarter:]))
    return twin


def version_1(header: bytes) -> bytes:
    """Return a file of version 1, with right checksums, whose header is this JSON."""
    prefix = struct.pack("<8sIIQQ", b"mtpsess\0", 1, 0, len(header), 32 + len(header))
    checksum = zlib.crc32(header, zlib.crc32(prefix))
    return prefix[:12] + struct.pack("<I", checksum) + prefix[16:] + header
