"""Builds of llama.cpp with our patches, each made once and kept in a cache folder.

A build of another base has that one's version in its names, one of a folder of sources `source`.

There are two kinds: a llama-server with its tools, and the libraries that the package ships for
Python. <additions> is a digest of the patches and of the head's sources, which the server includes.

    server/0.3.36-<additions>-<options>/       a finished server; the folder appears in one step
        build.json                             what it was built from
        bin/                                   programs and shared libraries, side by side
    libraries/0.3.36-<patches>-<options>/      the finished libraries, with their build.json
        <CPU>/                                 another libggml-cpu, if they are portable
    server/0.3.36-<patches>-<options>.work/    sources, objects, build.log
    server/0.3.36-<patches>-<options>.lock     held by the process that works there

Builds with the same options share a work folder, so the server reuses the object files of the
libraries; the work folder is removed once the server is built. An interrupted build resumes where
it stopped, because ninja keeps only finished object files.
"""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtp_gguf.gguf_tools.errors import RequestError, ServerError
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.machine import os_files
from mtp_gguf.gguf_tools.machine.system import cpu_features, shared_library

from .cpu_variants import CpuVariant, cpu_variants
from .patches import (
    APPLIES,
    OPTIONAL,
    SUPERSEDED,
    Addition,
    Fit,
    add_head,
    apply,
    digest,
    fit_series,
    further_patches,
    read_head_sources,
    read_patches,
)
from .upstream_source import (
    PIN,
    base,
    base_names,
    cache_folder,
    check_archive,
    fetch_archive,
    unpack_llama_cpp,
)

TARGETS = (
    *("llama-server", "llama-quantize", "llama-imatrix", "llama-gguf-split", "llama-bench"),
    "ggml-rpc-server",
)
# The libraries that the patches change, and the GPU backend that they change, if it is asked for.
# ggml's registry (libggml) and the other GPU backends are those of llama-cpp-python.
LIBRARIES = ("ggml-base", "ggml-cpu", "llama")
VULKAN = "ggml-vulkan"
# What libmtp_chat is compiled from, in llama.cpp's tree.
CHAT_SOURCES = ("common", "include", "ggml/include", "vendor/nlohmann", "vendor/sheredom")
LOG_LINES = 25
MARKER = "build.json"
NPM = "npm"  # builds llama-server's web page
GPUS = ("cuda", "hip", "metal", "musa", "opencl", "sycl", "vulkan")  # ggml's backends for them

