"""What a bench was made on: the machine, the libraries, the file."""

from __future__ import annotations

import hashlib
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mtp_gguf.gguf_tools.machine import this_machine
from mtp_gguf.gguf_tools.model import shard_paths
from mtp_gguf.gguf_tools.profile import identify
from mtp_gguf.native.exact import kernels


def about_environment(device: str, threads: int, gpu_layers: int) -> dict[str, Any]:
    """Machine and versions."""
    machine = this_machine(kernels(), device)
    packages = ("mtp-gguf", "llama-cpp-python", "numpy")
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": machine.cpu,
        "cores": machine.cores,
        "device": machine.device,
        "threads": threads,
        "gpu_layers": gpu_layers,
        "kernels": machine.kernels,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def about_model(path: Path) -> dict[str, Any]:
    """The file as profiles know it; sha256 is None until it is worked out."""
    identity = identify(path)
    return {
        "file": path.name,
        "size": identity.size,
        "fingerprint": identity.fingerprint,
        "sha256": None,
    }


def sha256(path: Path) -> str:
    """Of a model's files in a row."""
    digest = hashlib.sha256()
    for shard in shard_paths(path):
        with shard.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
