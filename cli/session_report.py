"""What `mtp-gguf doctor` says of a session file."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mtp_gguf.gguf_tools.machine.text import human_bytes, printable
from mtp_gguf.native.sessions.session_file import EARLIER, SessionHeader


def fields(header: SessionHeader) -> dict[str, Any]:
    """Return the report for --json, without the texts that the program added."""
    return {
        "path": str(header.path),
        "kind": "session",
        "bytes": header.nbytes,
        "tokens": header.n_tokens,
        "identity": header.identity,
        "extra": sorted(header.extra),
        "owner": header.owner,
        "earlier": list(header.earlier),
        "sections": [asdict(section) for section in header.sections],
    }


def lines(header: SessionHeader) -> Iterator[str]:
    """Yield the report."""
    yield f"{header.path}: a session of {header.n_tokens} tokens, {human_bytes(header.nbytes)}"
    for name, value in header.identity.items():
        yield printable(f"{name}: {value}")
    if header.owner:
        yield f"owner: {header.owner:016x}"
    for section in header.sections:
        of = f" ({section.n_tokens} tokens)" if section.name == EARLIER else ""
        yield (
            f"{section.name}{of}: {human_bytes(section.nbytes)} @ {section.offset}, "
            f"checksum {section.checksum:08x} holds"
        )
