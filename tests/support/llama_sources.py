"""Builds libraries of llama.cpp: of other versions, from source distributions that pip downloads,
and with our patches.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from mtp_gguf.server.patches import apply as apply_patches
from mtp_gguf.server.patches import read_patches
from mtp_gguf.server.upstream_source import fetch_archive, unpack_llama_cpp

# What building such a distribution takes, even if only its metadata is wanted
TOOLS = ("scikit-build-core", "setuptools", "setuptools_scm", "cython", "wheel")


def built(
    folder: Path, name: str, version: str, inside: str, *targets: str, options: Sequence[str] = ()
) -> Path:
    """The folder of the libraries, built from the sources of this version.

    inside: where llama.cpp is in the source distribution. options: more of CMake's.
    """
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "install", "-q", *TOOLS], check=True)
    source = ["--no-deps", "--no-build-isolation", "--no-binary", name, f"{name}=={version}"]
    subprocess.run([*pip, "download", "-q", "-d", str(folder), *source], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(folder, filter="data")
    (tree,) = folder.glob(f"*/{inside}")
    return compiled(tree, folder / "build", targets, options)


def built_with_patches(folder: Path, *targets: str, options: Sequence[str] = ()) -> Path:
    """The same from the pinned sources with our patches."""
    source = folder / "source"
    unpack_llama_cpp(fetch_archive(), source)
    apply_patches(read_patches(), source)
    return compiled(source, folder / "build", targets, options)


def compiled(tree: Path, build: Path, targets: Sequence[str], options: Sequence[str]) -> Path:
    parts = ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER")
    off = [f"-DLLAMA_BUILD_{part}=OFF" for part in parts]
    all_options = [
        *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_CURL=OFF"),
        *(*off, *options),
    ]
    subprocess.run(["cmake", "-G", "Ninja", "-S", tree, "-B", build, *all_options], check=True)
    subprocess.run(["cmake", "--build", build, "--target", *targets], check=True)
    return build / "bin"
