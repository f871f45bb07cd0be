"""GGUF models on the hub: which files a name means, and their download.

Downloads go through huggingface_hub, which handles resuming, caching, tokens, HF_ENDPOINT and
offline mode. A model is downloaded whole: all shards, and the head-only file beside it if the
model has no head.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeAlias

from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_download,
    scan_cache_dir,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import FormatError, RemoteError
from ..files.safetensors import TORCH_PATTERN
from ..heads.head_files import FOLDER as HEAD_FOLDER
from ..heads.head_files import PREFIX as HEAD_PREFIX
from ..heads.head_files import is_head_of, is_shared_name, model_name, type_in_name
from ..heads.nextn import ARCHITECTURES
from ..model import Model, open_model, shard_names, whole_name
from .hub_errors import first_line, hub_errors
from .remote import HubGguf, HubModel, hub_gguf, open_remote_model, says_what_is_tried

_SUFFIX = ".gguf"
# As llama.cpp's -hf: the mixes to take if none is named.
_USUAL = ("Q4_K_M", "Q8_0")
# Files of a repository that are not models: vision towers, importance matrices.
_NOT_MODELS = ("mmproj", "imatrix")
_DEFAULT_REVISION = "main"
_SHOWN = 12  # names in an error message


# Called before a download with its address and size in bytes, None if unknown.
Announce: TypeAlias = Callable[[str, int | None], None]


@dataclass(frozen=True)
class HubFiles:
    """Files of a model on the hub, which make one GGUF: `names` are the shards, in order.

    commit: the revision that they were found in. nbytes: their size; None if the hub does not say
    it. beside: names and sizes of the head-only files that may belong to it, the most likely first.
    """

    model: HubModel
    commit: str | None
    names: tuple[str, ...]
    nbytes: int | None
    beside: tuple[tuple[str, int | None], ...]


def find(gguf: HubGguf) -> HubFiles:
    """The files that a name means, from the hub's list of files, or offline from the cache.

    RemoteError if there are none, or several models to choose from.
    """
    commit, sizes = list_files(gguf.model)
    first = _choose(gguf, sizes)
    names = tuple(shard_names(first))
    for name in names:
        if name not in sizes:
            raise RemoteError(f"{gguf}: expected {len(names)} shards, {name} is missing on the hub")
    counts = [sizes[name] for name in names]
    total = None if None in counts else sum(count or 0 for count in counts)
    beside = tuple((name, sizes[name]) for name in _heads(sizes, first))
    return HubFiles(gguf.model, commit, names, total, beside)


def open_hub_gguf(gguf: HubGguf) -> Model:
    """Open what a name means: in the cache if it is there, else by range requests of its headers.

    A file that is named is looked for in the cache only if the hub must not be asked.
    """
    if gguf.file is None or constants.HF_HUB_OFFLINE:
        files = find(gguf)
        if path := cached(files):
            return open_model(path)
        gguf = HubGguf(files.model, files.names[0])
    return open_remote_model(str(gguf))


class Folders(NamedTuple):
    """Where to download to, as in huggingface_hub; by default its cache."""

    local_dir: str | None = None
    cache_dir: str | None = None


def fetch(gguf: HubGguf, *, with_head: bool, say: Announce) -> tuple[Path, Path | None]:
    """Download a GGUF whole; its path, and that of the file with its head if that is separate."""
    return _fetch(find(gguf), with_head, Folders(), say)


def fetch_matching(
    repo_id: str,
    pattern: str | None,
    additional: Sequence[str],
    folders: Folders,
    *,
    with_head: bool,
) -> tuple[Path, Path | None]:
    """Like `fetch`, for the only model whose path in the repository matches a glob pattern.

    pattern: if None, the usual GGUF. additional: patterns of further files, each of exactly one.
    """
    found = hub_gguf(f"hf://{repo_id}")
    if found is None or found.file is not None:
        raise RemoteError(f"{repo_id}: expected OWNER/NAME")
    commit, sizes = list_files(found.model)
    if pattern is not None:
        models = [path for path in _models(sizes) if _matches(path, pattern, sizes)]
        if len(models) != 1:
            raise RemoteError(
                f"{found.model}: expected one GGUF that matches {pattern!r}, found {len(models)}; "
                f"{_those(found.model, sizes)}"
            )
        found = HubGguf(found.model, models[0])
    for each in additional:
        names = tuple(name for name in sizes if fnmatch(name, each))
        if len(names) != 1:
            raise RemoteError(
                f"{found.model}: expected one file that matches {each!r}, found {len(names)}; "
                f"there are {_listed(sorted(sizes))}"
            )
        further = HubFiles(found.model, commit, names, None, ())
        _download(further, names, None, folders, lambda *_: None)
    return _fetch(find(found), with_head, folders, lambda *_: None)


def _matches(first: str, pattern: str, files: Mapping[str, int | None]) -> bool:
    """Whether a shard of the model with this first shard matches."""
    return any(name in files and fnmatch(name, pattern) for name in shard_names(first))


def _fetch(
    files: HubFiles, with_head: bool, folders: Folders, say: Announce
) -> tuple[Path, Path | None]:
    path = _download(files, files.names, files.nbytes, folders, say)
    if not with_head or not files.beside:
        return path, None
    with open_model(path) as model:
        if model.report.ready or model.architecture not in ARCHITECTURES:
            return path, None
        for name, nbytes in files.beside:
            head = _download(files, (name,), nbytes, folders, say)
            if is_head_of(head, model):
                return path, head
    return path, None


def cached(files: HubFiles) -> Path | None:
    """The first shard in the local cache; None unless all shards are there."""
    paths = [_cached(files, name) for name in files.names]
    return None if None in paths else paths[0]


def weights_of(model: HubModel) -> int:
    """Bytes of the weights of a checkpoint on the hub; 0 if it has none in a checkpoint's format.

    A repository of GGUFs may have a config.json, too.
    """
    _, sizes = list_files(model)
    if "config.json" not in sizes:
        return 0
    safetensors, torch = (
        sum(size or 1 for name, size in sizes.items() if fnmatch(name, pattern))
        for pattern in ("*.safetensors", TORCH_PATTERN)
    )
    return safetensors or torch


def weight_hashes(model: HubModel) -> dict[str, str | None]:
    """The safetensors files of a checkpoint on the hub, with the SHA-256 that the hub states."""
    with hub_errors(model, RemoteError):
        info = HfApi().model_info(model.hub_id, revision=model.revision, files_metadata=True)
    return {
        file.rfilename: file.lfs.sha256 if file.lfs else None
        for file in info.siblings or []
        if file.rfilename.endswith(".safetensors") and "/" not in file.rfilename
    }


def _cached(files: HubFiles, name: str, cache_dir: str | None = None) -> Path | None:
    if files.commit is None:
        return None
    found = try_to_load_from_cache(
        files.model.hub_id, name, cache_dir=cache_dir, revision=files.commit
    )
    return Path(found) if isinstance(found, str) else None


def announce(say: Announce, model: HubModel, names: Sequence[str], nbytes: int | None) -> None:
    """Announce a download of a model's files, which have `nbytes` together."""
    shards = f" and {len(names) - 1} more shards" if len(names) > 1 else ""
    say(f"hf://{model}/{names[0]}{shards}", nbytes)


