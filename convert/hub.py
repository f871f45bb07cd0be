"""A model by its hub id: only the files that a conversion needs, through huggingface_hub.

Resuming, caching, tokens, HF_ENDPOINT and offline mode are that library's.
"""

import glob
import re
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
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

from .checkpoint import read_config, read_weight_map
from .family import HeadChoice, find_family

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Everything beside the weights that a converter or a runtime reads.
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "README.md", "LICENSE*"]


def looks_like_hub_id(text: str) -> bool:
    """Whether `text` reads as OWNER/NAME and is not a local path."""
    return _HUB_ID.fullmatch(text) is not None and not Path(text).exists()


def download(hub_id: str, revision: str | None, head: HeadChoice | None) -> Path:
    """The folder with the checkpoint's small files and the shards that this conversion reads.

    head: None leaves all weights where they are.
    CheckpointError tells why it failed and what to do.
    """
    try:
        return _download(hub_id, revision, head)
    except (GatedRepoError, RepositoryNotFoundError) as error:
        gated = isinstance(error, GatedRepoError)
        raise CheckpointError(
            f"{hub_id}: {'is gated' if gated else 'no such model, or it is private'} on the hub; "
            f"{'accept its terms there and ' if gated else 'check the name, or '}"
            "log in with `hf auth login`, or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{hub_id}: no revision {revision!r} on the hub") from None
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{hub_id}: not whole in the local cache, and the hub cannot be reached: "
            f"{_first_line(error.__cause__ or error)}"
        ) from None
    except HFValidationError as error:
        raise CheckpointError(f"{hub_id}: expected OWNER/NAME: {error}") from None
    except MtpGgufError:
        raise
    except Exception as error:  # the HTTP library beneath has exceptions of its own
        refused = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
        step = "log in with `hf auth login`, or correct HF_TOKEN" if refused else "try again"
        raise CheckpointError(f"{hub_id}: download failed: {_first_line(error)}; {step}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _download(hub_id: str, revision: str | None, head: HeadChoice | None) -> Path:
    config = Path(hf_hub_download(hub_id, "config.json", revision=revision))
    family = find_family(read_config(config.parent), config)
    if head is None:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_SMALL_FILES))
    try:
        index = hf_hub_download(hub_id, INDEX_NAME, revision=revision)
    except EntryNotFoundError as error:
        # Offline nobody can say that there is none; but it is fetched before any weights.
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
