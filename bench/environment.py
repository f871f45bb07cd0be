"""The environment of a measurement: machine, libraries and model file."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from typing import TYPE_CHECKING

from mtp_gguf.gguf_tools.files.format import TensorInfo, open_gguf
from mtp_gguf.gguf_tools.machine.system import this_machine
from mtp_gguf.gguf_tools.model import shard_paths
from mtp_gguf.gguf_tools.profile import identify
from mtp_gguf.native.libraries.exact import kernels
from mtp_gguf.native.libraries.kernel_share import KernelShare, kernel_share

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """Machine and versions. kernels: `stock` or `patched`. when: UTC, ISO 8601."""

    when: str
    cpu: str
    cores: int
    device: str
    threads: int
    gpu_layers: int
    kernels: str
    system: str
    python: str
    versions: dict[str, str]


@dataclass(frozen=True)
class MeasuredFile:
    """The model file as profiles identify it. size: bytes. sha256: None until computed.

    kernels: what our kernels compute of its products on this CPU.
    """

    file: str
    size: int
    fingerprint: str
    kernels: KernelShare
    sha256: str | None = None


def describe_environment(device: str, threads: int, gpu_layers: int) -> Environment:
    """This machine, its libraries and the settings of the run."""
    machine = this_machine(kernels(), device)
    packages = ("mtp-gguf", "llama-cpp-python", "numpy")
    return Environment(
        when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cpu=machine.cpu,
        cores=machine.cores,
        device=machine.device,
        threads=threads,
        gpu_layers=gpu_layers,
        kernels=machine.kernels,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        versions={name: version(name) for name in packages},
    )


def describe_file(path: Path) -> MeasuredFile:
    """The file without its checksum, which takes time to compute."""
    identity = identify(path)
    tensors: list[TensorInfo] = []
    for shard in shard_paths(path):
        with open_gguf(shard) as file:
            tensors += file.tensors
    return MeasuredFile(path.name, identity.size, identity.fingerprint, kernel_share(tensors))


def sha256(path: Path) -> str:
    """SHA-256 over all shards of a model, one after the other."""
    digest = hashlib.sha256()
    for shard in shard_paths(path):
        with shard.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