def _download(
    files: HubFiles, names: tuple[str, ...], nbytes: int | None, folders: Folders, say: Announce
) -> Path:
    """Download files of one revision; the path of the first one."""
    model = files.model
    cached = [_cached(files, name, folders.cache_dir) for name in names]
    if folders.local_dir is None and cached[0] is not None and None not in cached:
        return cached[0]
    announce(say, model, names, nbytes)
    with hub_errors(model, RemoteError):
        # One by one and in this thread: snapshot_download's threads would finish their files before
        # Ctrl-C takes effect.
        first = Path(
            hf_hub_download(model.hub_id, names[0], revision=model.revision, **folders._asdict())
        )
        in_cache = folders.local_dir is None
        commit = first.parents[names[0].count("/")].name if in_cache else files.commit
        for name in names[1:]:
            hf_hub_download(model.hub_id, name, revision=commit, **folders._asdict())
    return first


def list_files(model: HubModel) -> tuple[str | None, dict[str, int | None]]:
    """The commit that a revision stands for, and its files with their sizes (None if unknown)."""
    with hub_errors(model, RemoteError):
        try:
            with says_what_is_tried(str(model)):
                info = HfApi().model_info(
                    model.hub_id, revision=model.revision, files_metadata=True
                )
        except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except Exception as error:  # the underlying HTTP library raises its own exceptions
            if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
                raise
            if (cached := _list_cached(model)) is not None:
                return cached
            raise RemoteError(
                f"{model.hub_id}: not in the local cache, and the hub cannot be reached: "
                f"{first_line(error)}"
            ) from None
        sizes = {file.rfilename: file.size for file in info.siblings or []}
        # Names come from the hub and become paths in the cache.
        safe = {name: size for name, size in sizes.items() if ".." not in PurePosixPath(name).parts}
        return info.sha, safe


def _list_cached(model: HubModel) -> tuple[str, dict[str, int | None]] | None:
    """The files of a revision that are in the local cache; None if there are none."""
    wanted = model.revision or _DEFAULT_REVISION
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return None
    for repo in repos:
        if (repo.repo_id, repo.repo_type) != (model.hub_id, "model"):
            continue
        for revision in repo.revisions:
            if wanted in (revision.commit_hash, *revision.refs):
                return revision.commit_hash, {
                    file.file_path.relative_to(revision.snapshot_path).as_posix(): file.size_on_disk
                    for file in revision.files
                }
    return None


