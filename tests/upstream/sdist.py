"""The pinned source distribution of llama-cpp-python, which carries the whole of llama.cpp.

Fetched once with pip and kept, unpacked, in the user's cache folder. pip prepares the metadata of
an sdist before it hands it over; `scikit-build-core` must be installed for that.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from functools import lru_cache
from pathlib import Path

VERSION = "0.3.36"
LLAMA_CPP_COMMIT = "0c1e57098"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"

_STEM = f"llama_cpp_python-{VERSION}"


def cache_folder() -> Path:
    """Name the folder that keeps what tests fetch (XDG base directory rules); make it."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "mtp-gguf" / "upstream"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _verified(archive: Path) -> bool:
    return hashlib.sha256(archive.read_bytes()).hexdigest() == SHA256


def archive() -> Path:
    """Return the path of the sdist, fetched if it is absent.

    Raises RuntimeError if pip fails or hands over a file with another checksum.
    """
    kept = cache_folder() / f"{_STEM}.tar.gz"
    if kept.is_file() and _verified(kept):
        return kept
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        command = [sys.executable, "-m", "pip", "download", f"llama-cpp-python=={VERSION}"]
        command += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", scratch]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = Path(scratch) / kept.name
        if done.returncode or not found.is_file():
            raise RuntimeError(f"pip could not fetch {_STEM}:\n{done.stderr or done.stdout}")
        if not _verified(found):
            raise RuntimeError(f"{found.name}: the checksum is not {SHA256}")
        found.replace(kept)
    return kept


@lru_cache
def llama_cpp_source() -> Path:
    """Return the root of the vendored llama.cpp tree, unpacked on first use. Never write there."""
    root = cache_folder() / _STEM
    source = root / "vendor" / "llama.cpp"
    if source.is_dir():
        return source
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        with tarfile.open(archive()) as tar:
            tar.extractall(scratch, filter="data")
        try:
            (Path(scratch) / _STEM).rename(root)
        except OSError:  # another process was faster
            if not source.is_dir():
                raise
    return source
