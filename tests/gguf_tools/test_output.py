"""Output files appear under their name only when complete; failures leave nothing behind."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.errors import FormatError, OutputError
from mtp_gguf.gguf_tools.files import output
from mtp_gguf.gguf_tools.files.output import OutputFile, check_output, commit_all
from mtp_gguf.gguf_tools.hub.sources import FileSource
from mtp_gguf.gguf_tools.machine import os_files
from support.commands import UNWRITABLE, held
from support.failing_files import failing


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "model.gguf"


# --------------------------------------------------------------------------- OutputFile


def test_has_its_name_only_when_complete(target: Path) -> None:
    with OutputFile(target, 10) as file:
        file.write(5, b"world")
        assert not target.exists()
        (partial,) = names(target.parent)
        assert partial.startswith(".model.gguf.")
        file.write(0, memoryview(b"hello"))
        assert not target.exists()
        file.commit()
        assert names(target.parent) == ["model.gguf"]
    assert target.read_bytes() == b"helloworld"
    assert names(target.parent) == ["model.gguf"]


def test_short_writes_are_continued(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a system call may leave them, on a network file system or when interrupted."""
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, bytes(data)[:3], offset))
    with OutputFile(target, 8) as file:
        file.write(0, memoryview(bytes(range(8))).cast("I"))
        file.commit()
    assert target.read_bytes() == bytes(range(8))


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
def test_an_exception_leaves_what_is_committed(
    target: Path, error: type[BaseException], commits: bool
) -> None:
    def write() -> None:
        with OutputFile(target, 5) as file:
            file.write(0, b"hello")
            if commits:
                file.commit()
            raise error

    with pytest.raises(error):
        write()
    assert held(target.parent) == ({"model.gguf": b"hello"} if commits else {})


