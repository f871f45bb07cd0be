"""The source distributions with the versions of llama.cpp that the patches are made for.

`patches/BASE` names the pinned one, which llama-cpp-python includes, and `patches/b11549/BASE` a
newer one. pip downloads a distribution once, with its usual configuration; its checksum is verified
and it is kept in the user's cache folder.
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
from mtp_gguf.gguf_tools.machine.system import cache_root

PIN = "pin"
_FOLDERS = {"llama-cpp-python": "vendor/llama.cpp", "xllamacpp": "thirdparty/llama.cpp"}


@dataclass(frozen=True)
class Base:
    """A version of llama.cpp that the patches are made for.

    version: of its distribution. sha256: of the source distribution. commit: of its llama.cpp.
    distribution: the name on PyPI. superseded: numbers of the patches that it needs no more.
    """

    version: str
    sha256: str
    commit: str
    distribution: str = "llama-cpp-python"
    superseded: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """The name of the distribution's file, without suffix, and of the folder in it."""
        return f"{self.distribution.replace('-', '_')}-{self.version}"

    @property
    def folder(self) -> PurePosixPath:
        """The folder of llama.cpp in the distribution."""
        return PurePosixPath(self.stem, _FOLDERS[self.distribution])


@cache
def base_names() -> list[str]:
    """The versions of llama.cpp that the patches are made for, the pinned one first."""
    folders = resources.files("mtp_gguf.patches").iterdir()
    return [PIN, *sorted(f.name for f in folders if f.is_dir() and (f / "BASE").is_file())]


@cache
def base(name: str = PIN) -> Base:
    """The version called `name`, from its BASE file, which has a name and a value on each line."""
    folder = resources.files("mtp_gguf.patches")
    text = (folder / "BASE" if name == PIN else folder / name / "BASE").read_text(encoding="utf-8")
    values = [line.split() for line in text.splitlines()]
    found = dict(values)
    superseded = tuple(value for key, value in values if key == "superseded")
    distribution, version = values[0]
    return Base(version, found["sha256"], found["llama.cpp"], distribution, superseded)


def cache_folder(name: str) -> Path:
    """The folder `name` in our part of the user's cache (XDG rules), created if needed."""
    folder = cache_root() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServerError(f"{folder}: cannot be made: {error.strerror}") from None
    return folder


def fetch_archive(name: str = PIN) -> Path:
    """The path of the source distribution of a base, downloaded with pip unless it is cached.

    ServerError if pip fails or the file is not the one that its BASE names.
    """
    folder = cache_folder("upstream")
    cached = folder / f"{base(name).stem}.tar.gz"
    if cached.is_file() and _sha256(cached) == base(name).sha256:
        return cached
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _download(Path(scratch), base(name))
        found = Path(scratch) / cached.name
        check_archive(found, name)
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


def check_archive(path: Path, name: str = PIN) -> None:
    """ServerError unless `path` is the source distribution of a base, byte for byte."""
    if not path.is_file():
        raise ServerError(f"{path}: expected the source distribution, found no file")
    found = _sha256(path)
    if found != base(name).sha256:
        raise ServerError(f"{path}: expected sha256 {base(name).sha256}, found {found}")


def unpack_llama_cpp(
    archive: Path, target: Path, without: Sequence[str] = (), name: str = PIN
) -> None:
    """Unpack the llama.cpp tree of the distribution as the folder `target`.

    target: must not exist; appears only when it is complete. without: folders at the top of the
    tree to leave out. name: the base. Git's own files are left out too, so that no tool takes the
    tree for a part of a repository.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        unpacked = Path(scratch) / "tree"
        with tarfile.open(archive) as tar:
            # The filter rejects members outside the folder: absolute names, `..`, links.
            members = _llama_cpp_members(tar, without, base(name).folder)
            tar.extractall(unpacked, members, filter="data")
        unpacked.rename(target)


@lru_cache
def llama_cpp_source(name: str = PIN) -> Path:
    """The unmodified llama.cpp tree of a base in the cache, unpacked on first use; read only."""
    source = cache_folder("upstream") / f"llama.cpp-{base(name).commit[:9]}"
    if not source.is_dir():
        archive = fetch_archive(name)
        try:
            unpack_llama_cpp(archive, source, name=name)
        except OSError:  # another process has unpacked it meanwhile
            if not source.is_dir():
                raise
    return source


def _llama_cpp_members(
    tar: tarfile.TarFile, without: Sequence[str], root: PurePosixPath
) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        path = PurePosixPath(member.name)
        if not path.is_relative_to(root) or ".git" in path.parts:
            continue
        name = path.relative_to(root)
        if name.parts[:1] not in [(folder,) for folder in without]:
            yield member.replace(name=str(name), deep=False)


def _download(folder: Path, wanted: Base) -> None:
    """Download the distribution with pip: no wheel, no dependencies.

    pip prepares the metadata of an sdist after downloading it, which needs the build backend; pip
    downloads that too unless it is installed. Only the distribution itself is named for
    --no-binary: with ":all:", pip would compile what the backend needs, Cython for instance.
    """
    command = [sys.executable, "-m", "pip", "download", f"{wanted.distribution}=={wanted.version}"]
    command += ["--no-deps", "--no-binary", wanted.distribution, "--dest", str(folder)]
    if wanted.distribution == base().distribution and find_spec("scikit_build_core"):
        command.append("--no-build-isolation")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise ServerError(f"pip could not fetch {wanted.stem}: {words[-1]}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
