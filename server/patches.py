"""Our additions to llama.cpp: the patches, and the sources of the head that the server includes."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from mtp_gguf.gguf_tools.errors import ServerError

from .deltas import apply_delta
from .upstream_source import PIN, base, base_names

UPSTREAM = "upstream"  # the folder of the bug fixes
SOURCES = "sources"  # the folder of the files that our own patches add
# Patches that no other one needs; a build can leave them out.
OPTIONAL = (
    *("0001", "0003", "0004", "0008", "0009", "0010", "0011", "0012", "0013", "0015"),
    *("0016", "0017", "0018", "0108", "0109", "0111"),
)
APPLIES, CONFLICTS, SUPERSEDED = "applies", "conflicts", "superseded"
VARIABLE = "MTP_GGUF_PATCHES"
_NAMED_ONLY = re.compile(
    rb"^diff --git a/(\S+) b/\1\nnew file mode 100644\n(?!index )", re.MULTILINE
)
_RENEW = 'renew it as "Deltas" in patches/README.md says'
HEAD_FOLDER = "vendor/mtp-head"  # in a llama.cpp tree; named in the patch that uses it


@dataclass(frozen=True)
class Addition:
    """A file: its `name` (a patch's begins with its number) and its `data`."""

    name: str
    data: bytes

    @property
    def stem(self) -> str:
        """The name without suffix."""
        return Path(self.name).stem


def read_patches(name: str = PIN) -> list[Addition]:
    """The patches in the order of their numbers: bug fixes of llama.cpp, then our own.

    name: the base that they are for. Its folder has a delta for each patch that differs there, or
    the whole patch if little is the same. ServerError if a delta does not fit its patch.
    """
    found = _files(UPSTREAM, ".patch") | _files("", ".patch")
    if name != PIN:
        found |= _files(name, ".patch")
        for number, delta in _files(name, ".delta").items():
            patch = found[number]
            try:
                found[number] = Addition(patch.name, apply_delta(patch.data, delta.data))
            except ValueError as error:
                raise ServerError(f"patches/{name}/{delta.name}: {error}; {_RENEW}") from None
    return [found[number] for number in sorted(found) if number not in base(name).superseded]


def _files(name: str, suffix: str) -> dict[str, Addition]:
    """The files with `suffix` in the folder `name` of patches/, by their numbers."""
    folder = resources.files("mtp_gguf.patches")
    files = (folder / name if name else folder).iterdir()
    found = (Addition(f.name, _whole(f.read_bytes())) for f in files if f.name.endswith(suffix))
    return {file.name[:4]: file for file in found}


def _whole(patch: bytes) -> bytes:
    """The patch with the files of SOURCES, of which it names only path and mode."""

    def added(match: re.Match[bytes]) -> bytes:
        name = match[1].decode()
        data = (resources.files("mtp_gguf.patches") / SOURCES / name).read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        lines = data.removesuffix(b"\n").split(b"\n")
        head = f"index {'0' * 40}..{blob}\n--- /dev/null\n+++ b/{name}\n"
        hunk = f"@@ -0,0 +1,{len(lines)} @@\n"
        return match[0] + (head + hunk).encode() + b"".join(b"+%s\n" % line for line in lines)

    return _NAMED_ONLY.sub(added, patch)


def purposes() -> dict[str, str]:
    """The purpose of each patch by its number, from the index of patches/."""
    index = (resources.files("mtp_gguf.patches") / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{4}) \| (.+?)(?:\. |\.? \|)", index, re.MULTILINE)
    return {number: text.replace("`", "") for number, text in rows}


def further_patches() -> list[Addition]:
    """The patches that the environment variable MTP_GGUF_PATCHES names, applied after ours.

    ServerError if a file cannot be read.
    """
    named = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    try:
        return [Addition(Path(name).name, Path(name).read_bytes()) for name in named]
    except OSError as error:
        raise ServerError(f"{VARIABLE}: {error.filename}: {error.strerror}") from None


def read_head_sources() -> list[Addition]:
    """The sources of the head and of its driver in llama-server, by their names in HEAD_FOLDER."""
    native = resources.files("mtp_gguf.native")
    found = [Addition("sources.cmake", (native / "sources.cmake").read_bytes())]
    waiting = [(folder, native / folder) for folder in ("include", "server", "src")]
    while waiting:
        name, path = waiting.pop()
        if path.is_dir():  # sessions are not for llama-server
            waiting += [(f"{name}/{p.name}", p) for p in path.iterdir() if p.name != "session"]
        elif name.endswith((".h", ".cpp")):
            found.append(Addition(name, path.read_bytes()))
    return sorted(found, key=lambda source: source.name)


def digest(additions: Sequence[Addition]) -> str:
    """A digest of the names and contents of files."""
    state = hashlib.sha256()
    for addition in additions:
        state.update(f"{addition.name} {len(addition.data)}\n".encode())
        state.update(addition.data)
    return state.hexdigest()


@dataclass(frozen=True)
class Fit:
    """Whether `patch` fits some sources: APPLIES, CONFLICTS or SUPERSEDED."""

    patch: Addition
    state: str


def fit_series(tree: Path) -> list[Fit]:
    """How each patch fits the llama.cpp tree `tree`, which is not changed.

    Of a patch that has versions for several bases, the first one that fits is taken. A patch that
    does not apply is left out, so later ones that build on it conflict as well.
    """
    versions: dict[str, list[Addition]] = {}
    for name in base_names():
        for patch in read_patches(name):
            known = versions.setdefault(patch.name[:4], [])
            if patch not in known:
                known.append(patch)
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in sorted(versions):
            fits = (Fit(p, fit_copy(p, tree, Path(scratch))) for p in versions[number])
            conflict = Fit(versions[number][0], CONFLICTS)
            found.append(next((one for one in fits if one.state != CONFLICTS), conflict))
    return found


def fit_copy(patch: Addition, tree: Path, copies: Path) -> str:
    """`fit` for copies of the files of `tree` in the folder `copies`, copied when first needed."""
    copy_old_files(patch, tree, copies)
    return fit(patch, copies)


def copy_old_files(patch: Addition, tree: Path, copies: Path) -> None:
    """Copy the files of `tree` that `patch` changes to the folder `copies`, unless it has them."""
    for name in re.findall(rb"^--- a/(.+)$", patch.data, re.MULTILINE):
        original, copy = tree / name.decode(), copies / name.decode()
        if original.is_file() and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(original.read_bytes())


def add_head(sources: Sequence[Addition], tree: Path) -> None:
    """Write the head's `sources` into the llama.cpp tree `tree`, unless unchanged."""
    for source in sources:
        path = tree / HEAD_FOLDER / source.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != source.data:
            path.write_bytes(source.data)


def apply(patches: Sequence[Addition], tree: Path) -> None:
    """Apply `patches` to the llama.cpp tree `tree`, which must not be a git repository.

    ServerError names the patch that does not fit exactly, or what is missing to apply it.
    """
    for patch in patches:
        if message := _run(patch, tree):
            raise ServerError(f"{patch.name}: does not fit llama.cpp: {message}")


def fit(patch: Addition, tree: Path) -> str:
    """Apply `patch` to the llama.cpp tree `tree` if it fits exactly; returns APPLIES then.

    SUPERSEDED if the tree contains its change already, else CONFLICTS; the tree is unchanged then.
    """
    if not _run(patch, tree, check=True):
        apply([patch], tree)
        return APPLIES
    return CONFLICTS if _run(patch, tree, reverse=True, check=True) else SUPERSEDED


def _run(patch: Addition, tree: Path, *, reverse: bool = False, check: bool = False) -> str | None:
    """Apply `patch` in `tree`; returns None, or the first line of the message if it does not fit.

    reverse: remove its change instead. check: change nothing.
    """
    # In a repository that contains the tree, git would look for the patched files from its root.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    done = subprocess.run(
        _command(reverse=reverse, check=check),
        cwd=tree,
        env=environment,
        input=patch.data,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if not done.returncode:
        return None
    return (done.stdout.decode(errors="replace").strip().splitlines() or ["no message"])[0]


def _command(*, reverse: bool, check: bool) -> list[str]:
    if git := shutil.which("git"):
        words = [git, "apply", "--whitespace=nowarn"]
        return [*words, *(["-R"] if reverse else []), *(["--check"] if check else []), "-"]
    if patch := shutil.which("patch"):
        words = [patch, "-p1", "--batch", "--fuzz=0", "--no-backup-if-mismatch"]
        dry = ["--dry-run"] if check else []
        return [*words, "--reverse" if reverse else "--forward", *dry]
    raise ServerError("patching llama.cpp takes git or patch, and neither is on the PATH")