def test_what_stops_a_copy_in_parts_leaves_nothing(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_COPY_BYTES", 16)
    stored = target.with_name("stored")
    stored.write_bytes(bytes(100))
    seen: list[int] = []

    def stop(count: int) -> None:
        seen.append(count)
        raise KeyboardInterrupt

    with closing(FileSource(stored)) as source:
        with pytest.raises(KeyboardInterrupt), OutputFile(target, 200) as file:
            file.copy(0, source, 3, 90, stop)
        with (
            pytest.raises(FormatError, match="the file ends at byte 100, data is missing"),
            OutputFile(target, 200) as file,
        ):
            file.copy(0, source, 3, 150)
    assert seen == [13]
    assert names(target.parent) == ["stored"]


def test_a_signal_right_after_its_creation_leaves_nothing(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(_: int) -> bool:
        assert [*target.parent.iterdir()]
        raise KeyboardInterrupt

    monkeypatch.setattr(os_files, "lock", lock)
    with pytest.raises(KeyboardInterrupt), OutputFile(target, 10):
        pass
    assert not [*target.parent.iterdir()]


@pytest.mark.parametrize("commits", [True, False])
def test_the_old_file_stands_until_the_new_one_is_whole(target: Path, commits: bool) -> None:
    target.write_bytes(b"old")
    with OutputFile(target, 3) as file:
        file.write(0, b"new")
        assert target.read_bytes() == b"old"
        if commits:
            file.commit()
    assert target.read_bytes() == (b"new" if commits else b"old")
    assert names(target.parent) == ["model.gguf"]


def test_takes_the_permissions_that_the_user_wants(target: Path) -> None:
    old = os.umask(0o027)
    try:
        with OutputFile(target, 1) as file:
            file.commit()
    finally:
        os.umask(old)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_leftover_or_a_link_in_its_way_is_replaced(target: Path, tmp_path: Path) -> None:
    """A killed process of the same number may have left a file; a link must not be followed."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched")
    (target.parent / f".model.gguf.{os.getpid()}.partial").symlink_to(victim)
    with OutputFile(target, 3) as file:
        file.write(0, b"new")
        file.commit()
    assert victim.read_bytes() == b"untouched"
    assert target.read_bytes() == b"new"
    assert not target.is_symlink()


def test_leftovers_of_killed_processes_are_removed(target: Path) -> None:
    """A partial file that nobody has open goes; one of a process at work stays."""
    dead = target.parent / ".model.gguf.4000000.partial"
    dead.write_bytes(b"half")
    others = [target.parent / name for name in (".other.gguf.1.partial", ".model.gguf.x.partial")]
    for other in others:
        other.write_bytes(b"another's")
    script = (
        "import sys; from pathlib import Path; "
        "from mtp_gguf.gguf_tools.files.output import OutputFile\n"
        "with OutputFile(Path(sys.argv[1]), 3) as file: print(flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as alive:
        assert alive.stdout is not None
        alive.stdout.readline()
        assert not dead.exists()
        (partial,) = target.parent.glob(f".model.gguf.{alive.pid}.partial")
        with OutputFile(target, 3) as file:
            assert partial.exists()
            file.write(0, b"new")
            file.commit()
        alive.kill()
    assert partial.exists()
    with OutputFile(target, 3):
        assert not partial.exists()
    assert all(other.exists() for other in others)


def test_a_name_that_becomes_a_folder_leaves_nothing(target: Path) -> None:
    with OutputFile(target, 1) as file:
        target.mkdir()
        with pytest.raises(OutputError, match="cannot be written: Is a directory"):
            file.commit()
    assert names(target.parent) == ["model.gguf"]
    assert target.is_dir()


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (lambda folder: folder / "none" / "x.gguf", "cannot be written: No such file or directory"),
        (lambda folder: folder / "file" / "x.gguf", "cannot be written: Not a directory"),
        (lambda folder: folder / ("n" * 250), "cannot be written: File name too long"),
    ],
    ids=["no folder", "folder is a file", "long name"],
)
def test_output_that_cannot_be_opened(
    tmp_path: Path, place: Callable[[Path], Path], reason: str
) -> None:
    (tmp_path / "file").write_bytes(b"")
    path = place(tmp_path)
    with pytest.raises(OutputError) as error, OutputFile(path, 1):
        pass
    assert str(error.value) == f"{path}: {reason}"
    assert names(tmp_path) == ["file"]


# ------------------------------------------------------------------- several files


def committed(targets: list[Path], content: bytes) -> None:
    with ExitStack() as stack:
        files = [stack.enter_context(OutputFile(t, len(content))) for t in targets]
        for file in files:
            file.write(0, content)
        commit_all(files)


@pytest.fixture
def targets(target: Path) -> list[Path]:
    return [target.with_name(f"{name}.gguf") for name in ("a", "b", "c")]


@pytest.mark.parametrize("old", [(), (0,), (1,), (0, 1, 2)])
def test_all_appear_together(old: tuple[int, ...], targets: list[Path]) -> None:
    for index in old:
        targets[index].write_bytes(b"old")
    committed(targets, b"new")
    assert [t.read_bytes() for t in targets] == [b"new"] * 3
    assert names(targets[0].parent) == ["a.gguf", "b.gguf", "c.gguf"]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("old", [(), (0,), (0, 1, 2)])
@pytest.mark.parametrize("links", [True, False])
def test_a_failed_rename_rolls_all_files_back(
    old: tuple[int, ...],
    error: BaseException,
    number: int,
    links: bool,
    targets: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever renaming fails, what stood there stands there again; with hard links or without."""
    for index in old:
        targets[index].write_bytes(f"old {index}".encode())
    before = held(targets[0].parent)
    whole, count = os.replace, iter(range(100))

    def replace(old_name: Path, new_name: Path) -> None:
        if next(count) == number:
            raise error
        whole(old_name, new_name)
        if links:  # at no moment is a name without its file
            assert all(targets[index].exists() for index in old)

    monkeypatch.setattr(os, "replace", replace)
    if not links:
        monkeypatch.setattr(os, "link", failing(errno.EPERM))
    if number >= len(targets) + (0 if links else len(old)):  # there are fewer
        committed(targets, b"new")
        return
    with pytest.raises((OutputError, KeyboardInterrupt)):
        committed(targets, b"new")
    assert held(targets[0].parent) == before


def test_a_folder_in_the_way_rolls_all_files_back(targets: list[Path]) -> None:
    targets[0].write_bytes(b"old")
    with ExitStack() as stack:
        files = [stack.enter_context(OutputFile(t, 1)) for t in targets]
        targets[2].mkdir()
        with pytest.raises(OutputError, match=r"c\.gguf: cannot be written: Is a directory"):
            commit_all(files)
    assert names(targets[0].parent) == ["a.gguf", "c.gguf"]
    assert targets[0].read_bytes() == b"old"


# ----------------------------------------------------------------------------- full disk


def test_more_than_the_disk_has_is_refused_at_once(target: Path) -> None:
    with pytest.raises(OutputError, match=r"needs 4611686018427387904 bytes, and \d+ are free"):
        OutputFile(target, 1 << 62).__enter__()
    assert names(target.parent) == []


LIMITED = """
import resource, sys
from pathlib import Path
from mtp_gguf.gguf_tools.errors import OutputError
from mtp_gguf.gguf_tools.files.output import OutputFile
path, size, lowered = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def lower():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    if lowered == "before":
        lower()
    with OutputFile(path, size) as file:
        lower()
        file.write(0, bytes(size))
        file.commit()
except OutputError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("lowered", ["before", "while writing"])
def test_a_full_disk_leaves_nothing(target: Path, lowered: str) -> None:
    """A limit on file sizes stands for a disk that is full from the start or becomes so."""
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(target), "100000", lowered],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == f"{target}: no space for its 100000 bytes: File too large\n"
    assert names(target.parent) == []


def test_a_file_system_that_cannot_reserve_space_will_do(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP), raising=False)
    with OutputFile(target, 6) as file:
        file.write(0, b"data")
        file.commit()
    assert target.read_bytes() == b"data\0\0"


def test_a_disk_that_is_full_only_when_it_is_synced(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with delayed allocation, and on a network."""
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))

    def write() -> None:
        with OutputFile(target, 4) as file:
            file.write(0, b"data")
            file.commit()

    with pytest.raises(OutputError, match="no space for its 4 bytes"):
        write()
    assert names(target.parent) == []


