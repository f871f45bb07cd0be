"""Downloads the files that a conversion needs from the hub, through huggingface_hub.

That library handles resuming, caching, tokens, HF_ENDPOINT and offline mode.
"""

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.hub_errors import hub_errors
from mtp_gguf.gguf_tools.hub_gguf import quant_of
from mtp_gguf.gguf_tools.remote import HubModel, says_what_is_tried
from mtp_gguf.gguf_tools.safetensors import (
    INDEX_NAME,
    TORCH_PATTERN,
    WEIGHT_PATTERNS,
    weight_files,
)

from .blueprint import HeadChoice
from .checkpoint import read_config, read_weight_map
from .family import wanted

# All files other than weights that a converter or a runtime reads.
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "README.md", "LICENSE*"]


def download(hub_id: str, revision: str | None, parts: Collection[HeadChoice]) -> Path:
    """Download the checkpoint's small files and the shards that this conversion reads.

    parts: those of the model to convert; without any, no weights are downloaded.
    Returns the folder. CheckpointError says why it failed and what to do.
    """
    with hub_errors(HubModel(hub_id, revision), CheckpointError):
        return _download(hub_id, revision, parts)


def _download(hub_id: str, revision: str | None, parts: Collection[HeadChoice]) -> Path:
    try:
        with says_what_is_tried(hub_id):
            config = Path(hf_hub_download(hub_id, "config.json", revision=revision))
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        raise CheckpointError(_what_it_is(hub_id, revision)) from None
    wants = wanted(read_config(config.parent), config, parts)
    if not parts:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_SMALL_FILES))
    try:
        index = hf_hub_download(hub_id, INDEX_NAME, revision=revision)
    except EntryNotFoundError as error:
        # Offline, an uncached index looks absent; but it is always fetched before any weights.
        offline = isinstance(error, LocalEntryNotFoundError)
        if offline and not weight_files(config.parent):
            raise
        patterns, shards = [*_SMALL_FILES, *WEIGHT_PATTERNS], []
    else:
        weight_map = read_weight_map(Path(index).parent) or {}
        patterns = _SMALL_FILES
        shards = sorted({file for name, file in weight_map.items() if wants(name)})
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
        snapshot_download(hub_id, revision=revision, allow_patterns=[TORCH_PATTERN])
    return folder


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
            base = json.loads(Path(path).read_text("utf-8")).get("base_model_name_or_path")
        return (
            f"{expected} a LoRA adapter{f' of {base}' if isinstance(base, str) else ''}; merge it "
            "into its base model (merge_and_unload of peft) and convert the result"
        )
    if "model_index.json" in names:
        return f"{expected} a diffusers pipeline, which is not a language model"
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"{expected} none ({shown or 'it has no files'}); it is not a transformers checkpoint"
