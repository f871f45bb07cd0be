"""Edit the patches, check them, and move them to another llama.cpp.

    python patches/remake.py checkout DIR [BASE]    make DIR a git repository of the pristine
                                                    llama.cpp with a commit for each patch
    python patches/remake.py make DIR [SERIES]      write the commits of DIR as patches: here, or as
                                                    the series in the folder SERIES
    python patches/remake.py check [BASE]           do both in a temporary folder and compare
    python patches/remake.py status [TREE [BASE]]   say for each patch whether it applies to the
                                                    folder TREE, another llama.cpp, and its size
    python patches/remake.py hunks TREE             list the hunks that do not apply to the folder
                                                    TREE, another llama.cpp, and change nothing
    python patches/remake.py rebase TREE            list them, and commit the patches in TREE

BASE is `pin`, or the name of a folder here, such as b11549: its series are the patches here,
changed by the deltas in that folder.

`make` stops if DIR has changes that are not committed, or if a patch would not apply to the
pristine tree. The patches do not depend on git settings, the user's name or the time. A series in
another folder has deltas of the patches that differ from those here.

Bug fixes of llama.cpp come first: the commits up to the last whose subject is that of a patch in
upstream/ become the patches of that folder, numbered from 0001. The others are numbered from 0101,
and the files that they add are in sources/.

`rebase` makes TREE a git repository: the tag `base` is TREE as it was, `pinned` the llama.cpp that
the patches are made for. It commits patch after patch with three-way merges and stops at the first
conflict, like `git rebase`: edit the files, `git add` them and run `git am --continue`. Then
compile, amend the commits, and run `make`. The sources of the head lie in TREE already.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.server.deltas import apply_delta, make_delta
from mtp_gguf.server.patches import (
    HEAD_FOLDER,
    SOURCES,
    UPSTREAM,
    add_head,
    apply,
    copy_old_files,
    fit_copy,
    read_head_sources,
    read_patches,
)
from mtp_gguf.server.upstream_source import (
    PIN,
    base_names,
    fetch_archive,
    llama_cpp_source,
    unpack_llama_cpp,
)

PATCHES = Path(__file__).parent
FIRST_OWN = 101  # the number of our first patch; the bug fixes are numbered from 1
BASE_TAG = "base"
PINNED_TAG = "pinned"
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

_ADDED = re.compile(
    rb"^(diff --git a/(\S+) b/\2\nnew file mode 100644\n)index \S+\n--- /dev/null\n\+\+\+ b/\2\n"
    rb"@@ -0,0 \+1,\d+ @@\n((?:\+.*\n)+)(?![+\\])",
    re.MULTILINE,
)
_SECTION = re.compile(rb"^(?=diff --git )", re.MULTILINE)
_HUNK = re.compile(r"^(?=@@ -)", re.MULTILINE)


@dataclass(frozen=True)
class FailedHunk:
    """A hunk that does not apply to `file`: its `header`, and the reason in a sentence."""

    file: str
    header: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.header}: {self.reason}"


def git(folder: Path, *words: str, index: Path | None = None, data: bytes = b"") -> str:
    """Run git in `folder` and return its output; exit with git's own words if it fails.

    index: the index file to use instead of that of the repository. data: the standard input.
    """
    environment = {**ENVIRONMENT, "GIT_INDEX_FILE": str(index)} if index else ENVIRONMENT
    done = subprocess.run(
        ["git", *words], cwd=folder, env=environment, input=data, capture_output=True, check=False
    )
    if done.returncode:
        sys.exit(f"git {words[0]}: {(done.stderr or done.stdout).decode().strip()}")
    return done.stdout.decode()


def make_repository(folder: Path, message: str) -> None:
    """Commit everything in `folder` as BASE_TAG of a new repository."""
    git(folder, "init", "--quiet", "--initial-branch", "patches")
    git(folder, "config", "user.name", NAME)
    git(folder, "config", "user.email", ADDRESS)
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", message)
    git(folder, "tag", BASE_TAG)


def checkout(folder: Path, name: str = PIN) -> None:
    """Make `folder`, which must not exist, a repository with a commit for each patch."""
    if folder.exists():
        sys.exit(f"{folder}: exists")
    unpack_llama_cpp(fetch_archive(name), folder, name=name)
    make_repository(folder, "llama.cpp as the source distribution has it")
    for patch in read_patches(name):
        git(folder, "am", "--quiet", data=patch.data)


def make(folder: Path, target: Path) -> list[Path]:
    """Write the commits of `folder` to `target` as patches; returns their paths."""
    if dirty := git(folder, "status", "--porcelain", "--untracked-files=all"):
        sys.exit(f"{folder}: has changes that are in no commit:\n{dirty.rstrip()}")
    fixes = {_title(path.name) for path in (PATCHES / UPSTREAM).glob("*.patch")}
    with tempfile.TemporaryDirectory() as scratch:
        span = f"{BASE_TAG}..HEAD"
        names = git(folder, "format-patch", *FORMAT, "-o", scratch, span).split("\n")
        made = [Path(name) for name in names if name]
        last = max((i for i, path in enumerate(made, 1) if _title(path.name) in fixes), default=0)
        (target / UPSTREAM).mkdir(parents=True, exist_ok=True)
        for old in [*target.glob("*.patch"), *(target / UPSTREAM).glob("*.patch")]:
            old.unlink()
        return [
            *_numbered(made[:last], target / UPSTREAM, 1),
            *_numbered(made[last:], target, FIRST_OWN),
        ]


def _title(name: str) -> str:
    """The name of a patch without its number."""
    return name[5:]


def _numbered(made: Sequence[Path], target: Path, first: int) -> list[Path]:
    """Move `made` to the folder `target` with numbers from `first`; returns the new paths."""
    numbered = [target / f"{i:04}-{_title(path.name)}" for i, path in enumerate(made, first)]
    for path, new in zip(made, numbered, strict=True):
        shutil.move(path, new)
    return numbered


def take_out_sources(patches: Iterable[Path]) -> None:
    """Replace the files of SOURCES by those that our own patches add, which then only name them."""
    shutil.rmtree(PATCHES / SOURCES, ignore_errors=True)

    def take_out(match: re.Match[bytes]) -> bytes:
        path = PATCHES / SOURCES / match[2].decode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(re.sub(rb"^\+", b"", match[3], flags=re.MULTILINE))
        return match[1]

    for patch in patches:
        if patch.parent == PATCHES:
            patch.write_bytes(_ADDED.sub(take_out, patch.read_bytes()))


def make_series(folder: Path, target: Path) -> list[Path]:
    """Write the commits of `folder` to `target` as deltas of the patches here.

    Only those whose change differs from the patch here; a commit belongs to the patch with the same
    subject. Whole patches are written if they are shorter, or if git misplaces hunks without them.
    A delta has line numbers if a hunk fits in several places.
    """
    with tempfile.TemporaryDirectory() as scratch:
        made = make(folder, Path(scratch))
        commits = git(folder, "rev-list", "--reverse", f"{BASE_TAG}..HEAD").split()
        here = {_title(patch.name): patch for patch in read_patches()}
        if unknown := [path.name for path in made if _title(path.name) not in here]:
            sys.exit(f"{folder}: commits with other subjects than the patches: {unknown}")
        target.mkdir(parents=True, exist_ok=True)
        for old in [*target.glob("*.patch"), *target.glob("*.delta")]:
            old.unlink()
        written = []
        for commit, path in zip(commits, made, strict=True):
            own, whole = here[_title(path.name)], path.read_bytes()
            if _gives(folder, own.data, commit):
                continue
            new, data = target / own.name, whole
            shifts = _is_ambiguous(folder, whole, commit)
            delta = make_delta(own.data, whole, context=1, shifts=shifts)
            shorter = delta.count(b"\n") < whole.count(b"\n")
            if shorter and _gives(folder, apply_delta(own.data, delta), commit):
                new, data = new.with_suffix(".delta"), delta
            new.write_bytes(data)
            written.append(new)
    return written


def check(name: str = PIN) -> None:
    """Check that the patches apply, and that `make` on their own commits reproduces them."""
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "plain"
        unpack_llama_cpp(fetch_archive(name), plain, name=name)
        apply(read_patches(name), plain)
        folder, made = Path(scratch) / "llama.cpp", Path(scratch) / "made"
        checkout(folder, name)
        paths = make(folder, made) if name == PIN else make_series(folder, made)
        again = {path.name: path.read_bytes() for path in paths}
    if name == PIN:
        here = {patch.name: patch.data for patch in read_patches()}
    else:
        files = (path for path in (PATCHES / name).iterdir() if path.suffix)
        here = {path.name: path.read_bytes() for path in files}
    differing = sorted(
        name for name in again.keys() | here.keys() if again.get(name) != here.get(name)
    )
    if differing:
        sys.exit(f"not as `make` writes them: {', '.join(differing)}")


def print_status(tree: Path, name: str = PIN) -> None:
    """Print whether each patch applies to a copy of `tree`, and its hunks, files and lines.

    A patch that does not apply is left out, so later ones that build on it conflict as well. Hunks
    are those in existing files.
    """
    _check_sources(tree)
    patches = read_patches(name)
    width = max(len(patch.stem) for patch in patches)
    print(f"{'':{width}}  {'':10}   hunks   files   lines")
    states: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        for patch in patches:
            state = fit_copy(patch, tree, Path(scratch))
            states[state] += 1
            print(f"{patch.stem:{width}}  {state:10} {_columns(_size(patch.data))}")
    for kind, own in (("bug fixes", False), ("own patches", True)):
        kin = [patch for patch in patches if (int(patch.name[:4]) >= FIRST_OWN) == own]
        sizes = [_size(patch.data) for patch in kin]
        total = [sum(column) for column in zip(*sizes, strict=True)]
        print(f"{f'{len(sizes)} {kind}':{width}}  {'':10} {_columns(total)}")
    print(", ".join(f"{count} {state}" for state, count in states.items()))


def _columns(numbers: Iterable[int]) -> str:
    return " ".join(f"{number:7,}" for number in numbers)


def _size(patch: bytes) -> tuple[int, int, int]:
    """The hunks of `patch` in existing files, the files, and the lines added or removed."""
    hunks = files = lines = 0
    for section in _SECTION.split(patch)[1:]:
        head, *parts = re.split(rb"^@@ -", section, flags=re.MULTILINE)
        files += 1
        hunks += 0 if b"\n--- /dev/null" in head else len(parts)
        lines += sum(len(re.findall(rb"^[-+]", part, re.MULTILINE)) for part in parts)
    return hunks, files, lines


def list_hunks(tree: Path) -> None:
    """Print, patch by patch, the hunks that do not apply exactly to a copy of `tree`.

    A failed hunk is left out, so later ones that build on it fail as well.
    """
    _check_sources(tree)
    hunks = failing = 0
    with tempfile.TemporaryDirectory() as scratch:
        for patch in read_patches():
            copy_old_files(patch, tree, Path(scratch))
            failed = failed_hunks(patch.data, Path(scratch))
            count = len(re.findall(rb"^@@ -", patch.data, re.MULTILINE))
            hunks += count
            failing += len(failed)
            found = f"{len(failed)} of {count} hunks fail" if failed else "applies"
            print(f"{patch.name}: {found}")
            for hunk in failed:
                print(f"    {hunk}")
    print(f"{failing} of {hunks} hunks fail", flush=True)


def rebase(tree: Path) -> None:
    """List the hunks that do not apply to `tree`, then commit patch after patch there.

    Exits with the next step if a patch has conflicts.
    """
    if (tree / ".git").exists():
        sys.exit(f"{tree}: expected sources without .git, found a repository; give a copy")
    list_hunks(tree)
    patches = read_patches()
    make_repository(tree, "another llama.cpp")
    # The head's sources, which the patched server includes; needed to compile, not committed.
    with (tree / ".git" / "info" / "exclude").open("a", encoding="utf-8") as file:
        file.write(f"/{HEAD_FOLDER}/\n")
    add_head(read_head_sources(), tree)
    with tempfile.TemporaryDirectory() as scratch:
        # The files that the patches were made for, as three-way merges need them.
        pinned = Path(scratch) / "llama.cpp"
        checkout(pinned)
        refs = [
            f"refs/tags/{BASE_TAG}:refs/tags/{PINNED_TAG}",
            f"HEAD:refs/tags/{PINNED_TAG}-patches",
        ]
        git(tree, "fetch", "--quiet", "--no-tags", str(pinned), *refs)
    done = subprocess.run(
        ["git", "am", "--quiet", "--3way"],
        cwd=tree,
        env=ENVIRONMENT,
        input=b"".join(patch.data for patch in patches),
        capture_output=True,
        check=False,
    )
    if not done.returncode:
        print(f"all patches are committed in {tree}: compile it, then run `make`")
        return
    state = tree / ".git" / "rebase-apply" / "next"
    stopped = f"{patches[int(state.read_text()) - 1].name}: " if state.is_file() else ""
    conflicts = git(tree, "diff", "--name-only", "--diff-filter=U").split()
    where = f"conflicts in {', '.join(conflicts)}" if conflicts else done.stderr.decode().strip()
    sys.exit(
        f"{stopped}{where}; in {tree}, fix them, `git add` the files and run `git am --continue` "
        f"(`git diff {PINNED_TAG} {BASE_TAG} -- FILE` shows what changed in llama.cpp)"
    )


def failed_hunks(patch: bytes, tree: Path) -> list[FailedHunk]:
    """Apply the hunks of `patch` that match `tree` exactly, at any line; returns the others.

    tree: must not be in a git repository. The hunks of a file are independent of each other.
    """
    failed: list[FailedHunk] = []
    environment = {**ENVIRONMENT, "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    for section in _SECTION.split(patch)[1:]:
        done = subprocess.run(
            ["git", "apply", "--reject", "--whitespace=nowarn", "-"],
            cwd=tree,
            env=environment,
            input=section,
            capture_output=True,
            check=False,
        )
        if not done.returncode:
            continue
        text = section.decode()
        file = text.split("\n", 1)[0].rpartition(" b/")[2]
        rejected = (tree / file).with_name(f"{Path(file).name}.rej")
        missing = not rejected.is_file()
        if not missing:
            text = rejected.read_text(encoding="utf-8")
            rejected.unlink()
        for hunk in _HUNK.split(text)[1:]:
            header, *lines = hunk.splitlines()
            old = [line[1:] for line in lines if line[:1] in ("-", " ")]
            reason = _words(done.stderr) if missing else _reason(old, tree / file)
            failed.append(FailedHunk(file, header, reason))
    return failed


def _check_sources(tree: Path) -> None:
    if not (tree / "include" / "llama.h").is_file():
        sys.exit(f"{tree}: expected the sources of llama.cpp, found no include/llama.h")


def _reason(old: Sequence[str], file: Path) -> str:
    """The reason why a hunk with these old lines does not apply to `file`."""
    present = set(file.read_text(encoding="utf-8", errors="replace").splitlines())
    gone = [line for line in old if line not in present]
    if not gone:
        return "all of its old lines are in the file, but not one after the other"
    return f"{len(gone)} of its {len(old)} old lines are not in the file, first `{gone[0].strip()}`"


def _words(stderr: bytes) -> str:
    """The message of git about a file to which nothing of the patch applies."""
    errors = re.findall(r"^error: (.+)$", stderr.decode(errors="replace"), re.MULTILINE)
    return errors[0] if errors else "git apply failed"


def _gives(folder: Path, patch: bytes, commit: str) -> bool:
    """Whether `patch`, applied to the parent of `commit` in `folder`, gives that commit's tree."""
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(scratch) / "index"
        git(folder, "read-tree", f"{commit}^", index=index)
        done = subprocess.run(
            ["git", "apply", "--cached", "--whitespace=nowarn", "-"],
            cwd=folder,
            env={**ENVIRONMENT, "GIT_INDEX_FILE": str(index)},
            input=patch,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            return False
        tree = git(folder, "write-tree", index=index)
    return tree == git(folder, "rev-parse", f"{commit}^{{tree}}")


def _is_ambiguous(folder: Path, patch: bytes, commit: str) -> bool:
    """Whether a hunk of `patch` fits the parent of `commit` in `folder` in several places."""
    for section in _SECTION.split(patch)[1:]:
        if not (file := re.search(rb"^--- a/(.+)$", section, re.MULTILINE)):
            continue
        text = git(folder, "show", f"{commit}^:{file[1].decode()}")
        for hunk in _HUNK.split(section.decode())[1:]:
            lines = hunk.splitlines(keepends=True)[1:]
            if text.count("".join(line[1:] for line in lines if line[0] in " -")) > 1:
                return True
    return False


def _base_of(words: Sequence[str]) -> str:
    """The base that the last words of a command name."""
    match words:
        case []:
            return PIN
        case [name] if name in base_names():
            return name
    sys.exit(f"{' '.join(words)}: expected one of {', '.join(base_names())}")


def main(words: Sequence[str]) -> None:
    """Run the command line."""
    match words:
        case ["checkout", folder, *name]:
            checkout(Path(folder), _base_of(name))
        case ["make", folder]:
            made = make(Path(folder), PATCHES)
            take_out_sources(made)
            for path in made:
                print(path.name)
            check()
        case ["make", folder, series]:
            for path in make_series(Path(folder), Path(series)):
                print(path.name)
        case ["check", *name]:
            check(_base_of(name))
            count = len(read_patches(_base_of(name)))
            print(f"{count} patches apply and are as `make` writes them")
        case ["status"]:
            print_status(llama_cpp_source())
        case ["status", tree, *name]:
            print_status(Path(tree), _base_of(name))
        case ["hunks", tree]:
            list_hunks(Path(tree))
        case ["rebase", tree]:
            rebase(Path(tree))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ServerError as error:
        sys.exit(str(error))
