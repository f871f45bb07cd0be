"""The native libraries and the patched llama.cpp compile for Windows, with the same results there.

    apt-get install mingw-w64 wine64
    pytest -m slow tests/native/test_windows.py

The first run compiles llama.cpp, for about ten minutes on two cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from mtp_gguf.server.patches import add_head, apply, read_head_sources, read_patches
from mtp_gguf.server.upstream_source import fetch_archive, unpack_llama_cpp
from support.commands import succeed
from support.native_build import ROOT

SOURCES = ROOT / "tests" / "support" / "windows"
COMPILER = "x86_64-w64-mingw32-g++-posix"
RUNTIME = ("libgcc_s_seh-1.dll", "libstdc++-6.dll", "libwinpthread-1.dll")
# Kernels of ordinary PCs, no program and no test.
OPTIONS = [
    *(f"-DGGML_{name}=ON" for name in ("AVX2", "FMA", "F16C", "BMI2")),
    *(f"-DGGML_{name}=OFF" for name in ("NATIVE", "OPENMP")),
    *(
        f"-DLLAMA_BUILD_{name}=OFF"
        for name in ("APP", "COMMON", "EXAMPLES", "SERVER", "TESTS", "TOOLS")
    ),
    "-DBUILD_SHARED_LIBS=ON",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which(COMPILER), reason=f"no {COMPILER} here"),
    pytest.mark.skipif(not shutil.which("wine"), reason="no wine here"),
]


def call(*words: str | Path, **environment: str) -> str:
    """Run a program; its output."""
    done = subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def compile_for_windows(source: Path, build: Path, *options: str) -> None:
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={SOURCES / 'mingw.cmake'}"
    release = "-DCMAKE_BUILD_TYPE=Release"
    call("cmake", "-S", source, "-B", build, "-G", "Ninja", release, toolchain, *options)
    call("cmake", "--build", build, "--parallel", "2")


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the smoke program for Windows and the libraries that it needs."""
    folder = tmp_path_factory.mktemp("windows")
    tree, prefix, program = folder / "llama.cpp", folder / "prefix", folder / "program"
    unpack_llama_cpp(fetch_archive(), tree)
    apply(read_patches(), tree)
    add_head(read_head_sources(), tree)
    compile_for_windows(tree, folder / "build", *OPTIONS, f"-DCMAKE_INSTALL_PREFIX={prefix}")
    call("cmake", "--install", folder / "build")
    compile_for_windows(
        SOURCES,
        folder / "smoke",
        f"-DCMAKE_PREFIX_PATH={prefix}",
        "-DCMAKE_FIND_ROOT_PATH_MODE_PACKAGE=BOTH",
    )
    program.mkdir()
    for file in [*prefix.rglob("*.dll"), *(folder / "smoke").rglob("*.dll")]:
        shutil.copy(file, program)
    for name in RUNTIME:
        shutil.copy(call(COMPILER, f"-print-file-name={name}").strip(), program)
    shutil.copy(folder / "smoke" / "smoke.exe", program)
    return program


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke program for this system."""
    build = tmp_path_factory.mktemp("here")
    prefix = f"-DCMAKE_PREFIX_PATH={sysconfig.get_path('purelib')}"
    call("cmake", "-S", SOURCES, "-B", build, "-DCMAKE_BUILD_TYPE=Release", prefix)
    call("cmake", "--build", build, "--parallel", "2")
    return build / "smoke"


def test_the_same_results_under_wine(
    windows: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, empty = tmp_path / "demo.gguf", tmp_path / "empty"
    succeed("demo", "-n", "1", "-o", model)
    empty.write_bytes(b"")
    words = [str(model), str(empty)]
    shutil.copy(model, "grün.gguf")
    wine = {"WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all", "WINEPATH": str(windows)}
    found = call("wine", windows / "smoke.exe", *words, **wine)
    libraries = Path(sysconfig.get_path("purelib")) / "llama_cpp" / "lib"
    expected = call(here, *words, LD_LIBRARY_PATH=str(libraries))
    assert found.splitlines() == expected.splitlines()
    assert "drafts accepted 0" not in found
    assert (tmp_path / "grün.index").exists()
