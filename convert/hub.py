"""Downloads the files that a conversion needs from the hub, through huggingface_hub.

That library handles resuming, caching, tokens, HF_ENDPOINT and offline mode.
"""

import glob
import json
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from mtp_gguf.gguf_tools.errors import CheckpointError, MtpGgufError
from mtp_gguf.gguf_tools.safetensors import (
    INDEX_NAME,
    TORCH_PATTERN,
    WEIGHT_PATTERNS,
    weight_files,
)

from .blueprint import HeadChoice
from .checkpoint import read_config, read_weight_map
from .family import find_family

# All files other than weights that a converter or a runtime reads.
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "README.md", "LICENSE*"]


def download(hub_id: str, revision: str | None, head: HeadChoice | None) -> Path:
    """Download the checkpoint's small files and the shards that this conversion reads.

    head: None downloads no weights.
    Returns the folder. CheckpointError says why it failed and what to do.
    """
    try:
        return _download(hub_id, revision, head)
    except (GatedRepoError, RepositoryNotFoundError) as error:
        gated = isinstance(error, GatedRepoError)
        if not gated and (kind := _other_kind(hub_id)):
            raise CheckpointError(f"{hub_id}: expected a model on the hub, found {kind}") from None
        raise CheckpointError(
            f"{hub_id}: {'is gated' if gated else 'no such model, or it is private'} on the hub; "
            f"{'accept its terms there and ' if gated else 'check the name, or '}"
            "log in with `hf auth login`, or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{hub_id}: no revision {revision!r} on the hub") from None
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{hub_id}: incomplete in the local cache, and the hub cannot be reached: "
            f"{_first_line(error.__cause__ or error)}"
        ) from None
    except HFValidationError as error:
        raise CheckpointError(f"{hub_id}: expected OWNER/NAME: {error}") from None
    except MtpGgufError:
        raise
    except Exception as error:  # the underlying HTTP library raises its own exceptions
        refused = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
        step = "log in with `hf auth login`, or correct HF_TOKEN" if refused else "try again"
        raise CheckpointError(f"{hub_id}: download failed: {_first_line(error)}; {step}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _download(hub_id: str, revision: str | None, head: HeadChoice | None) -> Path:
    try:
        config = Path(hf_hub_download(hub_id, "config.json", revision=revision))
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        raise CheckpointError(_what_it_is(hub_id, revision)) from None
    family = find_family(read_config(config.parent), config)
    if head is None:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_SMALL_FILES))
    try:
        index = hf_hub_download(hub_id, INDEX_NAME, revision=revision)
    except EntryNotFoundError as error:
        # Offline, an uncached index looks absent; but it is always fetched before any weights.
        offline = isinstance(error, LocalEntryNotFoundError)
        if offline and not weight_files(config.parent):
            raise
        shards = [*WEIGHT_PATTERNS]
    else:
        weight_map = read_weight_map(Path(index).parent) or {}
        shards = sorted(
            {glob.escape(file) for tensor, file in weight_map.items() if family.wants(tensor, head)}
        )
    folder = Path(
        snapshot_download(hub_id, revision=revision, allow_patterns=[*_SMALL_FILES, *shards])
    )
    if not any(folder.glob("*.safetensors")):
        snapshot_download(hub_id, revision=revision, allow_patterns=[TORCH_PATTERN])
    return folder


def _other_kind(hub_id: str) -> str | None:
    """The kind of another hub repository (dataset, space) of this name; None if there is none."""
    for kind in ("dataset", "space"):
        with suppress(Exception):  # this only improves an error message, so failures do not matter
            if HfApi().repo_exists(hub_id, repo_type=kind):
                return f"a {kind}"
    return None


def _what_it_is(hub_id: str, revision: str | None) -> str:
    """An error message for a repository without config.json: what it contains and what to do."""
    siblings = HfApi().model_info(hub_id, revision=revision).siblings or []
    names = sorted(sibling.rfilename for sibling in siblings)
    expected = f"{hub_id}: expected a checkpoint with config.json, found"
    ggufs = [name for name in names if name.endswith(".gguf")]
    at = f"@{revision}" if revision else ""
    if ggufs:
        return (
            f"{expected} GGUF files; name one, such as hf://{hub_id}{at}/{ggufs[0]}, or use the "
            "checkpoint that they were made from"
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