# -------------------------------------------------------------------------- check_output


def test_an_existing_name_needs_overwrite(target: Path) -> None:
    target.write_bytes(b"")
    with pytest.raises(OutputError) as error:
        check_output(target, [], overwrite=False)
    assert str(error.value) == (
        f"{target}: exists; pass --overwrite to replace it, or choose another name"
    )
    check_output(target, [target.parent / "other"], overwrite=True)


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="expected a file name, found a folder"):
        check_output(tmp_path, [], overwrite=True)


@pytest.mark.parametrize("parent", ["none", "file"])
def test_a_missing_folder_is_named(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / parent / "model.gguf"
    with pytest.raises(OutputError) as error:
        check_output(path, [], overwrite=True)
    assert str(error.value) == f"{path}: expected its folder to exist, found no {path.parent}"


@pytest.mark.skipif(not UNWRITABLE.is_dir(), reason="no /proc, in which not even root can write")
def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    path = UNWRITABLE / "model.gguf"
    with pytest.raises(OutputError, match=f"{path}: cannot be written: .*; choose another folder"):
        check_output(path, [], overwrite=False)
    before = tmp_path.stat().st_mtime_ns
    check_output(tmp_path / "model.gguf", [], overwrite=False)
    assert (names(tmp_path), tmp_path.stat().st_mtime_ns) == ([], before)


def same(path: Path) -> Path:
    return path


def hard_link(path: Path) -> Path:
    os.link(path, path.with_name("hard"))
    return path.with_name("hard")


def symbolic_link(path: Path) -> Path:
    path.with_name("soft").symlink_to(path)
    return path.with_name("soft")


def roundabout(path: Path) -> Path:
    return path.parent / ".." / path.parent.name / path.name


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("way", [same, hard_link, symbolic_link, roundabout])
def test_the_input_is_no_output(target: Path, way: Callable[[Path], Path], overwrite: bool) -> None:
    target.write_bytes(b"input")
    path = way(target)
    with pytest.raises(OutputError) as error:
        check_output(path, [target.parent / "other", target], overwrite)
    assert str(error.value) == f"{path}: is the input; choose another name for the output"
