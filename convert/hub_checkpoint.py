"""A checkpoint on the hub of which only the parts that are needed are fetched.

Config, tokenizer and index come through huggingface_hub; of the weights, headers and then the byte
ranges of single tensors. Shards that are in the local cache already are read there.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from mtp_gguf.gguf_tools.errors import OutputError
from mtp_gguf.gguf_tools.remote import RemoteSource
from mtp_gguf.gguf_tools.safetensors import SafetensorsFile, read_safetensors
from mtp_gguf.gguf_tools.sources import FileSource

from .checkpoint import (
    Checkpoint,
    PlacedTensor,
    is_head,
    open_checkpoint,
    read_config,
    read_weight_map,
)
from .family import HeadChoice, find_family
from .hub import download


def open_hub_checkpoint(hub_id: str, revision: str | None, head: HeadChoice) -> Checkpoint:
    """Open a model on the hub by its headers; CheckpointError or RemoteError when that fails."""
    folder = download(hub_id, revision, None)
    family = find_family(read_config(folder), folder / "config.json")
    return open_checkpoint(
        folder, lambda name: family.wants(name, head), shards_on_hub(hub_id, folder)
    )


def open_hub_head(hub_id: str, revision: str | None) -> Checkpoint:
    """The same with nothing but the tensors of the MTP head."""
    folder = download(hub_id, revision, None)
    return open_checkpoint(folder, is_head, shards_on_hub(hub_id, folder))


def hub_shards(hub_id: str, revision: str | None) -> list[SafetensorsFile]:
    """The weights of a model on the hub, each file by its header."""
    folder = download(hub_id, revision, None)
    names = sorted(set((read_weight_map(folder) or {"": "model.safetensors"}).values()))
    open_shard = shards_on_hub(hub_id, folder)
    with ExitStack() as opened:
        files = []
        for name in names:
            files.append(open_shard(name))
            opened.callback(files[-1].source.close)
        opened.pop_all()
    return files


def shards_on_hub(hub_id: str, folder: Path) -> Callable[[str], SafetensorsFile]:
    """Opens weights on the hub, of the very revision that `folder` is a snapshot of."""

    def open_shard(name: str) -> SafetensorsFile:
        source = RemoteSource(f"hf://{hub_id}@{folder.name}/{name}")
        try:
            return read_safetensors(source)
        except BaseException:
            source.close()
            raise

    return open_shard


def remote_head_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the MTP head that are not on this machine."""
    return sum(t.stored.nbytes for t in _remote_head(checkpoint))


def with_local_head(
    checkpoint: Checkpoint, path: Path, progress: Callable[[int], None]
) -> Checkpoint:
    """The checkpoint with its MTP head fetched into a file at `path`, byte range by byte range.

    Neighbouring tensors are fetched together, and nothing beside them. progress: called with the
    bytes just fetched.
    """
    wanted = _remote_head(checkpoint)
    if not wanted:
        return checkpoint
    places: dict[str, int] = {}
    try:
        with path.open("wb") as file:
            for _, run in groupby(wanted, _Neighbours()):
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
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from None
    local = FileSource(path)
    fetched = {}
    for name, offset in places.items():
        held = checkpoint.tensors[name]
        fetched[name] = replace(held, stored=replace(held.stored, offset=offset), source=local)
    return replace(
        checkpoint,
        tensors={**checkpoint.tensors, **fetched},
        sources=(*checkpoint.sources, local),
    )


def _remote_head(checkpoint: Checkpoint) -> list[PlacedTensor]:
    """Tensors of the head on a server, by file and place."""
    remote = [
        t
        for name, t in checkpoint.tensors.items()
        if is_head(name) and isinstance(t.source, RemoteSource)
    ]
    return sorted(remote, key=lambda t: (t.source.name, t.stored.offset))


class _Neighbours:
    """Gives tensors that follow one another without a gap the same number, for groupby."""

    def __init__(self) -> None:
        self._number = 0
        self._end: tuple[str, int] | None = None

    def __call__(self, tensor: PlacedTensor) -> int:
        if self._end != (tensor.source.name, tensor.stored.offset):
            self._number += 1
        self._end = (tensor.source.name, tensor.stored.offset + tensor.stored.nbytes)
        return self._number
