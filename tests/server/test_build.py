"""Keeping builds: what they are called, when they count as finished, what failing looks like.

cmake is a stand-in here, which makes the files that ninja would; `test_real_server.py` runs what
the real one makes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import Result

from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.gguf_tools.machine.system import shared_library
from mtp_gguf.server import build as module
from mtp_gguf.server import patches, upstream_source
from mtp_gguf.server.build import TARGETS, cmake_options
from mtp_gguf.server.patches import APPLIES, CONFLICTS, SUPERSEDED, Addition, apply, fit
from mtp_gguf.server.upstream_source import Base, base, unpack_llama_cpp
from support.commands import check_refusal, invoke, spawn
from support.serving import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
PATCH = Addition(
    "0001-more.patch",
    b"--- a/src/a.txt\n+++ b/src/a.txt\n@@ -1 +1,2 @@\n one\n+two\n"
    b"--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+new\n",
)
# Notes its arguments, and makes programs in DIR/bin for `cmake --build DIR`.
CMAKE = """#!/bin/sh
echo "$@" >> "$CMAKE_CALLS"
if [ "$1" != --build ]; then echo configured; exit 0; fi
echo "[1/4] Building a"
if [ -n "$CMAKE_HANG" ]; then
    echo $$ > "$CMAKE_HANG.new"; mv "$CMAKE_HANG.new" "$CMAKE_HANG"; sleep "${CMAKE_PAUSE:-60}"
fi
if [ -n "$CMAKE_FAIL" ]; then echo "a.cpp:1: error: no such thing"; exit 2; fi
mkdir -p "$2/bin"
if [ -n "$CMAKE_GPU" ]; then touch "$2/bin/lib$CMAKE_GPU.so" "$2/bin/lib$CMAKE_GPU.dylib"; fi
for name in ggml-base ggml-cpu ggml llama; do
    for file in "lib$name.so" "lib$name.dylib" "$name.dll"; do echo "$name" > "$2/bin/$file"; done
done
case "$*" in *llama-server*) echo "#!/bin/sh" > "$2/bin/llama-server";; esac
mkdir -p "$2/tools/ui"
echo "#define LLAMA_UI_HAS_ASSETS ${CMAKE_PAGE:-}" > "$2/tools/ui/ui.h"
echo "[4/4] Linking"
"""
HOOK = """
from pathlib import Path
from mtp_gguf.server import build, upstream_source
from mtp_gguf.server.patches import Addition
base = upstream_source.Base{base}
build.base = upstream_source.base = lambda *_: base
build.read_patches = lambda *_: [Addition{patch}]
"""


class Machine:
    """A cache of its own, a stand-in for cmake, and a source distribution of two files."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tools = root / "tools"
        tools.mkdir()
        for name, text in (("cmake", CMAKE), ("ninja", "#!/bin/sh\n")):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.calls = root / "calls"
        self.cache = root / "cache" / "mtp-gguf" / "server"
        self.libraries = root / "cache" / "mtp-gguf" / "libraries"
        monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        monkeypatch.setenv("CMAKE_CALLS", str(self.calls))
        monkeypatch.delenv("CMAKE_ARGS", raising=False)
        self.archive = root / "sdist.tar.gz"
        self._pack(self.archive)
        digest = hashlib.sha256(self.archive.read_bytes()).hexdigest()
        self.base = Base("1.2.3", digest, "0123456789abcdef")
        for owner in (module, upstream_source):
            monkeypatch.setattr(owner, "base", lambda *_: self.base)
        monkeypatch.setattr(module, "read_patches", lambda *_: [PATCH])

    def _pack(self, path: Path) -> None:
        root = "llama_cpp_python-1.2.3/vendor/llama.cpp"
        files = {f"{root}/src/a.txt": b"one\n", f"{root}/.git": b"gitdir: elsewhere\n"}
        with tarfile.open(path, "w:gz") as tar:
            for name, data in {**files, "llama_cpp_python-1.2.3/PKG-INFO": b""}.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))

    def build(self, *options: object) -> Result:
        return invoke("build-server", "--sdist", self.archive, *options)

    def start(self) -> subprocess.Popen[str]:
        """The same in a process of its own."""
        words = ("build-server", "--sdist", self.archive)
        return spawn(*words, prelude=self.prelude, start_new_session=True)

    @property
    def prelude(self) -> str:
        """The same machine for a process of its own."""
        b = self.base
        return HOOK.format(base=(b.version, b.sha256, b.commit), patch=(PATCH.name, PATCH.data))

    def folders(self) -> list[Path]:
        """The server's builds, finished or not."""
        return sorted(entry for entry in self.cache.glob("*") if entry.is_dir())

    def build_libraries(
        self, target: Path, said: list[str] | None = None, *, portable: bool = False
    ) -> list[str]:
        """Put the libraries into `target`; the names of its files."""
        report = said.append if said is not None else lambda _: None
        module.build_libraries(target, self.archive, None, report, portable=portable)
        files = [path for path in target.rglob("*") if path.is_file()]
        return sorted(str(file.relative_to(target)) for file in files)

    def targets(self) -> list[str]:
        """What each call of cmake that built something was asked for."""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [call.partition("--target ")[2] for call in calls if "--target" in call]


