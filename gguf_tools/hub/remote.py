"""Files on a web server or on the Hugging Face hub, read by range requests.

`https://…` names a file; `hf://OWNER/NAME[@REVISION]/PATH` one on the hub (HF_ENDPOINT and the
hub's token are respected). A model on the hub is `OWNER/NAME[@REVISION]`, with `hf://` or without;
`:QUANT` after it names one of its GGUFs, as llama.cpp's `-hf` does, and `/PATH.gguf` a file.
`hf.co/` and `huggingface.co/` mean `hf://`. Small reads go through a cache
of blocks with growing read-ahead; large reads are requested exactly.
"""

import logging
import os
import re
import shlex
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

from ..errors import FormatError, RemoteError
from ..files.format import GgufFile
from ..model import Model, shard_names
from .sources import closed_on_failure

if TYPE_CHECKING:
    import requests

_WEB = re.compile(r"https?://[^/]+/.", re.IGNORECASE)
_HUB = re.compile(r"hf://([\w.-]+/[\w.-]+?)(?:@([^/:]+))?(?:/(.+)|:([\w.-]+))?")
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([^/:]+))?(?::([\w.-]+))?")
_HUB_FILE = re.compile(r"[A-Za-z0-9][\w.-]*/\w[\w.-]*(?:@[^/:]+)?/.+\.gguf", re.IGNORECASE)
_HUB_HOST = re.compile(r"(?:hf|huggingface)\.co/")  # as other programs spell `hf://`
# Names with these suffixes are files, never models on the hub.
_FILE_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".json", ".npy")
_DEFAULT_ENDPOINT = "https://huggingface.co"

_BLOCK_BYTES = 1 << 18
CHUNK_BYTES = 4 << 20  # of a file that is read ahead
_EXACT = 4 << 20  # larger reads bypass the cache and request exactly their range
# Sequential reads request four times as much each time, up to this: 1/4, 1, 4 and 16 MiB. Four
# requests are then enough for the header of any model (11 MB for 248,320 tokens and merges).
_GROWTH = 4
_MOST_AHEAD = 16 << 20
_CACHED_BYTES = 32 << 20
_ATTEMPTS = 5
_FIRST_PAUSE = 0.5  # seconds before the second attempt, doubled for each further one
_LONGEST_PAUSE = 60.0
_TIMEOUT = (10.0, 30.0)  # seconds to connect, and between two chunks of a response
_SILENCE = 1.5  # seconds without an answer, after which a line says what is being tried
_PIECE_BYTES = 1 << 16  # the most that a dropped connection loses
# Statuses that are worth a retry; 401 to 410 only if a signed link may have expired.
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_EXPIRED = (401, 403, 404, 410)


_log = logging.getLogger(__name__)


@contextmanager
def says_what_is_tried(name: str) -> Iterator[None]:
    """Log one line if what is within, the first request about `name`, takes long."""
    line = "%s: no answer yet from %s; still trying"
    where = _host(name)[1] if _WEB.match(name) else _host(_endpoint())[1]
    timer = threading.Timer(_SILENCE, _log.warning, (line, name, where))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_remote(text: str) -> bool:
    """Whether `text` names a remote file or model."""
    return bool(_WEB.match(text)) or text.startswith("hf://")


class HubModel(NamedTuple):
    """A model on the hub. revision: a branch, tag or commit; None for the default branch."""

    hub_id: str
    revision: str | None = None

    def __str__(self) -> str:
        """The form that all commands accept."""
        return self.hub_id if self.revision is None else f"{self.hub_id}@{self.revision}"


class HubGguf(NamedTuple):
    """A GGUF on the hub: this `file`, or the one of this `quant`; by default, the usual one."""

    model: HubModel
    file: str | None = None
    quant: str | None = None

    def __str__(self) -> str:
        """The form that all commands accept."""
        if self.file is not None:
            return f"hf://{self.model}/{self.file}"
        return f"{self.model}:{self.quant}" if self.quant is not None else str(self.model)


def hub_model(text: str) -> HubModel | None:
    """The whole model on the hub that `text` names; None for a GGUF of it and for local paths."""
    found = hub_gguf(text)
    return found.model if found and found.file is None and found.quant is None else None


