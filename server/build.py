"""Builds of llama.cpp with our patches, each made once and kept in a cache folder.

Two things are made: a llama-server with its tools, and the libraries that the package ships for
Python. Additions are the patches and the sources of the head that the server builds in.

    server/0.3.36-<additions>-<options>/       a finished server; the folder appears in one step
        build.json                             what it was made from
        bin/                                   programs and shared libraries, side by side
    libraries/0.3.36-<patches>-<options>/      the finished libraries, with their build.json
    server/0.3.36-<patches>-<options>.work/    sources, objects, build.log
    server/0.3.36-<patches>-<options>.lock     held by the process that works there

Both are compiled in the same work folder where their options are the same, so that the server's
build takes up the objects of the libraries. It ends with the server. An interrupted build is taken
up where it stopped: ninja keeps no object that it did not finish.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mtp_gguf.gguf_tools.errors import RequestError, ServerError
from mtp_gguf.gguf_tools.system import shared_library

from .patches import Addition, add_head, apply, digest, read_head_sources, read_patches
from .upstream_source import base, cache_folder, check_archive, fetch_archive, unpack_llama_cpp

TARGETS = ("llama-server", "llama-quantize", "llama-bench", "ggml-rpc-server")
# What the patches change, apart from the programs; ggml's registry (libggml) and the backends of
# GPUs are those of llama-cpp-python.
LIBRARIES = ("ggml-base", "ggml-cpu", "llama")
LOG_LINES = 25
MARKER = "build.json"

# Not in libggml-cpu, libggml-base or libllama; and loadable backends would have no libggml-cpu.
_NO_LIBRARY_OPTION = re.compile(
    r"-DGGML_(BACKEND_DL|BLAS|CANN|CPU_ALL_VARIANTS|CUDA|HIP|METAL|MUSA|OPENCL|SYCL|VULKAN)[:=]"
)
_CPUINFO = Path("/proc/cpuinfo")
_NINJA_STEP = re.compile(r"\[(\d+)/(\d+)\]")

Report = Callable[[str], None]


@dataclass(frozen=True)
class Build:
    """A finished build in the folder `root`."""

    root: Path

    @property
    def libraries(self) -> Path:
        """The folder of the server's shared libraries."""
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
        # The libraries are found wherever the folder goes.
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        f"-DCMAKE_INSTALL_RPATH={'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}",
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


def library_options() -> list[str]:
    """What cmake is told for the libraries: `cmake_options` without the backends of GPUs."""
    options = [option for option in cmake_options() if not _NO_LIBRARY_OPTION.match(option)]
    if sys.platform == "darwin":  # ggml would turn these on by itself
        options += ["-DGGML_METAL=OFF", "-DGGML_BLAS=OFF"]
    return options


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
    finished = cache_folder("server").glob(f"{_family()}-*/{MARKER}")
    newest = max(finished, key=lambda marker: marker.stat().st_mtime, default=None)
    return Build(newest.parent) if newest else None


def clean() -> int:
    """Remove every build, finished or not, of any version; the number of folders removed.

    ServerError when one of them is being built.
    """
    kinds = (cache_folder("server"), cache_folder("libraries"))
    folders = [entry for kind in kinds for entry in kind.iterdir() if entry.is_dir()]
    for folder in folders:
        with _lock(kinds[0] / f"{folder.name.removesuffix('.work')}.lock"):
            # A name that no search takes for a build, in case removing is interrupted.
            shutil.rmtree(folder.rename(folder.with_name(f".removed.{folder.name}")))
    return len(folders)


def build(options: Sequence[str], archive: Path | None, jobs: int | None, report: Report) -> Build:
    """The server's build with these cmake `options`; made unless it is there.

    archive: the source distribution where pip is not to fetch it. jobs: parallel compilers, None
    for ninja's own choice. report: called with what is being done.

    ServerError where something is missing; BuildError where cmake or a compiler fails.
    """
    key = f"{_family()}-{_short(json.dumps([*options, platform.machine()]))}"
    done = Build(cache_folder("server") / key)
    if (done.root / MARKER).is_file():
        return done
    work = _work_folder(options)
    with _lock(work.with_suffix(".lock")) as lock:
        if (done.root / MARKER).is_file():  # another process was faster
            return done
        _compile(work, TARGETS, options, archive, jobs, lock, report, head=read_head_sources())
        _keep_libraries(work, options)
        _keep_programs(work, done.root, options)
        shutil.rmtree(work)
    return done