def failed(result: Result) -> tuple[int, str]:
    """Exit code and message; the lines before the message say what was being done."""
    return result.exit_code, result.stderr.splitlines(keepends=True)[-1]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_build_is_made_once_and_named(machine: Machine) -> None:
    check_refusal(*failed(invoke("build-server", "--where")), "mtp-gguf build-server")
    result = machine.build("-j", 2)
    assert result.exit_code == 0, result.output
    server, libraries = map(Path, result.stdout.splitlines())
    assert server.is_file()
    assert server.parent == libraries
    (root,) = machine.folders()
    assert libraries == root / "bin"
    calls = machine.calls.read_text().splitlines()
    assert len(calls) == 2
    assert "-DGGML_RPC=ON" in calls[0]
    for target in TARGETS:
        assert target in calls[1]
    assert calls[1].endswith("--parallel 2")
    notes = made_from(result.stdout)
    assert notes["patches"] == [PATCH.name]
    assert notes["llama-cpp-python"] == "1.2.3"

    assert machine.build().stdout == where() == result.stdout
    assert len(machine.calls.read_text().splitlines()) == 2


def made_from(stdout: str) -> Any:
    """What the notes of a build say, by the output of the command."""
    return json.loads((Path(stdout.splitlines()[1]).parent / "build.json").read_text())


def where() -> str:
    """The build that commands use."""
    return invoke("build-server", "--where").stdout


