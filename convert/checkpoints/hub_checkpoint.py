"""Opens a checkpoint on the hub and fetches only the parts that are needed.

Config, tokenizer and index are downloaded through huggingface_hub; of the weights, only the headers
and then the byte ranges of single tensors are fetched. Shards in the local cache are read there.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from mtp_gguf.gguf_tools.errors import CheckpointError, OutputError, raising
from mtp_gguf.gguf_tools.files.safetensors import SafetensorsFile, read_safetensors
from mtp_gguf.gguf_tools.hub.hub_gguf import weight_hashes
from mtp_gguf.gguf_tools.hub.remote import HubModel, RemoteSource
from mtp_gguf.gguf_tools.hub.sources import FileSource, closed_on_failure

from ..families.family import wanted
from ..families.target_model import HeadChoice
from .checkpoint import (
    Checkpoint,
    PlacedTensor,
    head_test,
    open_checkpoint,
    read_config,
    read_weight_map,
)
from .hub import download


def open_hub_checkpoint(hub_id: str, revision: str | None, head: HeadChoice) -> Checkpoint:
    """Open a model on the hub, reading only headers; CheckpointError or RemoteError on failure."""
    folder = download(hub_id, revision, ())
    needed = wanted(read_config(folder), folder / "config.json", (head,))
    return open_checkpoint(folder, needed, shards_on_hub(hub_id, folder))


def stream_hub_checkpoint(hub_id: str, folder: Path, parts: Collection[HeadChoice]) -> Checkpoint:
    """Open these parts of a model whose weights are streamed; `folder` has its other files.

    Whole files are compared with the hub's hashes. CheckpointError without safetensors files.
    """
    model = HubModel(hub_id, folder.name)
    hashes = weight_hashes(model)
    if not hashes:
        raise CheckpointError(
            f"{model}: --stream: expected safetensors files on the hub, found none; convert it "
            "with --no-stream"
        )
    needed = wanted(read_config(folder), folder / "config.json", parts)
    return open_checkpoint(folder, needed, shards_on_hub(hub_id, folder, hashes), [*hashes])


def open_hub_head(hub_id: str, revision: str | None) -> Checkpoint:
    """Like `open_hub_checkpoint`, with only the tensors of the MTP head."""
    folder = download(hub_id, revision, ())
    in_head = head_test(read_config(folder))
    return open_checkpoint(folder, in_head, shards_on_hub(hub_id, folder))


def hub_shards(hub_id: str, revision: str | None) -> list[SafetensorsFile]:
    """The weight files of a model on the hub, of which only the headers are read."""
    folder = download(hub_id, revision, ())
    names = sorted(set((read_weight_map(folder) or {"": "model.safetensors"}).values()))
    open_shard = shards_on_hub(hub_id, folder)
    with ExitStack() as opened:
        files = []
        for name in names:
            files.append(open_shard(name))
            opened.callback(files[-1].source.close)
        opened.pop_all()
    return files


def shards_on_hub(
    hub_id: str, folder: Path, hashes: Mapping[str, str | None] | None = None
) -> Callable[[str], SafetensorsFile]:
    """A function that opens a weight file on the hub, of the same revision as `folder`.

    hashes: the SHA-256 of the files, by name.
    """

    def open_shard(name: str) -> SafetensorsFile:
        address = f"hf://{hub_id}@{folder.name}/{name}"
        source = RemoteSource(address, sha256=(hashes or {}).get(name))
        with closed_on_failure(source):
            return read_safetensors(source)

    return open_shard


def remote_head_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the MTP head that have to be downloaded."""
    return sum(t.stored.nbytes for t in _remote_head(checkpoint))


def with_local_head(
    checkpoint: Checkpoint, path: Path, progress: Callable[[int], None]
) -> Checkpoint:
    """The checkpoint with its MTP head downloaded into the file `path`.

    Only the byte ranges of the head's tensors are fetched; adjacent ones share a request.
    progress: called with the number of bytes just fetched.
    """
    remote = _remote_head(checkpoint)
    if not remote:
        return checkpoint
    places: dict[str, int] = {}
    with raising(OutputError, f"{path}: cannot be written"), path.open("wb") as file:
        for _, run in groupby(remote, _Neighbours()):
            tensors = list(run)
            start = tensors[0].stored.offset
            length = tensors[-1].stored.offset + tensors[-1].stored.nbytes - start
            at = file.tell()
            for tensor in tensors:
                places[tensor.stored.name] = at + tensor.stored.offset - start
            source = tensors[0].source
            assert isinstance(source, RemoteSource)
            for piece in source.pieces(start, length):
                file.write(piece)
                progress(len(piece))
    local = FileSource(path)
    fetched = {}
    for name, offset in places.items():
        held = checkpoint.tensors[name]
        fetched[name] = replace(held, stored=replace(held.stored, offset=offset), source=local)
    return replace(
        checkpoint, tensors={**checkpoint.tensors, **fetched}, sources=(*checkpoint.sources, local)
    )


def _remote_head(checkpoint: Checkpoint) -> list[PlacedTensor]:
    """Remote tensors of the head, sorted by file and offset."""
    remote = [
        t
        for name, t in checkpoint.tensors.items()
        if checkpoint.in_head(name) and isinstance(t.source, RemoteSource)
    ]
    return sorted(remote, key=lambda t: (t.source.name, t.stored.offset))


class _Neighbours:
    """Returns the same number for tensors that are adjacent in a file, as a key for groupby."""

    def __init__(self) -> None:
        self._number = 0
        self._end: tuple[str, int] | None = None

    def __call__(self, tensor: PlacedTensor) -> int:
        if self._end != (tensor.source.name, tensor.stored.offset):
            self._number += 1
        self._end = (tensor.source.name, tensor.stored.offset + tensor.stored.nbytes)
        return self._number