# Options for other libraries than these, and GGML_BACKEND_DL, which builds no libggml-cpu.
_NO_LIBRARY_OPTION = re.compile(
    r"-DGGML_(BACKEND_DL|BLAS|CANN|CPU_ALL_VARIANTS|CUDA|HIP|METAL|MUSA|OPENCL|SYCL)[:=]"
)
# As CMake reads them.
_ON = ("1", "on", "true", "y", "yes")
_OFF = ("0", "off", "false", "n", "no")
# The instruction sets that compilers use unasked, as Linux names them.
_COMPILED_FOR = re.compile(
    r"abm|amx|asimd|avx|bf16|bmi|f16c|fma|fphp|i8mm|movbe|popcnt|s?sse|sme2?\b|sve"
)
# In the marker of a server.
_NEEDS = "instruction sets"
_LLAMA_CPP = "llama.cpp"
_WITHOUT = "without"
_COMMIT = re.compile(r"[0-9a-f]{40}")
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

    @property
    def gpus(self) -> list[str]:
        """The backends for GPUs that it has."""
        names = {shared_library(f"ggml-{gpu}"): gpu for gpu in GPUS}
        return [gpu for name, gpu in names.items() if (self.libraries / name).is_file()]

    @property
    def has_page(self) -> bool:
        """Whether the llama-server contains its web page."""
        return self._made_from().get("web page") is True

    @property
    def runs_here(self) -> bool:
        """Whether this CPU has the instruction sets that it was compiled for."""
        needs = self._made_from().get(_NEEDS, [])
        return isinstance(needs, list) and all(need in cpu_features().split() for need in needs)

    @property
    def origin(self) -> str:
        """The llama.cpp that it was made from, and the patches that were left out."""
        made_from = self._made_from()
        without = made_from.get(_WITHOUT) or []
        left_out = f", without {', '.join(map(str, without))}" if without else ""
        version = str(made_from.get(_LLAMA_CPP, "of an unknown version"))
        return f"llama.cpp {version[:9] if _COMMIT.fullmatch(version) else version}{left_out}"

    def _made_from(self) -> dict[str, Any]:
        try:
            made_from = parse_json((self.root / MARKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return made_from if isinstance(made_from, dict) else {}


@dataclass(frozen=True)
class Sources:
    """What a build is made from.

    base: the name of the llama.cpp. archive: its source distribution; None to fetch it with pip.
    folder: sources of another llama.cpp, which are copied, instead of a base. without: numbers of
    patches to leave out.
    """

    base: str = PIN
    archive: Path | None = None
    folder: Path | None = None
    without: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """What the names of the build's folders begin with."""
        return base(self.base).version if self.folder is None else "source"

    @property
    def series(self) -> list[Addition]:
        """All patches that belong to this version; those that are left out, too."""
        if self.folder is None:
            return read_patches(self.base)
        return [patch for name in base_names() for patch in read_patches(name)]

    def patches(self) -> list[Addition]:
        """The patches to apply, those of the user last; MisfitError if one does not apply."""
        found = self.series
        if self.folder is not None:
            fits = [one for one in fit_series(self.folder) if self._takes(one.patch)]
            if any(one.state not in (APPLIES, SUPERSEDED) for one in fits):
                raise MisfitError(self.folder, fits)
            found = [one.patch for one in fits if one.state == APPLIES]
        return [*filter(self._takes, found), *further_patches()]

    def key(self) -> list[object]:
        """What tells builds with the same options apart, other than `version` and `series`."""
        words: list[object] = [digest(patches)] if (patches := further_patches()) else []
        words += [{"without": self.without}] if self.without else []
        return words + ([_tree_digest(self.folder)] if self.folder else [])

    def _takes(self, patch: Addition) -> bool:
        return patch.name[:4] not in self.without


class MisfitError(ServerError):
    """Patches do not apply to the sources in a folder. fits: how each one fits."""

    def __init__(self, folder: Path, fits: Sequence[Fit]) -> None:
        count = sum(one.state not in (APPLIES, SUPERSEDED) for one in fits)
        super().__init__(
            f"{folder}: {count} of {len(fits)} patches do not apply; leave them out with --without "
            "if no other patch needs them, or build a version with --base"
        )
        self.fits = tuple(fits)


class BuildError(ServerError):
    """cmake or a compiler failed. log: the last lines of their output."""

    def __init__(self, message: str, log: Sequence[str]) -> None:
        super().__init__(message)
        self.log = tuple(log)


def cmake_options(extra: Sequence[str] = (), sources: Sources | None = None) -> list[str]:
    """The options for cmake: ours, then CMAKE_ARGS, then `extra`; later ones win."""
    version = base((sources or Sources()).base).commit[:9]
    if sources is not None and sources.folder is not None:
        version = "source"
    ours = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=ON",
        # So that the programs find their libraries after the folder is moved.
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        f"-DCMAKE_INSTALL_RPATH={'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}",
        "-DGGML_RPC=ON",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_APP=OFF",
        f"-DLLAMA_BUILD_UI={'ON' if shutil.which(NPM) else 'OFF'}",
        "-DLLAMA_USE_PREBUILT_UI=OFF",  # it would be downloaded
        f"-DLLAMA_BUILD_COMMIT={version}",  # said by --version
    ]
    if sys.platform == "darwin":
        ours += ["-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON"]
    return [*ours, *split_options(os.environ.get("CMAKE_ARGS", ""), "CMAKE_ARGS"), *extra]


def library_options() -> list[str]:
    """The options for the libraries: `cmake_options` without GPU backends that no patch changes."""
    options = [option for option in cmake_options() if not _NO_LIBRARY_OPTION.match(option)]
    if sys.platform == "darwin":  # on by default in ggml
        options += ["-DGGML_METAL=OFF", "-DGGML_BLAS=OFF"]
    return options


def library_names(options: Sequence[str]) -> list[str]:
    """The libraries that these options build."""
    return [*LIBRARIES, *([VULKAN] if _value("GGML_VULKAN", options) in _ON else [])]


def _value(name: str, options: Sequence[str]) -> str | None:
    """The value of a cmake variable, in lower case; None if no option sets it."""
    found = [re.fullmatch(rf"-D{name}(?::\w+)?=(.*)", option) for option in options]
    return next((match[1].lower() for match in reversed(found) if match), None)


def split_options(text: str, origin: str) -> list[str]:
    """Split `text` like a shell; RequestError, naming `origin`, if it is malformed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RequestError(
            f"{origin}: expected options as for a shell, found {text!r}: {error}"
        ) from None


def find_build() -> Build | None:
    """The finished build of this version with these patches that commands use.

    Those for other CPUs, as in a home folder that machines share, are left out. A build with a
    backend for GPUs is preferred, since it also runs on the CPU; then the one that was asked for
    last.
    """
    kinds = [*(Sources(name) for name in base_names()), Sources(folder=Path())]
    finished = [
        marker
        for kind in kinds
        for marker in cache_folder("server").glob(f"{_family(kind)}-*/{MARKER}")
    ]
    builds = {Build(marker.parent): marker.stat().st_mtime for marker in finished}
    usable = [made for made in builds if made.runs_here]
    return max(usable, key=lambda made: (bool(made.gpus), builds[made]), default=None)


def clean() -> int:
    """Remove all builds of all versions, finished or not; returns the number of folders removed.

    ServerError if one of them is being built.
    """
    kinds = (cache_folder("server"), cache_folder("libraries"))
    folders = [entry for kind in kinds for entry in kind.iterdir() if entry.is_dir()]
    for folder in folders:
        with _lock(kinds[0] / f"{folder.name.removesuffix('.work')}.lock"):
            # Renamed first, so that an interrupted removal leaves nothing that looks like a build.
            shutil.rmtree(folder.rename(folder.with_name(f".removed.{folder.name}")))
    for path in kinds[0].glob("*.lock"):
        with _lock(path), suppress(PermissionError):  # Windows removes no open file
            path.unlink()
    for kind in kinds:
        with suppress(OSError):  # not empty
            kind.rmdir()
    return len(folders)


def build(options: Sequence[str], sources: Sources, jobs: int | None, report: Report) -> Build:
    """Build the server with these cmake `options`, or return the existing build.

    jobs: parallel compilers; None for ninja's default. report: called with the current step.

    RequestError if a patch cannot be left out; ServerError if something is missing; MisfitError if
    a patch does not apply; BuildError if cmake or a compiler fails.
    """
    if fixed := [number for number in sources.without if number not in OPTIONAL]:
        raise RequestError(
            f"--without {fixed[0]}: expected one of the patches that no other one needs: "
            f"{', '.join(OPTIONAL)}"
        )
    done = Build(
        cache_folder("server")
        / f"{_family(sources)}-{_key(options, _instruction_sets(options), sources)}"
    )
    if (done.root / MARKER).is_file():
        (done.root / MARKER).touch()  # for `find_build`
        _add_kernels(done.libraries)
        return done
    work = _work_folder(options, sources)
    with _lock(work.with_suffix(".lock")) as lock:
        if (done.root / MARKER).is_file():  # another process has built it meanwhile
            return done
        _compile(work, TARGETS, options, sources, jobs, lock, report, head=read_head_sources())
        if [*options] == library_options() and sources == Sources(archive=sources.archive):
            _keep_libraries(work, options)
        _keep_programs(work, done.root, options, sources)
        shutil.rmtree(work)
    return done


def build_libraries(
    target: Path,
    archive: Path | None,
    jobs: int | None,
    report: Report,
    *,
    portable: bool = False,
) -> None:
    """Put the libraries, and a marker with their versions, into the folder `target`.

    They are built unless they are cached; if another process is building them, this one waits.
    portable: for all CPUs of this kind of machine instead of this CPU. Other arguments and
    exceptions are those of `build`.
    """
    variants = cpu_variants() if portable else []
    options = [*library_options(), *(variants[-1].options if variants else ())]
    sources = Sources(archive=archive)
    work = _work_folder(options, sources, variants)
    libraries = _libraries_folder(work)
    if (
        libraries / MARKER
    ).is_file():  # the server may be built for minutes in the folder that is locked
        with suppress(OSError):  # they were removed meanwhile
            shutil.copytree(libraries, target, dirs_exist_ok=True)
            return
    with _lock(work.with_suffix(".lock"), report) as lock:
        if not (libraries / MARKER).is_file():
            for variant in variants[:-1]:
                report(f"libggml-cpu for {variant.name}")
                _compile_variant(work, variant, sources, jobs, lock, report)
            _compile(work, library_names(options), options, sources, jobs, lock, report)
            _keep_libraries(work, options, variants[:-1])
        shutil.copytree(libraries, target, dirs_exist_ok=True)


def unpack_chat_sources(target: Path, archive: Path | None, report: Report) -> None:
    """Put the patched sources of llama.cpp's chat layer into the folder `target`, if they changed.

    Arguments and exceptions are those of `build_libraries`.
    """
    sources = Sources(archive=archive)
    marker, key = target / MARKER, f"{sources.version} {digest(sources.patches())}"
    if marker.is_file() and marker.read_text(encoding="utf-8") == key:
        return
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as scratch:
        source = _source(Path(scratch), sources, report)
        for part in CHAT_SOURCES:
            shutil.copytree(source / part, target / part)
    marker.write_text(key, encoding="utf-8")


def _family(sources: Sources) -> str:
    return f"{sources.version}-{digest([*sources.series, *read_head_sources()])[:10]}"


def _tree_digest(folder: Path) -> str:
    """A digest of the files in `folder`, without those of git."""
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and ".git" not in path.relative_to(folder).parts:
            state.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
            state.update(path.read_bytes())
    return state.hexdigest()[:10]


def _instruction_sets(options: Sequence[str]) -> list[str]:
    """What ggml compiles for with these options: nothing in particular, or what this CPU has."""
    features = [] if _value("GGML_NATIVE", options) in _OFF else cpu_features().split()
    return sorted(filter(_COMPILED_FOR.match, features))


def _work_folder(
    options: Sequence[str], sources: Sources, variants: Sequence[CpuVariant] = ()
) -> Path:
    """The work folder for these options on this CPU."""
    made_for = [astuple(variant) for variant in variants] or _instruction_sets(options)
    key = _key(options, made_for, sources)
    patches = digest(sources.series)[:10]
    return cache_folder("server") / f"{sources.version}-{patches}-{key}.work"


def _key(options: Sequence[str], made_for: Sequence[object], sources: Sources) -> str:
    """Digest of `options`, of the CPU that a build is for, and of its patches and sources."""
    return _short(json.dumps([*options, platform.machine(), made_for, *sources.key()]))


def _libraries_folder(work: Path) -> Path:
    return cache_folder("libraries") / work.stem


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _tool(name: str) -> str:
    """A build tool from the PATH, or from a PyPI package installed for this Python."""
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        raise ServerError(f"building takes {name}, which is not on the PATH: pip install {name}")
    return found


def _source(work: Path, sources: Sources, report: Report) -> Path:
    """The patched source tree in the folder `work`, renamed into place once it is complete."""
    source = work / "source"
    if source.is_dir():
        return source
    patches = sources.patches()
    work.mkdir(exist_ok=True)
    unpatched = source.with_name("source.unpatched")
    shutil.rmtree(unpatched, ignore_errors=True)
    if sources.folder is not None:
        report("copying and patching the sources")
        shutil.copytree(sources.folder, unpatched, ignore=shutil.ignore_patterns(".git"))
    else:
        archive = sources.archive
        if archive is None:
            report("fetching the sources with pip")
            archive = fetch_archive(sources.base)
        else:
            check_archive(archive, sources.base)
        report("unpacking and patching the sources")
        unpack_llama_cpp(archive, unpatched, without=("docs", "models"), name=sources.base)
    apply(patches, unpatched)
    unpatched.rename(source)
    return source


def _compile(
    work: Path,
    targets: Sequence[str],
    options: Sequence[str],
    sources: Sources,
    jobs: int | None,
    lock: int,
    report: Report,
    head: Sequence[Addition] = (),
) -> None:
    """Prepare, configure and build `targets` in `work`; head: the head's sources to include."""
    cmake, ninja = _tool("cmake"), _tool("ninja")
    source, objects = _source(work, sources, report), work / "build"
    add_head(head, source)
    report("configuring")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    _run([cmake, "-S", source, "-B", objects, *generator, *options], work, lock, report)
    parallel = ["--parallel", str(jobs)] if jobs else []
    _run([cmake, "--build", objects, "--target", *targets, *parallel], work, lock, report)


def _compile_variant(
    work: Path,
    variant: CpuVariant,
    sources: Sources,
    jobs: int | None,
    lock: int,
    report: Report,
) -> None:
    """Build the libggml-cpu of `variant`, which an interrupted build may have left.

    All variants use one build folder, so that only the objects of this library are compiled again.
    """
    name = shared_library("ggml-cpu")
    done = work / "variants" / variant.name / name
    if done.is_file():
        return
    options = [*library_options(), *variant.options]
    _compile(work, ["ggml-cpu"], options, sources, jobs, lock, report)
    done.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(work / "build" / "bin" / name, done.with_suffix(".copy"))
    done.with_suffix(".copy").replace(done)


def _keep_libraries(
    work: Path, options: Sequence[str], variants: Sequence[CpuVariant] = ()
) -> None:
    """Cache the libraries of a build, and `variants` of libggml-cpu, unless they are cached."""
    libraries = _libraries_folder(work)
    if (libraries / MARKER).is_file():
        return
    collected = work / "libraries"
    shutil.rmtree(collected, ignore_errors=True)
    collected.mkdir()
    for name in map(shared_library, library_names(options)):
        shutil.copy2(work / "build" / "bin" / name, collected)
    for variant in variants:
        shutil.copytree(work / "variants" / variant.name, collected / variant.name)
    needs = {variant.name: variant.needs for variant in variants}
    _publish(collected, libraries, options, {"cpu variants": needs} if needs else None)


def _keep_programs(work: Path, done: Path, options: Sequence[str], sources: Sources) -> None:
    collected = work / "server"
    shutil.rmtree(collected, ignore_errors=True)
    collected.mkdir()
    (work / "build" / "bin").rename(collected / "bin")
    _add_kernels(collected / "bin")
    more = {"web page": _page_was_built(work / "build"), _NEEDS: _instruction_sets(options)}
    _publish(collected, done, options, more, sources)


def _add_kernels(folder: Path) -> None:
    """Put this package's kernels into `folder`, where its libggml-cpu loads them."""
    name = shared_library("mtp_kernels")
    kernels = Path(str(resources.files("mtp_gguf.native").joinpath("lib"))) / name
    with suppress(FileNotFoundError):  # none for this system
        if not (folder / name).is_file() or (folder / name).read_bytes() != kernels.read_bytes():
            shutil.copy2(kernels, folder / f"{name}.copy")
            (folder / f"{name}.copy").replace(folder / name)


def _page_was_built(objects: Path) -> bool:
    """Whether npm built the web page; llama.cpp goes on without it if npm fails."""
    with suppress(OSError):
        header = (objects / "tools" / "ui" / "ui.h").read_text(encoding="utf-8")
        return re.search(r"LLAMA_UI_HAS_ASSETS +1\b", header) is not None
    return False


def _publish(
    made: Path,
    done: Path,
    options: Sequence[str],
    more: Mapping[str, object] | None = None,
    sources: Sources | None = None,
) -> None:
    """Add a marker to the folder `made` and rename it to `done`, so that it appears complete.

    more: what else the marker says.
    """
    sources = sources or Sources()
    origin = base(sources.base)
    versions = {origin.distribution: origin.version, _LLAMA_CPP: origin.commit}
    made_from = {
        **(versions if sources.folder is None else {_LLAMA_CPP: str(sources.folder)}),
        "machine": platform.machine(),
        "patches": [patch.name for patch in sources.patches()],
        _WITHOUT: list(sources.without),
        "options": list(options),
        **(more or {}),
    }
    (made / MARKER).write_text(json.dumps(made_from, indent=1) + "\n", encoding="utf-8")
    made.rename(done)


@contextmanager
def _lock(path: Path, waiting: Report | None = None) -> Iterator[int]:
    """Hold the lock of a build; yields its file descriptor.

    waiting: called once before waiting for another process that holds the lock; None to raise a
    ServerError instead.
    """

    def occupied() -> None:
        if waiting is None:
            raise ServerError(f"{path.stem}: another process is building it")
        waiting("waiting for another process that is building the same")

    with os_files.file_lock(path, occupied) as fd:
        yield fd


def _run(command: Sequence[str | Path], work: Path, lock: int, report: Report) -> None:
    """Run a step of the build; its output goes to build.log, its progress to `report`.

    An exception, such as the KeyboardInterrupt of a signal, ends the compilers. lock: inherited by
    them, since they outlive this process if it is killed.
    """
    log = work / "build.log"
    tail: deque[str] = deque(maxlen=LOG_LINES)
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    with (
        log.open("a", encoding="utf-8", buffering=1) as file,
        subprocess.Popen(
            [str(word) for word in command],
            env=environment,
            pass_fds=[lock] if os.name == "posix" else [],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                tail.append(line.rstrip())
                if step := _NINJA_STEP.match(line):
                    done, total = int(step[1]), int(step[2])
                    report(f"compiling: {done / total:.0%} ({done} of {total} steps)")
        except BaseException:
            _end_session(process)
            raise
    if process.returncode:
        raise BuildError(f"{Path(command[0]).name} failed; all of its output: {log}", tail)


def _end_session(leader: subprocess.Popen[str]) -> None:
    """End a process and its session, in which ninja ends its compilers; returns when they ended."""
    if sys.platform == "win32":
        leader.terminate()
    else:
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGTERM)
    leader.communicate()