def test_options_make_another_build_and_the_one_asked_for_last_is_used(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine.build().stdout
    second = machine.build("--cmake-args", "-DGGML_CUDA=ON -DX='a b'").stdout
    assert machine.calls.read_text().splitlines()[2].endswith("-DGGML_CUDA=ON -DX=a b")
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_LTO=ON")
    third = machine.build().stdout
    assert len({first, second, third}) == 3
    assert where() == third
    monkeypatch.delenv("CMAKE_ARGS")
    assert machine.build().stdout == first == where()


def test_your_own_patches_are_applied_after_ours(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.patch"
    own.write_text("--- a/src/a.txt\n+++ b/src/a.txt\n@@ -1,2 +1,3 @@\n one\n two\n+three\n")
    plain = machine.build().stdout
    monkeypatch.setenv("MTP_GGUF_PATCHES", str(own))
    patched = machine.build().stdout
    assert patched != plain
    assert made_from(patched)["patches"] == [PATCH.name, "own.patch"]
    monkeypatch.delenv("MTP_GGUF_PATCHES")  # commands find it without the variable
    assert where() == patched
    monkeypatch.setenv("MTP_GGUF_PATCHES", str(tmp_path / "none"))
    assert failed(machine.build()) == (
        1,
        f"mtp-gguf: MTP_GGUF_PATCHES: {tmp_path / 'none'}: No such file or directory\n",
    )


def test_another_base_is_another_build_and_the_last_one_is_used(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Addition("0002-other.patch", PATCH.data)
    monkeypatch.setattr(module, "read_patches", lambda name: [PATCH if name == "pin" else other])
    pinned = machine.build().stdout
    newer = machine.build("--base", "b11549").stdout
    assert newer != pinned
    assert where() == newer
    refused = machine.build("--base", "b1")
    message = "--base: expected pin or b11549, found 'b1'"
    check_refusal(refused.exit_code, refused.stderr, message, code=2)


def test_a_patch_that_no_other_one_needs_can_be_left_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    optional = Addition("0016-more.patch", PATCH.data)
    monkeypatch.setattr(module, "read_patches", lambda *_: [optional])
    whole = machine.build().stdout
    part = machine.build("--without", "0016").stdout
    assert part != whole
    build = module.Build(Path(part.splitlines()[1]).parent)
    notes = made_from(part)
    assert (notes["patches"], notes["without"]) == ([], ["0016"])
    assert build.origin == "llama.cpp 0123456789abcdef, without 0016"
    refused = machine.build("--without", "0106")
    message = "--without 0106: expected one of the patches that no other one needs: "
    check_refusal(*failed(refused), message)


def test_other_sources_are_built_or_the_patches_that_do_not_fit_are_listed(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    media = Addition("0017-media.patch", PATCH.data)
    monkeypatch.setattr(patches, "read_patches", lambda *_: [media])
    monkeypatch.setattr(module, "read_patches", lambda *_: [media])
    folder = tmp_path / "mine"
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "llama.h").write_text("")
    (folder / "src").mkdir()
    (folder / "src" / "a.txt").write_text("one\n")
    built = invoke("build-server", "--source", folder).stdout
    assert module.Build(Path(built.splitlines()[1]).parent).origin == f"llama.cpp {folder}"
    assert (folder / "src" / "a.txt").read_text() == "one\n"

    (folder / "src" / "a.txt").write_text("other\n")
    result = invoke("build-server", "--source", folder)
    assert result.exit_code == 1
    *_, row, last = result.stderr.splitlines()
    assert row.startswith("0017 conflicts: Everyone whose llama-server has a multimodal model")
    assert last.startswith(f"mtp-gguf: {folder}: 1 of 1 patches do not apply; leave them out")
    assert invoke("build-server", "--source", folder, "--without", "0017").exit_code == 0


def change_the_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Addition(PATCH.name, PATCH.data.replace(b"two", b"2"))
    monkeypatch.setattr(module, "read_patches", lambda *_: [other])


def test_other_patches_make_another_build(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine.build().stdout
    change_the_patches(monkeypatch)
    check_refusal(*failed(invoke("build-server", "--where")))
    assert machine.build().stdout != first


def test_failing_shows_the_end_of_the_log(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CMAKE_FAIL", "1")
    result = machine.build()
    assert result.exit_code == 1
    *_, error, message = result.stderr.splitlines()
    assert error == "a.cpp:1: error: no such thing"
    assert message.startswith("mtp-gguf: cmake failed")
    assert invoke("build-server", "--where").exit_code == 1
    monkeypatch.delenv("CMAKE_FAIL")
    assert machine.build().exit_code == 0
    (root,) = machine.folders()  # the work folder is gone
    assert (root / "build.json").is_file()


def is_built(machine: Machine) -> bool:
    """Build, if the killed processes are gone and their lock with them."""
    return machine.build().exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_is_resumed_and_never_used(
    number: signal.Signals, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "compiling"
    monkeypatch.setenv("CMAKE_HANG", str(mark))
    with machine.start() as process:
        wait_for(mark.exists)
        # A second one meanwhile: it must not build in the same folder.
        check_refusal(*failed(machine.build()), "another process")
        check_refusal(*failed(invoke("build-server", "--clean")), "another process")
        os.killpg(process.pid, number)
        _, stderr = process.communicate(timeout=PATIENCE)
    if number == signal.SIGKILL:  # compilers that outlive us keep the build to themselves
        check_refusal(*failed(machine.build()), "another process")
        os.killpg(int(mark.read_text()), number)
    else:
        assert stderr.splitlines()[-1].startswith("mtp-gguf: interrupted")
    assert invoke("build-server", "--where").exit_code == 1
    (work,) = machine.folders()
    patched = work / "source" / "src" / "a.txt"
    assert patched.read_text() == "one\ntwo\n"
    patched.write_text("kept\n")  # what is prepared is not prepared again

    monkeypatch.delenv("CMAKE_HANG")
    wait_for(lambda: is_built(machine))
    assert invoke("build-server", "--where").exit_code == 0


# Real cmake and ninja build this, with a compiler that does not end.
ENDLESS = """
cmake_minimum_required(VERSION 3.21)
project(endless LANGUAGES NONE)
set(targets {targets})
foreach(target ${{targets}})
    add_custom_target(${{target}})
endforeach()
add_custom_target(compiler
    COMMAND sh -c "echo $$ > compiler.new && mv compiler.new {mark} && exec sleep 600" VERBATIM)
list(GET targets 0 first)
add_dependencies(${{first}} compiler)
"""


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_us_alone_ends_the_compilers(
    name: str, machine: Machine, tmp_path: Path
) -> None:
    for tool in ("cmake", "ninja"):
        (tmp_path / "tools" / tool).unlink()
    mark = tmp_path / "compiling"
    with machine.start() as process:
        # Without its file, cmake fails, and the sources are there.
        process.communicate(timeout=60)
    (work,) = machine.folders()
    text = ENDLESS.format(targets=" ".join(TARGETS), mark=mark)
    (work / "source" / "CMakeLists.txt").write_text(text)
    with machine.start() as process:
        wait_for(mark.exists)
        compiler = psutil.Process(int(mark.read_text()))
        process.send_signal(getattr(signal, name))
        _, stderr = process.communicate(timeout=PATIENCE)
    assert stderr.splitlines()[-1].startswith("mtp-gguf: interrupted")
    compiler.wait(timeout=PATIENCE)  # until init has noticed, too


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_an_install_ends_the_compilers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """server/make_libraries.py alone gets it, whose sources are there already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    source = module._work_folder(module.library_options(), module.Sources()) / "source"
    source.mkdir(parents=True)
    mark = tmp_path / "compiling"
    text = ENDLESS.format(targets=" ".join(module.LIBRARIES), mark=mark)
    (source / "CMakeLists.txt").write_text(text)
    script = ROOT / "server" / "make_libraries.py"
    command = [sys.executable, "-S", str(script), "libraries", str(tmp_path / "made")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_for(mark.exists)
        compiler = psutil.Process(int(mark.read_text()))
        process.send_signal(getattr(signal, name))
        stdout, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert stdout.splitlines()[-1].startswith("mtp-gguf: interrupted")
    compiler.wait(timeout=PATIENCE)


def test_a_build_with_a_gpu_backend_is_used_before_one_without(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the other one is newer: it would be a slower server, and nobody would know."""
    monkeypatch.setenv("CMAKE_GPU", "ggml-cuda")
    gpu = machine.build("--cmake-args", "-DGGML_CUDA=ON").stdout
    monkeypatch.delenv("CMAKE_GPU")
    later = machine.build()
    assert later.stdout != gpu
    said = later.stderr.splitlines()[-1]
    assert f"commands go on using {gpu.splitlines()[0]}, which has cuda" in said
    assert f"--llama-server {later.stdout.splitlines()[0]} selects this one" in said
    assert where() == gpu
    assert "commands go on" in machine.build().stderr
    assert "commands go on" not in machine.build("--cmake-args", "-DGGML_CUDA=ON").stderr


def test_each_cpu_uses_its_own_build(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that share a home folder: ggml compiles for the CPU that it is compiled on."""

    def on(features: str) -> None:
        monkeypatch.setattr("mtp_gguf.server.build.cpu_features", lambda: features)

    on("sse2 avx2 avx512f smep")
    newer = machine.build().stdout
    on("sse2 avx2")
    assert invoke("build-server", "--where").exit_code
    older = machine.build().stdout
    portable = machine.build("--cmake-args", "-DGGML_NATIVE=OFF").stdout
    assert len({newer, older, portable}) == 3
    on("sse2 avx2 avx512f")  # a new version of the system lists other features
    assert machine.build().stdout == newer
    assert where() == newer
    on("sse2")
    assert where() == portable


def test_clean_removes_what_is_there(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.build()
    monkeypatch.setenv("CMAKE_FAIL", "1")
    machine.build("--cmake-args", "-DX=1")
    assert len(machine.folders()) == 2
    assert len([*machine.libraries.iterdir()]) == 1
    assert invoke("build-server", "--clean").stdout == "removed 3 builds\n"
    assert not machine.cache.parent.exists()
    assert invoke("build-server", "--clean").stdout == "nothing to remove\n"
    sources = machine.cache.with_name("upstream")
    (sources / "llama.cpp-012345678").mkdir(parents=True)
    (sources / "llama_cpp_python-1.2.3.tar.gz").touch()
    assert invoke("build-server", "--clean").stdout == "removed the sources\n"
    assert not sources.exists()
    index = sources.with_name("lookup") / "a.index"
    index.parent.mkdir(parents=True)
    index.touch()
    other = sources.with_name("other")
    other.mkdir()
    machine.build("--cmake-args", "-DX=1")
    said = "removed 1 build and the indexes of lookup files\n"
    assert invoke("build-server", "--clean").stdout == said
    assert [*other.parent.iterdir()] == [other]


def test_a_lock_that_was_removed_is_taken_again(tmp_path: Path) -> None:
    """`clean` removes the file for which another process waits."""
    path, said = tmp_path / "build.lock", threading.Event()
    locked, done = threading.Event(), threading.Event()

    def build() -> None:
        with module._lock(path, lambda _: said.set()):
            locked.set()
            done.wait(20)

    thread = threading.Thread(target=build)
    with module._lock(path):
        thread.start()
        assert said.wait(20)
        path.unlink()
    assert locked.wait(20)
    with pytest.raises(ServerError, match="another process"), module._lock(path):
        pass
    done.set()
    thread.join()


LIBRARIES = [*map(shared_library, ("ggml-base", "ggml-cpu", "llama"))]


def test_libraries_are_made_once_and_the_server_takes_up_their_objects(
    machine: Machine, tmp_path: Path
) -> None:
    assert machine.build_libraries(tmp_path / "one") == ["build.json", *LIBRARIES]
    made_from = json.loads((tmp_path / "one" / "build.json").read_text())
    assert made_from["llama-cpp-python"] == "1.2.3"
    assert made_from["machine"] == platform.machine()
    (work,) = machine.folders()
    assert machine.build_libraries(tmp_path / "two") == ["build.json", *LIBRARIES]
    assert machine.targets() == ["ggml-base ggml-cpu llama"]

    assert machine.build().exit_code == 0
    calls = machine.calls.read_text().splitlines()
    assert len(calls) == 4
    assert all(str(work / "build") in call for call in calls)
    (root,) = machine.folders()
    assert root != work
    machine.build_libraries(tmp_path / "three")
    assert len(machine.targets()) == 2


@pytest.mark.parametrize(
    ("npm", "page", "said"),
    [
        (True, "1", ""),
        (True, "", "has no web page: npm was not there when it was built, or failed"),
        (False, "", "install Node.js, then run `mtp-gguf build-server` again"),
    ],
)
def test_the_web_page_is_built_where_npm_is(
    npm: bool, page: str, said: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where npm cannot build it, llama.cpp builds the server without it."""
    which, found = shutil.which, "npm" if npm else None
    monkeypatch.setattr(
        shutil, "which", lambda name, **kw: found if name == "npm" else which(name, **kw)
    )
    monkeypatch.setenv("CMAKE_PAGE", page)
    result = machine.build()
    assert result.exit_code == 0
    (configured, _) = machine.calls.read_text().splitlines()
    assert f"-DLLAMA_BUILD_UI={'ON' if npm else 'OFF'}" in configured
    assert "-DLLAMA_USE_PREBUILT_UI=OFF" in configured  # it would be downloaded
    assert said in result.stderr
    assert ("install Node.js" in result.stderr) != npm
    told = json.loads(invoke("build-server", "--where", "--json").stdout)
    assert told["web_page"] is bool(page)


def test_what_changes_no_library_compiles_none(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server leaves its libraries, and the head is none of them."""
    machine.build()
    machine.build_libraries(tmp_path / "one")
    monkeypatch.setattr(module, "read_head_sources", lambda: [Addition("head.cpp", b"// new")])
    machine.build_libraries(tmp_path / "two")
    assert len(machine.targets()) == 1


def test_backends_of_gpus_are_not_compiled_for_the_libraries(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of llama-cpp-python, which were compiled with it."""
    gpu = "-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=90 -DGGML_HIP:BOOL=ON -DGGML_BACKEND_DL=ON"
    monkeypatch.setenv("CMAKE_ARGS", f"{gpu} -DGGML_NATIVE=OFF")
    assert machine.build_libraries(tmp_path / "one") == ["build.json", *LIBRARIES]
    configured = machine.calls.read_text().splitlines()[0]
    assert "-DGGML_NATIVE=OFF" in configured
    assert not any(word in configured for word in ("CUDA=", "HIP", "BACKEND_DL"))
    machine.build()
    assert len(machine.folders()) == 2  # the objects of another build are no use to this one
    assert len([*machine.libraries.iterdir()]) == 1


@pytest.mark.parametrize(
    ("arguments", "compiled"),
    [
        ("-DGGML_VULKAN=on", True),
        ("-DGGML_CUDA=on -DGGML_VULKAN:BOOL=1", True),
        ("-DGGML_VULKAN=ON -DGGML_VULKAN=OFF", False),
        ("-DGGML_VULKAN_VALIDATE=ON", False),
    ],
)
def test_a_backend_that_patches_change_is_compiled_if_it_is_asked_for(
    machine: Machine,
    tmp_path: Path,
    arguments: str,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CMAKE_ARGS", arguments)
    monkeypatch.setenv("CMAKE_GPU", "ggml-vulkan")
    vulkan = [shared_library("ggml-vulkan")] if compiled else []
    made = machine.build_libraries(tmp_path / "one")
    assert made == ["build.json", *sorted([*LIBRARIES, *vulkan])]


def test_portable_libraries_have_a_cpu_backend_for_each_variant(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    backend = shared_library("ggml-cpu")
    made = machine.build_libraries(tmp_path / "one", portable=True)
    made_from = json.loads((tmp_path / "one" / "build.json").read_text())
    needs = made_from["cpu variants"]
    assert sorted(["build.json", *LIBRARIES, *(f"{name}/{backend}" for name in needs)]) == made
    assert [*needs] == ["cooperlake", "cascadelake", "haswell"]
    assert set(needs["haswell"]) == {"avx", "avx2", "f16c", "fma", "bmi2"}

    # The libraries come last, for the baseline: SSE 4.2.
    assert machine.targets() == ["ggml-cpu"] * 3 + ["ggml-base ggml-cpu llama"]
    configured = [call for call in machine.calls.read_text().splitlines() if "--build" not in call]
    assert "-DGGML_AVX512_BF16=ON" in configured[0]
    assert all(call.count("-DGGML_NATIVE=OFF") == 1 for call in configured)
    assert re.findall(r"-DGGML_(\w+)=ON", configured[-1].partition("NATIVE")[2]) == ["SSE42"]

    # Another CPU takes them from the cache; libraries for this CPU are others.
    monkeypatch.setattr(module, "cpu_features", lambda: "sse2")
    assert machine.build_libraries(tmp_path / "two", portable=True) == made
    assert len(machine.targets()) == 4
    assert len(machine.build_libraries(tmp_path / "three")) == 4


def test_an_interrupted_portable_build_keeps_its_variants(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    compile_ = module._compile

    def interrupted(work: Path, targets: Sequence[str], *rest: Any) -> None:
        if len(targets) > 1:
            raise KeyboardInterrupt
        compile_(work, targets, *rest)

    monkeypatch.setattr(module, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        machine.build_libraries(tmp_path / "one", portable=True)
    monkeypatch.setattr(module, "_compile", compile_)
    machine.build_libraries(tmp_path / "one", portable=True)
    assert machine.targets() == ["ggml-cpu"] * 2 + ["ggml-base ggml-cpu llama"]


def test_another_cpu_or_other_patches_make_other_libraries(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.build_libraries(tmp_path / "one")
    monkeypatch.setattr(module, "cpu_features", lambda: "sse2")
    machine.build_libraries(tmp_path / "two")
    change_the_patches(monkeypatch)
    machine.build_libraries(tmp_path / "three")
    assert len(machine.targets()) == 3


def test_two_installs_at_once_compile_once(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits for the first, and takes what it made."""
    mark, target = tmp_path / "compiling", tmp_path / "one"
    code = (
        f"{machine.prelude}\nbuild.build_libraries(Path({str(target)!r}), "
        f"Path({str(machine.archive)!r}), None, lambda _: None)"
    )
    monkeypatch.setenv("CMAKE_HANG", str(mark))
    monkeypatch.setenv("CMAKE_PAUSE", "1")
    with subprocess.Popen([sys.executable, "-c", code]) as first:
        wait_for(mark.exists)
        monkeypatch.delenv("CMAKE_HANG")
        said: list[str] = []
        machine.build_libraries(tmp_path / "two", said)
        assert said[0].startswith("waiting for another process")
    assert first.returncode == 0
    assert sorted(file.name for file in target.iterdir()) == ["build.json", *LIBRARIES]
    assert len(machine.targets()) == 1


def test_what_stops_an_install_is_a_sentence_with_the_ways_around_it(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """server/make_libraries.py as CMake runs it: no installed packages (-S), no network."""
    script = ROOT / "server" / "make_libraries.py"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for sdist, expected in (([], "pip could not fetch"), (["other.tar.gz"], "other.tar.gz")):
        command = [sys.executable, "-S", str(script), "libraries", str(tmp_path / "made"), *sdist]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        last = done.stdout.splitlines()[-1]
        assert expected in last
        assert "MTP_GGUF_SDIST=FILE" in last
        assert "MTP_GGUF_LIBRARIES=OFF" in last
        assert done.stderr == ""


def test_a_missing_tool_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sysconfig.get_path", lambda _: "")
    check_refusal(*failed(machine.build()), "cmake", "pip install cmake")


def test_another_file_than_the_pinned_one_is_refused(machine: Machine, tmp_path: Path) -> None:
    other = tmp_path / "other.tar.gz"
    other.write_bytes(machine.archive.read_bytes() + b"\0")
    message = check_refusal(*failed(invoke("build-server", "--sdist", other)), "sha256")
    assert machine.base.sha256 in message
    absent = tmp_path / "absent.tar.gz"
    check_refusal(*failed(invoke("build-server", "--sdist", absent)), "absent.tar.gz")
    assert not any((folder / "build.json").exists() for folder in machine.folders())


def test_the_environment_overrides_ours_and_the_command_line_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_RPC=OFF -DCMAKE_CXX_FLAGS='-O1 -g'")
    options = cmake_options(["-DGGML_RPC=ON"])
    rpc = [option for option in options if option.startswith("-DGGML_RPC")]
    assert rpc == ["-DGGML_RPC=ON", "-DGGML_RPC=OFF", "-DGGML_RPC=ON"]
    assert "-DCMAKE_CXX_FLAGS=-O1 -g" in options


def test_options_that_no_shell_reads_are_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = machine.build("--cmake-args", "-DX='a")
    check_refusal(done.exit_code, done.stderr, "--cmake-args", code=2)
    monkeypatch.setenv("CMAKE_ARGS", '"')
    check_refusal(*failed(machine.build()), "CMAKE_ARGS")


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_metal_is_on_on_apple_alone(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", system)
    assert ("-DGGML_METAL=ON" in cmake_options()) == (system == "darwin")


def test_unpacking_leaves_gits_files_out(machine: Machine, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    unpack_llama_cpp(machine.archive, tree)
    assert [p.relative_to(tree).as_posix() for p in tree.rglob("*")] == ["src", "src/a.txt"]


def test_an_archive_that_leaves_its_folder_is_refused(machine: Machine, tmp_path: Path) -> None:
    evil = tmp_path / "evil.tar.gz"
    with tarfile.open(evil, "w:gz") as tar:
        member = tarfile.TarInfo("llama_cpp_python-1.2.3/vendor/llama.cpp/../../../../../escaped")
        tar.addfile(member)
    (tmp_path / "a").mkdir()
    with pytest.raises(tarfile.OutsideDestinationError):
        unpack_llama_cpp(evil, tmp_path / "a" / "tree")
    assert not (tmp_path / "escaped").exists()


@pytest.mark.parametrize("tool", ["git", "patch"])
@pytest.mark.parametrize("inside_a_repository", [False, True])
def test_patches_apply_exactly_or_not_at_all(
    tool: str, inside_a_repository: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"no {tool} here")
    if inside_a_repository:
        subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    tree = tmp_path / "tree"
    (tree / "src").mkdir(parents=True)
    (tree / "src" / "a.txt").write_text("one\n")
    real = shutil.which
    monkeypatch.setattr("shutil.which", lambda name: real(name) if name == tool else None)
    assert fit(PATCH, tree) == APPLIES
    assert (tree / "src" / "a.txt").read_text() == "one\ntwo\n"
    assert (tree / "new.txt").read_text() == "new\n"
    assert fit(PATCH, tree) == SUPERSEDED
    with pytest.raises(ServerError, match=r"0001-more\.patch"):
        apply([PATCH], tree)
    (tree / "src" / "a.txt").write_text("other\n")
    assert fit(PATCH, tree) == CONFLICTS
    assert (tree / "src" / "a.txt").read_text() == "other\n"


def test_the_base_is_the_pinned_dependency() -> None:
    """One fact in two places, because pip reads no other file: they must agree."""
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert pyproject.count(f"llama-cpp-python=={base().version}") == 2