def _choose(gguf: HubGguf, files: Mapping[str, int | None]) -> str:
    """The first shard of the model that a name means."""
    if gguf.file is not None:
        if not gguf.file.endswith(_SUFFIX):
            raise RemoteError(f"{gguf}: expected a GGUF file by its name")
        if gguf.file not in files:
            raise RemoteError(f"{gguf}: no such file on the hub; {_those(gguf.model, files)}")
        return gguf.file
    models = _models(files)
    if not models:
        raise RemoteError(f"{gguf}: {no_gguf(files, gguf.model)}")
    for quant in (gguf.quant,) if gguf.quant else _USUAL:
        found = [name for name in models if quant_of(name).upper() == quant.upper()]
        within = re.compile(rf"(?:^|[-._/]){re.escape(quant)}(?=[-.])", re.IGNORECASE)
        found = found or [name for name in models if within.search(_whole(name))]
        if len(found) == 1:
            return found[0]
        if found:
            raise RemoteError(
                f"{gguf}: {len(found)} files on the hub are {quant}; name one: "
                + _listed([f"hf://{gguf.model}/{name}" for name in found], " or ")
            )
    if gguf.quant is None and len(models) == 1:
        return models[0]
    raise RemoteError(
        f"{gguf}: no {gguf.quant} on the hub; {_those(gguf.model, files)}"
        if gguf.quant
        else f"{gguf}: expected one GGUF or a {' or '.join(_USUAL)}; {_those(gguf.model, files)}"
    )


def no_gguf(files: Mapping[str, int | None], model: HubModel) -> str:
    """What a repository without GGUF models has instead, and what to do."""
    if "config.json" in files:
        return (
            "expected GGUF files on the hub, found a checkpoint; "
            f"`mtp-gguf up {model}` converts and serves it, `mtp-gguf convert {model}` converts it"
        )
    return f"expected GGUF files on the hub, found {_listed(sorted(files)) or 'no files'}"


def _those(model: HubModel, files: Mapping[str, int | None]) -> str:
    """The models that exist, by quant if that is unambiguous, else by file."""
    models = _models(files)
    quants = [quant_of(name) for name in models]
    if not models:
        return no_gguf(files, model)
    if len(set(quants)) == len(quants):
        return f"there are {_listed([f'{model}:{quant}' for quant in quants])}"
    return f"there are {_listed([f'hf://{model}/{name}' for name in models])}"


def _listed(names: list[str], joint: str = ", ") -> str:
    shown = names[:_SHOWN]
    return joint.join(shown) + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")


def _models(files: Mapping[str, int | None]) -> list[str]:
    """The models among the files of a repository, each by its first shard."""
    found = []
    for path in sorted(files):
        name = PurePosixPath(path).name
        is_model = path.endswith(_SUFFIX) and not name.startswith(HEAD_PREFIX)
        if not is_model or any(word in name for word in _NOT_MODELS):
            continue
        try:
            first = shard_names(path)[0]
        except FormatError:  # impossible numbers in its name: not a shard of a model
            continue
        if path == first:
            found.append(path)
    return found


def quant_of(path: str) -> str:
    """The quantization by the name of a file, such as Q4_K_M or UD-Q4_K_XL; else its whole name."""
    return type_in_name(PurePosixPath(path)) or PurePosixPath(_whole(path)).stem


def _whole(path: str) -> str:
    """A file's path, as if the model were not split."""
    parts = PurePosixPath(path)
    return str(parts.with_name(whole_name(Path(parts.name))))


def _heads(files: Mapping[str, int | None], model: str) -> list[str]:
    """Head-only files in the model's folder or above it, or in a folder `MTP` there.

    The nearest first, then those named after the model, of its quant, with an embedding, and small.
    """
    folders = list(PurePosixPath(model).parents)
    quant, title = quant_of(model), model_name(PurePosixPath(model)).lower()

    def key(name: str) -> tuple[int, bool, bool, bool, int]:
        path = PurePosixPath(name)
        return (
            folders.index(_without_head_folder(path.parent)),
            model_name(path).lower() != title,
            quant_of(name) != quant,
            is_shared_name(path),
            files[name] or 0,
        )

    found = [
        name
        for name in files
        if name.endswith(_SUFFIX)
        and PurePosixPath(name).name.startswith(HEAD_PREFIX)
        and _without_head_folder(PurePosixPath(name).parent) in folders
    ]
    return sorted(found, key=key)


def _without_head_folder(folder: PurePosixPath) -> PurePosixPath:
    """The folder of the models whose heads are in `folder`."""
    return folder.parent if folder.name == HEAD_FOLDER else folder
