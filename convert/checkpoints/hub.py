"""Downloads the files that a conversion needs from the hub, through huggingface_hub.

That library handles resuming, caching, tokens, HF_ENDPOINT and offline mode.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.files.safetensors import (
    INDEX_NAME,
    TORCH_PATTERN,
    WEIGHT_PATTERNS,
    is_weight_file,
    weight_files,
)
from mtp_gguf.gguf_tools.hub.hub_errors import hub_errors
from mtp_gguf.gguf_tools.hub.hub_gguf import Announce, announce, list_files, quant_of
from mtp_gguf.gguf_tools.hub.remote import HubModel, says_what_is_tried

from ..families.family import wanted
from ..families.target_model import HeadChoice
from .checkpoint import read_config, read_weight_map

_log = logging.getLogger(__name__)

# All files other than weights that a converter or a runtime reads.
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "README.md", "LICENSE*"]


def download(
    hub_id: str,
    revision: str | None,
    parts: Collection[HeadChoice],
    say: Announce = lambda *_: None,
) -> Path:
    """Download the checkpoint's small files and the shards that this conversion reads.

    parts: those of the model to convert; without any, no weights are downloaded. say: called before
    a download of weights.
    Returns the folder. CheckpointError says why it failed and what to do.
    """
    return fetch(hub_id, revision, parts, say, stream=False).folder


class Fetched(NamedTuple):
    """The folder of a checkpoint's files; streamed: it may lack weights, which stay on the hub."""

    folder: Path
    streamed: bool


def fetch(
    hub_id: str,
    revision: str | None,
    parts: Collection[HeadChoice],
    say: Announce,
    *,
    stream: bool | None,
) -> Fetched:
    """As `download`, but leave the weights on the hub if `stream`.

    stream: None to do so if the disk of the cache lacks room for them.
    """
    with hub_errors(HubModel(hub_id, revision), CheckpointError):
        return _fetch(hub_id, revision, parts, say, stream)


def _fetch(
    hub_id: str,
    revision: str | None,
    parts: Collection[HeadChoice],
    say: Announce,
    stream: bool | None,
) -> Fetched:
    try:
        with says_what_is_tried(hub_id):
            config = Path(hf_hub_download(hub_id, "config.json", revision=revision))
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        raise CheckpointError(_what_it_is(hub_id, revision)) from None
    wants = wanted(read_config(config.parent), config, parts)
    if not parts or stream:
        return Fetched(_small_files(hub_id, revision), bool(parts))
    model = HubModel(hub_id, revision)
    try:
        index = hf_hub_download(hub_id, INDEX_NAME, revision=revision)
    except EntryNotFoundError as error:
        # Offline, an uncached index looks absent; but it is always fetched before any weights.
        offline = isinstance(error, LocalEntryNotFoundError)
        if offline and not weight_files(config.parent):
            raise
        patterns, shards = [*_SMALL_FILES, *WEIGHT_PATTERNS], []
        missing = _missing_weights(model, is_weight_file)
    else:
        weight_map = read_weight_map(Path(index).parent) or {}
        patterns = _SMALL_FILES
        shards = sorted({file for name, file in weight_map.items() if wants(name)})
        missing = _missing_weights(model, {*shards}.__contains__)
    if stream is None and _lacks_room(model, missing):
        return Fetched(_small_files(hub_id, revision), True)
    _announce_weights(model, say, missing)
    folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    for shard in shards:
        # One by one and in this thread: snapshot_download's threads would finish their files before
        # Ctrl-C takes effect.
        try:
            hf_hub_download(hub_id, shard, revision=folder.name)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            continue  # whoever opens the checkpoint reports it
    if not any(folder.glob("*.safetensors")):
        torch_files = _missing_weights(model, lambda name: fnmatch(name, TORCH_PATTERN))
        _announce_weights(model, say, torch_files)
        snapshot_download(hub_id, revision=revision, allow_patterns=[TORCH_PATTERN])
    return Fetched(folder, False)


def _small_files(hub_id: str, revision: str | None) -> Path:
    return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_SMALL_FILES))


def _missing_weights(model: HubModel, needed: Callable[[str], bool]) -> Mapping[str, int | None]:
    """The files that are needed and on the hub, but not in the cache, with their sizes."""
    commit, sizes = list_files(model)
    return {
        name: sizes[name]
        for name in sorted(filter(needed, sizes))
        if not isinstance(try_to_load_from_cache(model.hub_id, name, revision=commit), str)
    }


def _announce_weights(model: HubModel, say: Announce, missing: Mapping[str, int | None]) -> None:
    if missing:
        nbytes = missing.values()
        announce(say, model, [*missing], None if None in nbytes else sum(filter(None, nbytes)))


def _lacks_room(model: HubModel, missing: Mapping[str, int | None]) -> bool:
    """Whether the disk of the cache has too little room for these files; logs a line if so."""
    nbytes = sum(size or 0 for size in missing.values())
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if nbytes <= free:
        return False
    line = "%s: its weights have %d bytes and %d are free in %s; they are streamed from the hub"
    _log.warning(line, model, nbytes, free, cache)
    return True


def _what_it_is(hub_id: str, revision: str | None) -> str:
    """An error message for a repository without config.json: what it contains and what to do."""
    siblings = HfApi().model_info(hub_id, revision=revision).siblings or []
    names = sorted(sibling.rfilename for sibling in siblings)
    expected = f"{hub_id}: expected a checkpoint with config.json, found"
    ggufs = [name for name in names if name.endswith(".gguf")]
    at = f"@{revision}" if revision else ""
    if ggufs:
        return (
            f"{expected} GGUF files; name one, such as hf://{hub_id}{at}/{ggufs[0]} or "
            f"{hub_id}{at}:{quant_of(ggufs[0])}, or use the checkpoint that they were made from"
        )
    if "adapter_config.json" in names:
        base = None
        with suppress(OSError, ValueError, AttributeError):
            path = hf_hub_download(hub_id, "adapter_config.json", revision=revision)
            base = parse_json(Path(path).read_text("utf-8")).get("base_model_name_or_path")
        return (
            f"{expected} a LoRA adapter{f' of {base}' if isinstance(base, str) else ''}; merge it "
            "into its base model (merge_and_unload of peft) and convert the result"
        )
    if "model_index.json" in names:
        return f"{expected} a diffusers pipeline, which is not a language model"
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"{expected} none ({shown or 'it has no files'}); it is not a transformers checkpoint"
