"""Converts only the MTP head of a checkpoint into a GGUF, to be added to a model.

The file has the metadata of a head-only file and the tensors of the MTP block (and of a stored
draft vocabulary), but neither embedding nor output: the model has its own, and converting them for
a large vocabulary would take most of the time.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from mtp_gguf.gguf_tools.files.format import GgufFile, lay_out
from mtp_gguf.gguf_tools.model import Model

from ..checkpoints.checkpoint import Checkpoint
from ..plans.plan import Plan, Request, Shard
from ..plans.plan_checkpoint import make_plans


def plan_head(
    checkpoint: Checkpoint, request: Request, output: Path, name: str
) -> tuple[Plan, Model]:
    """Plan the conversion of the head of `checkpoint` into the file `output`.

    request: only the head, in one precision. name: names the checkpoint in messages. Returns the
    plan, and the file as a model whose tensor data do not exist yet. This preview has the name of
    the checkpoint, so that a head that does not fit is reported under that name, before any weights
    are read.
    """
    (plan,) = make_plans(checkpoint, request)
    [full] = plan.shards
    metadata = Model(Path(name), (_header(full, name),)).metadata()
    tensors = tuple(t for t in full.tensors if t.part != "base")
    shard = Shard(output, tensors, lay_out(metadata, [t.spec for t in tensors]))
    return replace(plan, shards=(shard,)), Model(Path(name), (_header(shard, name),))


def pre_tokenizer_of(base: Model) -> str | None:
    """Return the base's pre-tokenizer, so that a checkpoint with an unknown one can be used."""
    name = base.first.scalar("tokenizer.ggml.pre")
    return name if isinstance(name, str) else None


def _header(shard: Shard, name: str) -> GgufFile:
    return GgufFile(_PlannedSource(name, shard.layout.header, shard.layout.size))


@dataclass(frozen=True)
class _PlannedSource:
    """A file of which only the header and the size exist."""

    name: str
    header: bytes
    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the header; the data after it read as zeros."""
        return self.header[offset : offset + length].ljust(length, b"\0")

    def close(self) -> None:
        """Does nothing, since nothing is open."""
