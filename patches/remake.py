"""Re-make and check the patches.

    python patches/remake.py checkout DIR    DIR becomes a git repository of the pristine llama.cpp,
                                             a commit for each patch on top: change, commit, rebase
    python patches/remake.py make DIR        write the patches anew from the commits of DIR
    python patches/remake.py check           do both in a temporary folder and compare

`make` stops where DIR has changes that are in no commit, and where a patch would not apply to the
pristine tree. The patches do not depend on anybody's git settings, name or clock.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mtp_gguf.server.patches import apply, read_patches
from mtp_gguf.server.upstream_source import fetch_archive, unpack_llama_cpp

PATCHES = Path(__file__).parent
BASE_TAG = "base"
NAME = "mtp-gguf"
ADDRESS = "mtp-gguf@localhost"
ENVIRONMENT = {
    **os.environ,
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_AUTHOR_NAME": NAME,
    "GIT_AUTHOR_EMAIL": ADDRESS,
    "GIT_COMMITTER_NAME": NAME,
    "GIT_COMMITTER_EMAIL": ADDRESS,
}
# Whole blob names, because the length of short ones depends on the repository.
FORMAT = ("--zero-commit", "--no-signature", "--no-numbered", "--full-index", "--no-stat")


def git(folder: Path, *words: str) -> str:
    """Run git in `folder`; its output. Ends the program with git's own words where it fails."""
    done = subprocess.run(
        ["git", *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"git {words[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def checkout(folder: Path) -> None:
    """Make `folder`, which must not exist, a repository with a commit for each patch."""
    if folder.exists():
        sys.exit(f"{folder}: exists")
    unpack_llama_cpp(fetch_archive(), folder)
    git(folder, "init", "--quiet", "--initial-branch", "patches")
    git(folder, "config", "user.name", NAME)
    git(folder, "config", "user.email", ADDRESS)
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", "llama.cpp as the source distribution has it")
    git(folder, "tag", BASE_TAG)
    for path in sorted(PATCHES.glob("*.patch")):
        git(folder, "am", "--quiet", str(path.resolve()))


def make(folder: Path, target: Path) -> list[Path]:
    """Write the commits of `folder` to `target` as patches; their paths."""
    if dirty := git(folder, "status", "--porcelain", "--untracked-files=all"):
        sys.exit(f"{folder}: has changes that are in no commit:\n{dirty.rstrip()}")
    for old in target.glob("*.patch"):
        old.unlink()
    span = f"{BASE_TAG}..HEAD"
    names = git(folder, "format-patch", *FORMAT, "-o", str(target.resolve()), span)
    return [Path(name) for name in names.split("\n") if name]


def check() -> None:
    """The patches apply as users get them, and are what their own commits make."""
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "plain"
        unpack_llama_cpp(fetch_archive(), plain)
        apply(read_patches(), plain)
        folder, made = Path(scratch) / "llama.cpp", Path(scratch) / "made"
        checkout(folder)
        made.mkdir()
        again = {path.name: path.read_bytes() for path in make(folder, made)}
    here = {path.name: path.read_bytes() for path in PATCHES.glob("*.patch")}
    differing = sorted(
        name for name in again.keys() | here.keys() if again.get(name) != here.get(name)
    )
    if differing:
        sys.exit(f"not as `make` writes them: {', '.join(differing)}")


def main(words: Sequence[str]) -> None:
    """Do what the command line says."""
    match words:
        case ["checkout", folder]:
            checkout(Path(folder))
        case ["make", folder]:
            for path in make(Path(folder), PATCHES):
                print(path.name)
            check()
        case ["check"]:
            check()
            print(f"{len(read_patches())} patches apply and are as `make` writes them")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
