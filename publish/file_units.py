"""Units of work that are whole files: a worker writes one, sends it to the hub and removes it.

So no machine needs room for more than the files that it is writing, one for each thread of its
workers, and none is shared. A worker reads what its file needs: weights that several files need are
read once for each.
"""

import pickle
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitOperationAdd

from mtp_gguf.convert.checkpoints.source_rows import SourceRows
from mtp_gguf.convert.pipeline import run
from mtp_gguf.convert.plans.plan import Plan, Shard
from mtp_gguf.gguf_tools.errors import CheckpointError, FormatError

from .release import Release
from .units import Failure, check_version, importance_of
from .upload import send


@dataclass(frozen=True)
class FileUnit:
    """A file to write and to send to `repository`: the only one of its plan."""

    plan: Plan
    rows: SourceRows
    repository: str

    @property
    def name(self) -> str:
        """The file's name."""
        return self.plan.shards[0].path.name

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.plan.size


def file_units(release: Release, repository: str, done: Collection[str]) -> Iterator[FileUnit]:
    """The files of a release but for those that are `done`, by name; large ones first."""
    rows = SourceRows(release.checkpoint)
    files = [(plan, shard) for plan in release.plans for shard in plan.shards]
    files.sort(key=lambda file: -file[1].layout.size)
    for plan, shard in files:
        if shard.path.name not in done:
            yield _unit(plan, shard, rows, repository)


def _unit(plan: Plan, shard: Shard, rows: SourceRows, repository: str) -> FileUnit:
    targets = [tensor.target for tensor in shard.tensors if tensor.target is not None]
    part = Plan(
        plan.quant,
        (shard,),
        skipped={},
        notes=(),
        draft=None,
        imatrix=importance_of(plan.imatrix, targets),
    )
    return FileUnit(part, rows.only((t, range(t.rows)) for t in targets), repository)


def make_file(wanted: str, data: bytes, threads: int) -> "Failure | CommitOperationAdd":
    """Carry out a packed unit; the contents are with the hub at the end, not yet as a file.

    wanted: the version that has packed it. Returns a failure that would be the same elsewhere, and
    raises what another machine may be able to do. The file is in the worker's own folder, which
    Dask removes if the worker is lost.
    """
    from distributed import get_worker  # noqa: PLC0415  (an extra)

    check_version(wanted)
    with TemporaryDirectory(prefix="mtp-gguf-", dir=get_worker().local_directory) as folder:
        try:
            unit: FileUnit = pickle.loads(data)
            path = Path(folder) / unit.name
            [shard] = unit.plan.shards
            plan = replace(unit.plan, shards=(replace(shard, path=path),))
            try:
                run([plan], unit.rows, lambda _: None, threads)
            finally:
                unit.rows.close()
        except (CheckpointError, FormatError) as error:
            return Failure(type(error), str(error))
        return send(unit.repository, path)
