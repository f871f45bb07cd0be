"""Reads remote files ahead of a known sequence of steps, over several connections at once.

Each step names the bytes that it will read. Chunks of the files are fetched in the order in which
steps need them, a window ahead of the steps that have begun, and dropped after their last step.
So each byte is fetched once, and no other ones, and memory stays bounded whatever the size of the
files. A file of which every chunk is read is fetched whole and compared with the SHA-256 that the
hub states.
"""

import threading
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from hashlib import sha256
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias

from ..errors import FormatError, RemoteError
from .remote import CHUNK_BYTES, RemoteSource
from .sources import Source

CONNECTIONS = 8
_WINDOW = 2 * CONNECTIONS  # chunks that are fetched ahead of the steps that have begun
# Few bytes are fetched in smaller chunks, so that all connections have some of them. Below this, a
# chunk takes no longer than its request on a fast connection.
_LEAST_CHUNK = 1 << 20
_ATTEMPTS = 12  # about five minutes, in which a hub that limits its clients serves them again
_POLL = 0.2  # seconds between two looks at whether to stop
# Readers of one process share the connections: one fetches while another's last chunks are used.
_connections = threading.BoundedSemaphore(CONNECTIONS)

Span: TypeAlias = tuple[Source, int, int]
"""Bytes `start` to `stop` of a source."""
_Key: TypeAlias = tuple[RemoteSource, int]
_Job: TypeAlias = tuple[int, "Future[bytes]"]


class ReadAhead:
    """Fetches what `steps` read; a context manager. Local sources among them are left alone.

    A step is begun with `begin(i)`, in order, and ended with `end(i)`, in any order; both may be
    called from several threads.
    """

    def __init__(self, steps: Sequence[Sequence[Span]]) -> None:
        self._chunk = _chunk_bytes(steps)
        self._keys = [_chunks(spans, self._chunk) for spans in steps]
        self._uses = Counter(key for keys in self._keys for key in keys)
        self._order = list(self._uses)  # in the order of first use
        self._place = {key: place for place, key in enumerate(self._order)}
        self._submitted = 0
        self._unfinished: set[int] = set()  # places of submitted chunks
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._digests = {
            source: _Digest(source)
            for source, count in Counter(source for source, _ in self._order).items()
            if source.sha256 is not None and count == -(-source.size // self._chunk)
        }
        self._needed = _needed(steps, self._digests, self._chunk)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # Daemons, because a thread that waits for a silent server must not keep the program.
        for number in range(CONNECTIONS):
            Thread(target=self._work, name=f"fetch-{number}", daemon=True).start()
        for source in {source for source, _ in self._order}:
            source.attempts, source.sleep = _ATTEMPTS, self._sleep
            source.chunk_bytes = self._chunk

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for _thread in range(CONNECTIONS):
            self._jobs.put(None)
        for source, index in self._order[: self._submitted]:
            source.drop(index)

    def stop(self) -> None:
        """Make all waiting calls and reads end soon, with RemoteError."""
        self._stop.set()

    def begin(self, step: int) -> None:
        """Fetch what this step reads and a window after it; wait while too much is on its way."""
        last = max((self._place[key] for key in self._keys[step]), default=-1)
        if last < 0:
            return
        with self._changed:
            while self._unfinished and last - min(self._unfinished) > 2 * _WINDOW:
                if not self._changed.wait(_POLL) and self._stop.is_set():
                    return
            target = min(last + 1 + _WINDOW, len(self._order))
            for place in range(self._submitted, target):
                source, index = self._order[place]
                self._unfinished.add(place)
                future: Future[bytes] = Future()
                source.hold(index, _Chunk(self._needed[source, index][0], future, self._stop))
                self._jobs.put((place, future))
            self._submitted = max(self._submitted, target)

    def end(self, step: int) -> None:
        """Drop the chunks that no later step reads."""
        with self._changed:
            for source, index in self._keys[step]:
                self._uses[source, index] -= 1
                if not self._uses[source, index]:
                    source.drop(index)

    def check(self) -> None:
        """FormatError if a file that was read whole is not the one that the hub states."""
        for digest in self._digests.values():
            digest.check()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            place, future = job
            try:
                future.set_result(self._fetch(place))
            except BaseException as error:
                future.set_exception(error)

    def _fetch(self, place: int) -> bytes:
        source, index = self._order[place]
        start, stop = self._needed[source, index]
        first = index * self._chunk
        try:
            data = bytearray()
            with _connections:
                if self._stop.is_set():
                    raise RemoteError(f"{source.name}: stopped")
                for piece in source.pieces(first + start, stop - start):
                    if self._stop.is_set():
                        raise RemoteError(f"{source.name}: stopped")
                    data += piece
            chunk = bytes(data)
            if source in self._digests:
                self._digests[source].add(index, chunk)
            return chunk
        finally:
            with self._changed:
                self._unfinished.discard(place)
                self._changed.notify_all()

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise RemoteError("stopped")


class _Chunk:
    """A chunk that is being fetched."""

    def __init__(self, start: int, future: "Future[bytes]", stop: threading.Event) -> None:
        self.start = start
        self._future = future
        self._stop = stop

    def result(self) -> bytes:
        """Its bytes, once they are here; RemoteError if they cannot be fetched."""
        while True:
            try:
                return self._future.result(_POLL)
            except NotDone:
                if self._stop.is_set():
                    raise RemoteError("stopped") from None


class _Digest:
    """The SHA-256 of a file whose chunks arrive in about their order."""

    def __init__(self, source: RemoteSource) -> None:
        self._source = source
        self._hash = sha256()
        self._lock = threading.Lock()
        self._early: dict[int, bytes] = {}
        self._next = 0

    def add(self, index: int, chunk: bytes) -> None:
        with self._lock:
            self._early[index] = chunk
            while (ready := self._early.pop(self._next, None)) is not None:
                self._hash.update(ready)
                self._next += 1

    def check(self) -> None:
        found = self._hash.hexdigest()
        if found != self._source.sha256:
            raise FormatError(
                f"{self._source.name}: expected SHA-256 {self._source.sha256}, as the hub states "
                f"it, found {found}; try again"
            )


def _chunk_bytes(steps: Iterable[Sequence[Span]]) -> int:
    """The size of chunks with which every connection fetches several of them, if possible."""
    remote = (e for spans in steps for e in spans if isinstance(e[0], RemoteSource))
    share = sum(stop - start for _, start, stop in remote) // _WINDOW
    return min(CHUNK_BYTES, max(_LEAST_CHUNK, share))


def _chunks(spans: Sequence[Span], size: int) -> list[_Key]:
    """The chunks of this size that cover the bytes of remote sources."""
    keys = (
        (source, index)
        for source, start, stop in spans
        if isinstance(source, RemoteSource) and stop > start
        for index in range(start // size, (stop - 1) // size + 1)
    )
    return list(dict.fromkeys(keys))


def _needed(
    steps: Iterable[Sequence[Span]], whole: Container[RemoteSource], size: int
) -> dict[_Key, tuple[int, int]]:
    """What is read of each chunk, as its first byte and the one after its last, within the chunk.

    whole: the sources of which everything is needed. size: of a chunk.
    """
    needed: dict[_Key, tuple[int, int]] = {}
    for source, start, stop in (span for spans in steps for span in spans):
        for key in _chunks([(source, start, stop)], size):
            first = key[1] * size
            end = min(size, key[0].size - first)
            low, high = max(start - first, 0), min(stop - first, end)
            if key[0] in whole:
                low, high = 0, end
            known = needed.get(key, (low, high))
            needed[key] = min(known[0], low), max(known[1], high)
    return needed
