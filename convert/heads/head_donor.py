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


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """The plan for one file, and the same file as a `Model` whose tensor data do not exist yet.

    `preview` has the name of the checkpoint, so that a head that does not fit is reported under
    that name, before any weights are read.
    """

    plan: Plan
    preview: Model


def plan_head(checkpoint: Checkpoint, request: Request, output: Path, name: str) -> HeadPlan:
    """Plan the conversion of the head of `checkpoint` into the file `output`.

    request: only the head, in one precision. name: names the checkpoint in messages.
    """
    (plan,) = make_plans(checkpoint, request)
    [full] = plan.shards
    metadata = Model(Path(name), (_header(full, name),)).metadata()
    tensors = tuple(t for t in full.tensors if t.part != "base")
    shard = Shard(output, tensors, lay_out(metadata, [t.spec for t in tensors]))
    preview = Model(Path(name), (_header(shard, name),))
    return HeadPlan(replace(plan, shards=(shard,)), preview)


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