def hub_gguf(text: str) -> HubGguf | None:
    """What `text` names on the hub, where a GGUF is expected; None for local paths and `https://`.

    A name without `hf://` counts as local if that path exists, or if its first part is a folder: it
    is then more likely a mistyped path than a model of an owner with that name.
    """
    if text.startswith("hf://"):
        match = _HUB.fullmatch(text)
        return HubGguf(HubModel(match[1], match[2]), match[3], match[4]) if match else None
    name = _on_hub(text)
    if name is None or Path(text).exists() or _first_part(text).is_dir():
        return None
    return hub_gguf(name)


def on_hub(text: str) -> str:
    """The form with `hf://` of a name that must be one on the hub, whatever exists here."""
    host = _HUB_HOST.match(text)
    return text if text.startswith("hf://") else f"hf://{text[host.end() if host else 0 :]}"


def _on_hub(text: str) -> str | None:
    """The form with `hf://` of a name that can be one on the hub; None if it is only a path."""
    if _HUB_HOST.match(text) or _HUB_FILE.fullmatch(text):
        return on_hub(text)
    is_id = _HUB_ID.fullmatch(text) and not text.lower().endswith(_FILE_SUFFIXES)
    return on_hub(text) if is_id else None


def _first_part(text: str) -> Path:
    return Path(text.partition("/")[0])


def absent_model(text: str) -> str:
    """The end of an error message: why a path that does not exist was not looked up on the hub."""
    if name := _on_hub(text):
        return f"{_first_part(text)} is a folder here; on the hub it would be {name}"
    return "models on the hub are named OWNER/NAME"


def download_command(text: str) -> str:
    """A shell command that downloads a remote file into the working directory."""
    match = _HUB.fullmatch(text)
    if match and match[3]:
        revision = f" --revision {shlex.quote(match[2])}" if match[2] else ""
        return f"hf download {match[1]} {shlex.quote(match[3])}{revision} --local-dir ."
    return f"curl -LO {shlex.quote(text)}"


def file_url(text: str) -> str:
    """The URL of a remote file; RemoteError if `text` is not one."""
    if not text.startswith("hf://"):
        try:
            urlsplit(text).port  # noqa: B018  (checks the address)
        except ValueError as error:
            raise RemoteError(f"{text}: is not a valid address: {error}") from None
        return text
    match = _HUB.fullmatch(text)
    if not match or not match[3]:
        raise RemoteError(f"{text}: expected hf://OWNER/NAME[@REVISION]/FILE")
    from huggingface_hub import constants  # noqa: PLC0415  (slow to import)

    if constants.HF_HUB_OFFLINE:
        raise RemoteError(f"{text}: not in the local cache, and offline mode is set")
    endpoint = _endpoint()
    return f"{endpoint}/{match[1]}/resolve/{quote(match[2] or 'main', safe='')}/{quote(match[3])}"


def open_remote_model(text: str) -> Model:
    """Open a remote GGUF with all its shards, reading only the headers."""
    plain, question, query = text.partition("?")
    with ExitStack() as stack:
        files = []
        for shard in shard_names(plain):
            source = RemoteSource(shard + question + query)
            stack.callback(source.close)
            files.append(GgufFile(source))
        model = Model(plain, tuple(files))
        stack.pop_all()
        return model


class Chunk(Protocol):
    """Bytes of a file that are being fetched. start: the first one's place in the chunk."""

    start: int

    def result(self) -> bytes:
        """The bytes, once they are here."""


