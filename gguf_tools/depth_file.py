"""Where depth "auto" keeps what it has learned of a model, for the next process that runs it.

native/src/depth_file.cpp reads and writes the file. A wrong one costs time and changes no text.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .machine.system import cache_root

# "0": nothing is kept. Another value: the path of the file. The patched llama-server reads it, too.
VARIABLE = "MTP_GGUF_DEPTH_FILE"
_MOST_FILES = 200  # of up to 128 KiB


def depth_file(files: Sequence[Path], *settings: object) -> Path | None:
    """Return the file for a model, in the user's cache; None if MTP_GGUF_DEPTH_FILE is 0.

    files: the model, and its head. settings: what else changes the cost of a batch. The file may
    not exist. When there are too many in the folder, those that were written first are removed.
    """
    named = os.environ.get(VARIABLE, "")
    if named:
        return None if named == "0" else Path(named)
    return cached_file("depth", ".depth", files, *settings)


def cached_file(kind: str, suffix: str, files: Sequence[Path], *settings: object) -> Path | None:
    """Return the file in a folder of the user's cache for models and settings, as `depth_file`.

    None if one of the files cannot be read.
    """
    folder = cache_root() / kind
    key: list[object] = [*settings]
    try:
        for file in files:
            status = file.stat()
            key += [str(file.resolve()), status.st_size, status.st_mtime_ns]
        found = sorted((path.stat().st_mtime_ns, path) for path in folder.glob(f"*{suffix}"))
    except OSError:  # a file that is being replaced
        return None
    for _, oldest in found[: max(0, len(found) - _MOST_FILES)]:
        with suppress(OSError):
            oldest.unlink()
    return folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}{suffix}"
