"""The GGUF models on this machine: those in folders, and those in the hub's cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import MtpGgufError
from ..heads.head_files import heads_beside
from ..machine.shell import as_argument
from ..model import Model, open_model, shard_names

_TYPE_KEY = "general.type"


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine.

    name: what commands accept for it. path: the first shard. nbytes: size of all shards. can_draft:
    whether it has a head, in its own file or in the only one beside it that fits. reason: one
    sentence that says so, what is missing, or why the file cannot be read.
    """

    name: str
    path: Path
    nbytes: int
    can_draft: bool
    reason: str


def models_in(folder: Path) -> Iterator[LocalModel]:
    """The models in a folder and its subfolders, one level deep, by path."""
    found = [*folder.glob("*.gguf"), *folder.glob("[!.]*/*.gguf")]
    for path in sorted(path for path in found if path.is_file()):
        if (model := _model(as_argument(path), path)) is not None:
            yield model


def models_in_hub_cache() -> Iterator[LocalModel]:
    """The models in huggingface_hub's cache, by name; those of other revisions than main last."""
    from huggingface_hub import scan_cache_dir  # noqa: PLC0415  (slow to import)
    from huggingface_hub.errors import CacheNotFound  # noqa: PLC0415

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model":
            continue
        for revision in sorted(repo.revisions, key=lambda r: ("main" not in r.refs, r.commit_hash)):
            names = (ref for ref in revision.refs if "/" not in ref)
            ref = min(names, default=revision.commit_hash)
            at = "" if "main" in revision.refs else f"@{ref}"
            for path in sorted(file.file_path for file in revision.files):
                inside = path.relative_to(revision.snapshot_path).as_posix()
                if path.suffix == ".gguf" and (
                    model := _model(f"{repo.repo_id}{at}/{inside}", path)
                ):
                    yield model


def _model(name: str, path: Path) -> LocalModel | None:
    """Describe the model of a file; None for later shards, and for files that are no models."""
    try:
        paths = [Path(shard) for shard in shard_names(str(path))]
        if path != paths[0]:
            return None
        nbytes = sum(shard.stat().st_size for shard in paths if shard.exists())
        with open_model(path) as model:
            if not _is_whole(model):
                return None
            report = model.report
            can_draft, reason = report.ready, report.reason
            if not can_draft and len(beside := heads_beside(model)) == 1:
                can_draft, reason = True, f"its head is in {beside[0].name}"
    except (MtpGgufError, OSError) as error:
        return LocalModel(name, path, path.stat().st_size, False, str(error))
    return LocalModel(name, path, nbytes, can_draft, reason)


def _is_whole(model: Model) -> bool:
    """Whether it is a language model: no head, drafter, vision tower, adapter or imatrix."""
    alone = (model.head.is_alone and model.report.ready) or model.drafter is not None
    return not alone and model.tower is None and model.first.keys.get(_TYPE_KEY, "model") == "model"
