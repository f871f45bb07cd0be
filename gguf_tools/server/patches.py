"""The patches on llama.cpp that the package ships, and putting them onto a source tree."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..errors import ServerError


@dataclass(frozen=True)
class Patch:
    """A patch file: its `name`, which begins with its number, and its `data`."""

    name: str
    data: bytes


def read_patches() -> list[Patch]:
    """The patches in the order of their numbers."""
    files = resources.files("mtp_gguf.patches").iterdir()
    found = (Patch(f.name, f.read_bytes()) for f in files if f.name.endswith(".patch"))
    return sorted(found, key=lambda patch: patch.name)


def digest(patches: Sequence[Patch]) -> str:
    """Names the patches and their content: equal only where both are."""
    state = hashlib.sha256()
    for patch in patches:
        state.update(f"{patch.name} {len(patch.data)}\n".encode())
        state.update(patch.data)
    return state.hexdigest()


def apply(patches: Sequence[Patch], tree: Path) -> None:
    """Put `patches` onto the llama.cpp tree `tree`, which must be no git repository of its own.

    ServerError names the patch that does not fit exactly, or what is missing to apply it.
    """
    command = _command()
    # A repository around the tree would make git look for the patched files there.
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