def build_libraries(
    target: Path, archive: Path | None, jobs: int | None, report: Report
) -> list[Path]:
    """Put the libraries, and the marker that says what they are, into the folder `target`.

    They are made unless the cache has them; where another process is at it, this one waits.
    archive, jobs, report and what is raised: as for `build`.
    """
    options = library_options()
    work = _work_folder(options)
    kept = _libraries_folder(work)
    with _lock(work.with_suffix(".lock"), report) as lock:
        if not (kept / MARKER).is_file():
            _compile(work, LIBRARIES, options, archive, jobs, lock, report)
            _keep_libraries(work, options)
        target.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy2(file, target)) for file in sorted(kept.iterdir())]


def _family() -> str:
    return f"{base().version}-{digest([*read_patches(), *read_head_sources()])[:10]}"


def _work_folder(options: Sequence[str]) -> Path:
    """Where these options are compiled on this CPU, whose instructions ggml uses by default."""
    key = _short(json.dumps([*options, platform.machine(), _cpu_features()]))
    patches = digest(read_patches())[:10]
    return cache_folder("server") / f"{base().version}-{patches}-{key}.work"


def _libraries_folder(work: Path) -> Path:
    return cache_folder("libraries") / work.stem


def _cpu_features() -> str:
    """The instruction sets of this CPU, or its name where the system does not list them."""
    with suppress(OSError):
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return value.strip()
    return platform.processor()


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _tool(name: str) -> str:
    """A build tool from the PATH, or from a PyPI package beside this Python."""
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        raise ServerError(f"building takes {name}, which is not on the PATH: pip install {name}")
    return found


def _source(work: Path, archive: Path | None, report: Report) -> Path:
    """The patched tree in the folder `work`; it is put under its name in one step."""
    source = work / "source"
    if source.is_dir():
        return source
    work.mkdir(exist_ok=True)
    if archive is None:
        report("fetching the sources with pip")
        archive = fetch_archive()
    else:
        check_archive(archive)
    report("unpacking and patching the sources")
    unpatched = source.with_name("source.unpatched")
    shutil.rmtree(unpatched, ignore_errors=True)
    unpack_llama_cpp(archive, unpatched, without=("docs", "models"))
    apply(read_patches(), unpatched)
    unpatched.rename(source)
    return source


def _compile(
    work: Path,
    targets: Sequence[str],
    options: Sequence[str],
    archive: Path | None,
    jobs: int | None,
    lock: int,
    report: Report,
    head: Sequence[Addition] = (),
) -> None:
    """Prepare, configure and build `targets` in `work`; head: sources that they build in."""
    cmake, ninja = _tool("cmake"), _tool("ninja")
    source, objects = _source(work, archive, report), work / "build"
    add_head(head, source)
    report("configuring")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    _run([cmake, "-S", source, "-B", objects, *generator, *options], work, lock, report)
    parallel = ["--parallel", str(jobs)] if jobs else []
    _run([cmake, "--build", objects, "--target", *targets, *parallel], work, lock, report)


def _keep_libraries(work: Path, options: Sequence[str]) -> None:
    """Keep the libraries of a build in the cache, where they are those of `library_options`."""
    kept = _libraries_folder(work)
    if [*options] != library_options() or (kept / MARKER).is_file():
        return
    collected = work / "libraries"
    shutil.rmtree(collected, ignore_errors=True)
    collected.mkdir()
    for name in map(shared_library, LIBRARIES):
        shutil.copy2(work / "build" / "bin" / name, collected)
    _publish(collected, kept, options)


def _keep_programs(work: Path, done: Path, options: Sequence[str]) -> None:
    collected = work / "server"
    shutil.rmtree(collected, ignore_errors=True)
    collected.mkdir()
    (work / "build" / "bin").rename(collected / "bin")
    _publish(collected, done, options)


def _publish(made: Path, done: Path, options: Sequence[str]) -> None:
    """Make the folder `made` appear, whole and with a marker, as `done`."""
    made_from = {
        "llama-cpp-python": base().version,
        "llama.cpp": base().commit,
        "machine": platform.machine(),
        "patches": [patch.name for patch in read_patches()],
        "options": list(options),
    }
    (made / MARKER).write_text(json.dumps(made_from, indent=1) + "\n", encoding="utf-8")
    made.rename(done)


@contextmanager
def _lock(path: Path, waiting: Report | None = None) -> Iterator[int]:
    """Keep other processes from the same build.

    waiting: called once where another process has it, which is waited for; ServerError where that
    is None. Gives the file descriptor that holds the lock. The system frees it once every process
    that has the descriptor is gone.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise ServerError(f"{path.stem}: another process is building it") from None
            waiting("waiting for another process that is building the same")
            fcntl.flock(file, fcntl.LOCK_EX)
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
