"""A source of bytes in memory, for the readers."""

from __future__ import annotations

from mtp_gguf.gguf_tools.errors import FormatError


class ByteSource:
    """Bytes in the place of a file; `reads` lists what was asked for as (offset, length)."""

    def __init__(self, data: bytes, name: str = "bytes") -> None:
        self._data = data
        self.name = name
        self.size = len(data)
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        assert offset >= 0
        assert length >= 0
        if offset + length > self.size:
            raise FormatError(f"{self.name}: the source ends at byte {self.size}")
        return self._data[offset : offset + length]

    def close(self) -> None:
        pass
