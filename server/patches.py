"""Our additions to llama.cpp: the patches, and the sources of the head that the server includes."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from mtp_gguf.gguf_tools.errors import ServerError

HEAD_FOLDER = "vendor/mtp-head"  # in a llama.cpp tree; named in the patch that uses it


@dataclass(frozen=True)
class Addition:
    """A file: its `name` (a patch's begins with its number) and its `data`."""

    name: str
    data: bytes


def read_patches() -> list[Addition]:
    """The patches in the order of their numbers."""
    files = resources.files("mtp_gguf.patches").iterdir()
    found = (Addition(f.name, f.read_bytes()) for f in files if f.name.endswith(".patch"))
    return sorted(found, key=lambda patch: patch.name)


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
    command = _command()
    # In a repository that contains the tree, git would look for the patched files from its root.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    for patch in patches:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            input=patch.data,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode:
            words = done.stdout.decode(errors="replace").strip().splitlines() or ["no message"]
            raise ServerError(f"{patch.name}: does not fit llama.cpp: {words[0]}")


def _command() -> list[str]:
    if git := shutil.which("git"):
        return [git, "apply", "--whitespace=nowarn", "-"]
    if patch := shutil.which("patch"):
        return [patch, "-p1", "--batch", "--forward", "--fuzz=0", "--no-backup-if-mismatch"]
    raise ServerError("patching llama.cpp takes git or patch, and neither is on the PATH")