class RemoteSource:
    """A file behind HTTP, read by range requests; safe to use from several threads.

    `name` is the address as the user gave it, without query and password. `requests` and `fetched`
    count requests (without redirects) and bytes. `sha256` is that of the whole file, if it is
    known. `attempts` of a request are made without any progress, and `sleep` waits between them.
    `chunk_bytes` is the size of the chunks that are held.
    `known` are size and ETag, if an earlier request has told them.
    """

    def __init__(
        self,
        address: str,
        sleep: Callable[[float], None] = time.sleep,
        sha256: str | None = None,
        known: tuple[int, str | None] | None = None,
    ) -> None:
        import requests  # noqa: PLC0415  (slow to import)

        self._address = address
        self.name = re.sub(r"//[^/]*@", "//", address.partition("?")[0])
        self.requests = 0
        self.fetched = 0
        self.sha256 = sha256
        self.attempts = _ATTEMPTS
        self.chunk_bytes = CHUNK_BYTES
        self.sleep = sleep
        self._chunks: dict[int, Chunk] = {}
        self._url = file_url(address)
        self._direct = self._url  # the target of redirects, until that link expires
        self._session = requests.Session()
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._ahead = _BLOCK_BYTES
        self._next = 0  # where the last read-ahead ended
        self._etag: str | None = None
        self.size = -1
        if known is not None:
            self.size, self._etag = known
            return
        with closed_on_failure(self), says_what_is_tried(self.name):
            self._store(0, self._fetch(0, _BLOCK_BYTES))

    def __reduce__(self) -> "tuple[type[RemoteSource], tuple[Any, ...]]":
        """Pickled as the address, without a token; the other process makes its own requests."""
        known = (self.size, self._etag)
        return type(self), (self._address, time.sleep, self.sha256, known)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; FormatError if the file ends before."""
        if offset + length > self.size:
            raise FormatError(f"{self.name}: the file ends at byte {self.size}, data is missing")
        if length > _EXACT:
            return self._fetch(offset, length)
        parts = []
        with self._lock:
            while length > 0:
                block, skip = divmod(offset, _BLOCK_BYTES)
                data = self._block(block)[skip : skip + length]
                parts.append(data)
                offset += len(data)
                length -= len(data)
        return b"".join(parts)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable bytes) from `offset`; FormatError if the file ends before."""
        done = 0
        while done < len(buffer):
            index, skip = divmod(offset + done, self.chunk_bytes)
            chunk = self._chunks.get(index)
            part = memoryview(b"")
            if chunk is not None and skip >= chunk.start:
                skip -= chunk.start
                part = memoryview(chunk.result())[skip : skip + len(buffer) - done]
            if not part:
                buffer[done:] = self.read(offset + done, len(buffer) - done)
                return
            buffer[done : done + len(part)] = part
            done += len(part)

    def hold(self, index: int, chunk: Chunk) -> None:
        """Take reads within the chunk of this index from `chunk`, as far as it has the bytes.

        A chunk is one of `chunk_bytes` bytes of the file, of which `chunk` may have a part.
        """
        self._chunks[index] = chunk

    def drop(self, index: int) -> None:
        """Forget the chunk of this index, if there is one."""
        self._chunks.pop(index, None)

    def pieces(self, offset: int, length: int) -> Iterator[bytes]:
        """Exactly the `length` bytes from `offset`, in chunks as they arrive."""
        if offset + length > self.size:
            raise FormatError(f"{self.name}: the file ends at byte {self.size}, data is missing")
        yield from self._stream(offset, length)

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _block(self, index: int) -> bytes:
        if index not in self._blocks:
            start = index * _BLOCK_BYTES
            on = start == self._next
            self._ahead = min(_GROWTH * self._ahead, _MOST_AHEAD) if on else _BLOCK_BYTES
            self._store(start, self._fetch(start, min(self._ahead, self.size - start)))
        self._blocks.move_to_end(index)
        return self._blocks[index]

    def _store(self, start: int, data: bytes) -> None:
        for at in range(0, len(data), _BLOCK_BYTES):
            self._blocks[(start + at) // _BLOCK_BYTES] = data[at : at + _BLOCK_BYTES]
        self._next = start + len(data)
        while len(self._blocks) * _BLOCK_BYTES > _CACHED_BYTES:
            self._blocks.popitem(last=False)

    def _fetch(self, offset: int, length: int) -> bytes:
        return b"".join(self._stream(offset, length))

    def _stream(self, offset: int, length: int) -> Iterator[bytes]:
        """Bytes from `offset`; the first request, which determines the size, may yield fewer."""
        import requests  # noqa: PLC0415

        failures = 0
        while length > 0:
            try:
                with self._request(offset, length) as response:
                    if self.size >= 0:
                        length = min(length, self.size - offset)
                    for piece in response.iter_content(_PIECE_BYTES):
                        wanted = piece[:length]
                        offset += len(wanted)
                        length -= len(wanted)
                        self.fetched += len(piece)
                        if wanted:
                            failures = 0
                            yield wanted
                        if len(piece) > len(wanted):
                            raise RemoteError(f"{self.name}: the server sent more than requested")
                    if length > 0:
                        raise requests.exceptions.ChunkedEncodingError("the answer ended early")
            except (requests.RequestException, _TransientError) as error:
                failures += 1
                hopeless = isinstance(error, ValueError)  # an invalid URL
                if failures >= self.attempts or hopeless:
                    raise RemoteError(
                        f"{self.name}: {_reason(error)}"
                        f"{'' if hopeless else f'; gave up after {failures} attempts'}"
                    ) from None
                pause = error.pause if isinstance(error, _TransientError) else 0.0
                self.sleep(max(pause, min(_FIRST_PAUSE * 2 ** (failures - 1), _LONGEST_PAUSE)))

    @contextmanager
    def _request(self, offset: int, length: int) -> "Iterator[requests.Response]":
        """The response to one range request, with its headers checked."""
        headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        if _host(self._direct) == _host(self._url) and (token := _token_for(self._url)):
            headers["Authorization"] = f"Bearer {token}"
        self.requests += 1
        with self._session.get(
            self._direct, headers=headers, stream=True, timeout=_TIMEOUT
        ) as response:
            self._check(response, offset)
            self._direct = response.url
            yield response

    def _check(self, response: "requests.Response", offset: int) -> None:
        status = response.status_code
        if status in _EXPIRED and self._direct != self._url:
            self._direct = self._url  # the link expired; request a new one
            raise _TransientError(f"answered {status}")
        if status in _TRANSIENT:
            raise _TransientError(f"answered {status}", response.headers.get("Retry-After"))
        if urlsplit(self._url).scheme == "https" and urlsplit(response.url).scheme != "https":
            raise RemoteError(f"{self.name}: redirects to an address that is not encrypted")
        if status in (401, 403):
            raise RemoteError(
                f"{self.name}: not allowed ({status}); if it is gated or private, accept its terms "
                "and log in with `hf auth login`, or set HF_TOKEN"
            )
        if status == 416 and offset == 0:
            raise FormatError(f"{self.name}: is empty")
        if status == 200:
            raise RemoteError(
                f"{self.name}: the server does not support range requests, and the whole file is "
                "not fetched for its header; download it and use the local file"
            )
        if status != 206:
            raise RemoteError(f"{self.name}: the server answered {status} {response.reason}")
        self._check_range(response, offset)

    def _check_range(self, response: "requests.Response", offset: int) -> None:
        given = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", given)
        if not match or int(match[1]) != offset:
            raise RemoteError(
                f"{self.name}: expected a range from byte {offset}, found {given or 'none'!r:.60}"
            )
        size, etag = int(match[3]), response.headers.get("ETag")
        tags = {etag, self._etag} - {None}
        if self.size >= 0 and (size != self.size or len(tags) > 1):
            raise RemoteError(f"{self.name}: changed while it was read; try again")
        self.size, self._etag = size, etag


class _TransientError(Exception):
    """A response that is worth a retry after `pause` seconds."""

    def __init__(self, text: str, pause: str | None = None) -> None:
        super().__init__(text)
        self.pause = min(float(pause), _LONGEST_PAUSE) if pause and pause.isdecimal() else 0.0


def _reason(error: Exception) -> str:
    """The last part of a chain of library errors, which says what happened."""
    import requests  # noqa: PLC0415

    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection was closed before the download was complete"
    text = str(error) or type(error).__name__
    reason = text.rpartition(": ")[2].strip("'\")> ")
    reason += ")" * (reason.count("(") - reason.count(")"))  # its own, after those of the chain
    return f"cannot be reached ({reason:.120})" if not isinstance(error, _TransientError) else text


def _token_for(url: str) -> str | None:
    """The hub's token; None for any host other than the hub's."""
    if _host(url) != _host(_endpoint()):
        return None
    from huggingface_hub import get_token  # noqa: PLC0415  (slow to import)

    return get_token()


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or _DEFAULT_ENDPOINT


def _host(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.rpartition("@")[2]
