"""The MTP head of a checkpoint as a GGUF of nothing else, to be spliced into a model.

It has the metadata of a head-only file and the tensors of the MTP block (and of a stored draft
vocabulary), but neither embedding nor output: of these the model has its own, and for a large
vocabulary they would be most of the work.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from mtp_gguf.gguf_tools.format import GgufFile, lay_out
from mtp_gguf.gguf_tools.model import Model

from .checkpoint import Checkpoint
from .plan import Plan, Request, Shard
from .plan_checkpoint import make_plans


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """What will be written (`plan`, one file), and the same as a model whose data do not exist yet.

    `preview` goes under the name of the checkpoint, so that a head that does not fit is refused
    by that name, and before a weight is read.
    """

    plan: Plan
    preview: Model


def plan_head(checkpoint: Checkpoint, request: Request, output: Path, name: str) -> HeadPlan:
    """Plan the head-only part of `checkpoint` into the file `output`.

    request: asks for the head alone, in one precision. name: what to call the checkpoint in
    messages.
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
    """A file that has its header and its size, and no data yet."""

    name: str
    header: bytes
    size: int

    def read(self, offset: int, length: int) -> bytes:
        """The header; what follows it reads as zeros."""
        return self.header[offset : offset + length].ljust(length, b"\0")

    def close(self) -> None:
        """Nothing is open."""
