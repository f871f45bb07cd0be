"""Uploads a release to the hub, through huggingface_hub, which handles the token and retries.

Each file is a commit of its own, so that an upload goes on with the first file that is missing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from mtp_gguf.gguf_tools.errors import RemoteError
from mtp_gguf.gguf_tools.hub_errors import hub_errors
from mtp_gguf.gguf_tools.remote import HubModel

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


def upload(
    repository: str,
    paths: Sequence[Path],
    found: Sequence[str],
    record: Record,
    say: Callable[[Path], None],
    *,
    private: bool,
) -> None:
    """Create the repository, upload the files that it does not have yet, remove all others.

    found: the files there that are not this release's. private: if the repository is new. say:
    called before the upload of a file. RemoteError says what failed; a second call goes on.
    """
    api = HfApi()
    names = {path.name for path in paths}
    with hub_errors(HubModel(repository), RemoteError, "upload"):
        api.create_repo(repository, private=private, exist_ok=True)
        if others := [name for name in found if name not in names]:
            removals = [CommitOperationDelete(name) for name in others]
            message = "Remove files of an earlier release"
            api.create_commit(repository, removals, commit_message=message)
        record.repository = repository
        record.save()
        siblings = api.model_info(repository, files_metadata=True).siblings or []
        present = {file.rfilename: file.lfs.sha256 for file in siblings if file.lfs}
        for path in paths:
            if path.name in record.uploaded and record.uploaded[path.name] == present.get(
                path.name
            ):
                continue
            operation = CommitOperationAdd(path.name, path)
            digest = operation.upload_info.sha256.hex()
            if present.get(path.name) != digest:
                say(path)
                message = f"Upload {path.name}"
                api.create_commit(repository, [operation], commit_message=message)
            record.uploaded[path.name] = digest
            record.save()
