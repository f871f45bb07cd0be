"""Building llama.cpp with our patches, once, into a cache folder.

Additions are the patches and the sources of the head that they build in.

    server/0.3.36-<additions>-<options>/      a finished build; the folder appears in one step
        build.json                            what it was made from
        bin/                                  programs and shared libraries, side by side
    server/0.3.36-<additions>-<options>.work/ an unfinished one: sources, objects, build.log
    server/0.3.36-<additions>-<options>.lock  held by the process that is building

An interrupted build is taken up where it was left: ninja keeps no object that it did not finish.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mtp_gguf.gguf_tools.errors import RequestError, ServerError

from .patches import add_head, apply, digest, read_head_sources, read_patches
from .upstream_source import base, cache_folder, check_archive, fetch_archive, unpack_llama_cpp

TARGETS = ("llama-server", "llama-quantize", "llama-bench", "ggml-rpc-server")
LOG_LINES = 25

_MARKER = "build.json"
_NINJA_STEP = re.compile(r"\[(\d+)/(\d+)\]")

Report = Callable[[str], None]


@dataclass(frozen=True)
class Build:
    """A finished build in the folder `root`."""

    root: Path

    @property
    def libraries(self) -> Path:
        """The folder of the shared libraries, which `LLAMA_CPP_LIB_PATH` takes."""
        return self.root / "bin"

    @property
    def server(self) -> Path:
        """The llama-server."""
        return self.libraries / "llama-server"


class BuildError(ServerError):
    """cmake or a compiler failed. `log`: the last lines that they wrote."""

    def __init__(self, message: str, log: Sequence[str]) -> None:
        super().__init__(message)
        self.log = tuple(log)


def cmake_options(extra: Sequence[str] = ()) -> list[str]:
    """What cmake is told: ours, then the environment's CMAKE_ARGS, then `extra`; the last wins."""
    ours = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=ON",
        "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",  # the libraries are found wherever the folder goes
        "-DGGML_RPC=ON",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_APP=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",  # it would be downloaded
        f"-DLLAMA_BUILD_COMMIT={base().commit[:9]}",  # said by --version
    ]
    if sys.platform == "darwin":
        ours += ["-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON"]
    return [*ours, *split_options(os.environ.get("CMAKE_ARGS", ""), "CMAKE_ARGS"), *extra]


def split_options(text: str, origin: str) -> list[str]:
    """The words of `text` as a shell reads them; RequestError, naming `origin`, where it cannot."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RequestError(
            f"{origin}: expected options as for a shell, found {text!r}: {error}"
        ) from None


def find_build() -> Build | None:
    """The newest finished build of this version with these patches, whatever its options."""
    finished = cache_folder("server").glob(f"{_family()}-*/{_MARKER}")
    newest = max(finished, key=lambda marker: marker.stat().st_mtime, default=None)
    return Build(newest.parent) if newest else None


def clean() -> int:
    """Remove every build, finished or not, of any version; the number of folders removed.

    ServerError when one of them is being built.
    """
    folders = [entry for entry in cache_folder("server").iterdir() if entry.is_dir()]
    for folder in folders:
        with _lock(folder.with_name(f"{folder.name.removesuffix('.work')}.lock")):
            # A name that no search takes for a build, in case removing is interrupted.
            shutil.rmtree(folder.rename(folder.with_name(f".removed.{folder.name}")))
    return len(folders)


def build(options: Sequence[str], archive: Path | None, jobs: int | None, report: Report) -> Build:
    """The build with these cmake `options`; made unless it is there.

    archive: the source distribution where pip is not to fetch it. jobs: parallel compilers, None
    for ninja's own choice. report: called with what is being done.

    ServerError where something is missing; BuildError where cmake or a compiler fails.
    """
    key = f"{_family()}-{_short(json.dumps([*options, platform.machine()]))}"
    done = Build(cache_folder("server") / key)
    if (done.root / _MARKER).is_file():
        return done
    cmake, ninja = _tool("cmake"), _tool("ninja")
    work = done.root.with_name(f"{key}.work")
    with _lock(done.root.with_name(f"{key}.lock")) as lock:
        work.mkdir(exist_ok=True)
        source = work / "source"
        if not source.is_dir():
            _prepare(source, archive, report)
        objects = work / "build"
        report("configuring")
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        _run([cmake, "-S", source, "-B", objects, *generator, *options], work, lock, report)
        parallel = ["--parallel", str(jobs)] if jobs else []
        _run([cmake, "--build", objects, "--target", *TARGETS, *parallel], work, lock, report)
        _finish(objects / "bin", done, options)
        shutil.rmtree(work)
    return done


def _family() -> str:
    return f"{base().version}-{digest([*read_patches(), *read_head_sources()])[:10]}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _tool(name: str) -> str:
    """A build tool from the PATH, or from a PyPI package beside this Python."""
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        raise ServerError(f"building takes {name}, which is not on the PATH: pip install {name}")
    return found


def _prepare(source: Path, archive: Path | None, report: Report) -> None:
    """Put the patched tree under its name, in one step."""
    if archive is None:
        report("fetching the sources with pip")
        archive = fetch_archive()
    else:
        check_archive(archive)
    report("unpacking and patching the sources")
    unpatched = source.with_name("source.unpatched")
    shutil.rmtree(unpatched, ignore_errors=True)
    unpack_llama_cpp(archive, unpatched)
    apply(read_patches(), unpatched)
    add_head(read_head_sources(), unpatched)
    unpatched.rename(source)


def _finish(programs: Path, done: Build, options: Sequence[str]) -> None:
    """Make the build appear, whole, under its name."""
    partial = done.root.with_name(f".{done.root.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    programs.rename(partial / "bin")
    made_from = {
        "llama-cpp-python": base().version,
        "llama.cpp": base().commit,
        "patches": [patch.name for patch in read_patches()],
        "options": list(options),
    }
    (partial / _MARKER).write_text(json.dumps(made_from, indent=1) + "\n", encoding="utf-8")
    partial.rename(done.root)


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Keep other processes from the same build.

    Gives the file descriptor that holds the lock. The system frees it once every process that has
    the descriptor is gone.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerError(f"{path.stem}: another process is building it") from None
        yield file.fileno()


def _run(command: Sequence[str | Path], work: Path, lock: int, report: Report) -> None:
    """Run a step of the build; its output goes to build.log, its progress to `report`.

    lock: handed on, because compilers can outlive this process.
    """
    log = work / "build.log"
    tail: deque[str] = deque(maxlen=LOG_LINES)
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    with (
        log.open("a", encoding="utf-8", buffering=1) as file,
        subprocess.Popen(
            [str(word) for word in command],
            env=environment,
            pass_fds=[lock],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            tail.append(line.rstrip())
            if step := _NINJA_STEP.match(line):
                done, total = int(step[1]), int(step[2])
                report(f"compiling: {done / total:.0%} ({done} of {total} steps)")
    if process.returncode:
        raise BuildError(f"{Path(command[0]).name} failed; all of its output: {log}", tail)
