"""A folder of session files, bounded in size, which several processes may share.

A file is written under a hidden name and renamed, and may vanish at any moment. Its modification
time says when it was last used.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import MtpGgufError, OutputError, raising
from mtp_gguf.gguf_tools.files.output import remove_leftovers
from mtp_gguf.gguf_tools.machine import os_files

from .session_file import SessionHeader, is_session, read_tokens, write_session

SUFFIX = ".session"
_LOCK = ".lock"
_HEADER_BYTES = 1 << 16  # more than a header without `extra` has


@dataclass(frozen=True)
class Match:
    """A session that shares its first `length` tokens with a prompt."""

    path: Path
    length: int


def shared_length(first: Sequence[int] | NDArray[Any], second: Sequence[int] | NDArray[Any]) -> int:
    """Return the number of tokens that two texts have in common at their beginning."""
    n = min(len(first), len(second))
    differs = np.flatnonzero(np.asarray(first[:n]) != np.asarray(second[:n]))
    return int(differs[0]) if len(differs) else n


class SessionFolder:
    """Session files by their tokens; the least recently used are removed if there are too many.

    path: created, readable by its user only, if it does not exist; OutputError if that fails.
    size: of all sessions together, in bytes. Files of others, and damaged ones, are left alone.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        with raising(OutputError, f"{path}: cannot be created"):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def find(
        self,
        tokens: Sequence[int],
        fits: Callable[[SessionHeader], bool],
        *,
        more_than: int,
        whole: bool,
    ) -> list[Match]:
        """Return the sessions that spare the most tokens of a prompt, the best first.

        Only headers and tokens are read. fits: whether a session is of the loaded model.
        more_than: shorter matches are of no use. whole: whether a match has all tokens of its
        session, or those of one of its earlier checkpoints, as recurrent models need it. The
        prompt's last token is never part of a match, nor is a picture, whose id means another one
        in each process.
        """
        prompt = list(takewhile(lambda token: token >= 0, tokens[:-1]))
        matches = []
        for path in self._sessions():
            try:
                found = read_tokens(path, lambda h: h.n_tokens > more_than and fits(h))
            except MtpGgufError:
                continue
            if found is None:
                continue
            header, saved = found
            length = shared_length(prompt, saved)
            if whole and length < len(saved):
                length = max((n for n in header.earlier if n <= length), default=0)
            if length > more_than:
                matches.append(Match(path, length))
        return sorted(matches, key=lambda match: match.length, reverse=True)

    def best(self, tokens: Sequence[int], reasons: Mapping[Path, str], *, more_than: int) -> str:
        """Return the reason of the session with the most tokens of a prompt; "" if none has more.

        reasons: why sessions were not loaded, by their paths.
        """
        found = ""
        for path, reason in reasons.items():
            with suppress(MtpGgufError):
                saved = read_tokens(path)
                length = 0 if saved is None else shared_length(tokens, saved[1])
                if length > more_than:
                    more_than, found = length, f"a session has {length} tokens of it: {reason}"
        return found

    def used(self, path: Path) -> None:
        """Note that a session was used, so that others are removed before it."""
        with suppress(OSError):
            os.utime(path)

    def write(
        self,
        tokens: NDArray[np.int32],
        checkpoint: bytes | NDArray[np.uint8],
        identity: Mapping[str, str],
        earlier: Mapping[int, NDArray[np.uint8]] | None = None,
    ) -> Path | None:
        """Write a session, after room is made for it; None if it is larger than the folder may be.

        earlier, and errors: those of `write_session`.
        """
        parts = [checkpoint, *(earlier or {}).values()]
        needed = sum(len(part) for part in parts) + tokens.nbytes + _HEADER_BYTES
        if needed > self.size:
            return None
        path = self._path(tokens, identity)
        with self.locked():
            self._make_room(needed, path)
            write_session(path, tokens, checkpoint, identity, {}, earlier)
        return path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing meanwhile, if the file system has locks."""
        fd = -1
        with suppress(OSError):
            fd = os_files.open_file(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
            os_files.lock(fd, wait=True)
        try:
            yield
        finally:
            if fd >= 0:
                os.close(fd)

    def has(self, tokens: NDArray[np.int32], identity: Mapping[str, str]) -> bool:
        """Whether there is a session of exactly these tokens, which is then noted as used."""
        path = self._path(tokens, identity)
        try:
            read_tokens(path)
        except MtpGgufError:
            return False
        self.used(path)
        return True

    def remove_prefixes(self, tokens: NDArray[np.int32], identity: Mapping[str, str]) -> None:
        """Remove the sessions of the same model that hold only a beginning of these tokens."""
        for path in self._sessions():
            with suppress(MtpGgufError, OSError):
                found = read_tokens(
                    path, lambda h: h.n_tokens < len(tokens) and h.identity == identity
                )
                if found is not None and shared_length(tokens, found[1]) == len(found[1]):
                    path.unlink()

    def _path(self, tokens: NDArray[np.int32], identity: Mapping[str, str]) -> Path:
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
        name.update(np.ascontiguousarray(tokens, "<i4").tobytes())
        return self.path / f"{name.hexdigest()[:32]}{SUFFIX}"

    def _sessions(self) -> list[Path]:
        """Return the paths of session files; others may have the suffix as well."""
        try:
            found = sorted(self.path.iterdir())
        except OSError:
            return []
        return [path for path in found if path.suffix == SUFFIX and path.is_file()]

    def _make_room(self, needed: int, path: Path) -> None:
        """Remove the least recently used sessions until `needed` bytes fit, besides `path`."""
        with suppress(OSError):
            remove_leftovers(self.path, rf".*{SUFFIX}", besides=None)
        files = []
        for other in self._sessions():
            with suppress(OSError):
                state = other.stat()
                if other != path and is_session(other):
                    files.append((state.st_mtime_ns, state.st_size, other))
        total = needed + sum(size for _, size, _ in files)
        for _, size, other in sorted(files):
            if total <= self.size:
                break
            with suppress(OSError):
                other.unlink()
            total -= size
