"""Uploads a release to the hub, through huggingface_hub, which handles the token and retries.

Each file is a commit of its own, so that an upload goes on with the first file that is missing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from mtp_gguf.gguf_tools.errors import RemoteError
from mtp_gguf.gguf_tools.hub.hub_errors import hub_errors
from mtp_gguf.gguf_tools.hub.remote import HubModel

from .release import Record

_OF_THE_HUB = (".gitattributes",)  # what a new repository has


def check_repository(repository: str, record: Record, *, replace: bool) -> list[str]:
    """The files of a repository that is not this release's; empty if there are none.

    RemoteError if there are any and not `replace`.
    """
    if record.repository == repository:
        return []
    with hub_errors(HubModel(repository), RemoteError):
        try:
            info = HfApi().model_info(repository)
        except RepositoryNotFoundError:
            return []
    found = sorted(f.rfilename for f in info.siblings or [] if f.rfilename not in _OF_THE_HUB)
    if found and not replace:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise RemoteError(
            f"{repository}: exists with other files ({found[0]}{more}); choose another name with "
            "--to, or pass --replace to replace them"
        )
    return found


def open_repository(
    repository: str,
    names: Collection[str],
    found: Sequence[str],
    record: Record,
    *,
    private: bool,
) -> dict[str, str]:
    """Create the repository, and remove its files that are not the release's.

    names: the files of the release. found: the files there that are not this release's. private:
    if the repository is new. Returns the SHA-256 of the large files that it has, by name.
    """
    api = HfApi()
    with hub_errors(HubModel(repository), RemoteError, "upload"):
        api.create_repo(repository, private=private, exist_ok=True)
        if others := [name for name in found if name not in names]:
            removals = [CommitOperationDelete(name) for name in others]
            message = "Remove files of an earlier release"
            api.create_commit(repository, removals, commit_message=message)
        record.repository = repository
        record.save()
        return _present(repository)


def is_published(repository: str, names: Collection[str], record: Record) -> bool:
    """Whether the repository has all of these large files, as the record has them."""
    if record.repository != repository or not record.uploaded.keys() >= {*names}:
        return False
    with hub_errors(HubModel(repository), RemoteError):
        try:
            present = _present(repository)
        except RepositoryNotFoundError:
            return False
    return all(present.get(name) == record.uploaded[name] for name in names)


def upload(
    repository: str,
    paths: Sequence[Path],
    present: Mapping[str, str],
    record: Record,
    say: Callable[[Path], None],
) -> None:
    """Upload the files that the repository does not have.

    present: as returned by `open_repository`. say: called before the upload of a file. RemoteError
    says what failed; a second call goes on.
    """
    with hub_errors(HubModel(repository), RemoteError, "upload"):
        for path in paths:
            known = record.uploaded.get(path.name)
            if known is not None and known == present.get(path.name):
                continue
            operation = CommitOperationAdd(path.name, path)
            if present.get(path.name) != _digest(operation):
                say(path)
                _commit(repository, operation, record)
            record.uploaded[path.name] = _digest(operation)
            record.save()


def send(repository: str, path: Path) -> CommitOperationAdd:
    """Send the contents of a large file to the hub; `publish_sent` makes them a file there."""
    with hub_errors(HubModel(repository), RemoteError, "upload"):
        operation = CommitOperationAdd(path.name, path)
        HfApi().preupload_lfs_files(repository, [operation], free_memory=True)
        return operation


def publish_sent(repository: str, operation: CommitOperationAdd, record: Record) -> None:
    """Make a file of contents that `send` has sent, here or on another machine."""
    with hub_errors(HubModel(repository), RemoteError, "upload"):
        _commit(repository, operation, record)


def _present(repository: str) -> dict[str, str]:
    siblings = HfApi().model_info(repository, files_metadata=True).siblings or []
    return {file.rfilename: file.lfs.sha256 for file in siblings if file.lfs}


def _commit(repository: str, operation: CommitOperationAdd, record: Record) -> None:
    """Upload a file. The record has it first: what the hub does not have is uploaded anyway."""
    record.uploaded[operation.path_in_repo] = _digest(operation)
    record.save()
    message = f"Upload {operation.path_in_repo}"
    HfApi().create_commit(repository, [operation], commit_message=message)


def _digest(operation: CommitOperationAdd) -> str:
    return operation.upload_info.sha256.hex()
